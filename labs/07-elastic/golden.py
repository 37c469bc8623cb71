"""What lab 07 must end with, worked out in one process that nobody interrupts, no torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import nn

STEPS, EVERY = 22, 4  # a checkpoint every EVERY steps; none after the last one, whose loss is not saved
SAMPLES, FEATURES, RATE, MOMENTUM = 24, 6, 0.05, 0.9
TOLERANCE = 1e-12  # of the largest element; float64 leaves 1e-16 a term, a step too many or too few 1e-3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).to(torch.float64)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of one step, whoever works on it: (SAMPLES, FEATURES) and (SAMPLES, 1)."""
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x.sin().sum(dim=1, keepdim=True)


def train() -> list[torch.Tensor]:
    """The loss of the last step, and the parameters after it."""
    whole = model()
    speed = [torch.zeros_like(p) for p in whole.parameters()]
    for step in range(STEPS):
        x, y = batch(step)
        whole.zero_grad()
        loss = (whole(x) - y).square().mean()
        loss.backward()
        with torch.no_grad():
            for p, v in zip(whole.parameters(), speed, strict=True):
                v.mul_(MOMENTUM).add_(p.grad)
                p.sub_(RATE * v)
    return [loss.detach(), *(p.detach() for p in whole.parameters())]


def done_again(step: int) -> int:
    """How many steps are lost if somebody is lost after `step` steps: those since the last checkpoint."""
    return step % EVERY


def worlds(full: int, node_lost: bool) -> list[int]:
    """The size of the world at first, at its least, and at last, on two nodes with one rank each."""
    return [full, 1 if node_lost else full, full]


def check(what: str, got: Sequence[object], expected: Sequence[object]) -> None:
    """End this process with exit code 1 at the first element that differs."""
    for i, (g, e) in enumerate(zip_longest(got, expected)):
        if g != e:
            raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")


def close(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """The same for real numbers, up to TOLERANCE."""
    far = (got - expected).abs().flatten() > TOLERANCE * expected.abs().max()
    for i in far.nonzero().flatten().tolist()[:1]:
        wanted, found = expected.flatten()[i].item(), got.flatten()[i].item()
        raise SystemExit(f"golden mismatch: {what}, element {i}: expected {wanted:.9f} got {found:.9f}")
