"""What lab 08 must end with, worked out in one process: the same training on the whole batch, no torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import nn

FEATURES, PER_RANK, BATCH, EPOCHS, RATE = 6, 24, 8, 2, 0.05
TOLERANCE = 1e-12  # of the largest element; float64 leaves 1e-16 a term, a lost factor or term is 1e-3 and more


def model(seed: int) -> nn.Sequential:
    """The same weights for the same seed; float32, as layers are by default."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


def data(world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (samples, FEATURES) and targets (samples, 1), float64; as many samples a rank whatever the world."""
    noise = torch.Generator().manual_seed(7)
    x = torch.randn(PER_RANK * world, FEATURES, generator=noise, dtype=torch.float64)
    return x, x.sin().sum(dim=1, keepdim=True)


def order(world: int, epoch: int) -> list[list[int]]:
    """The samples that each rank must see in this epoch, in order: one shuffle for all, dealt out like cards."""
    deck = torch.randperm(PER_RANK * world, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [deck[rank::world] for rank in range(world)]


def train(world: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The flat gradient of every step, and the state at the end, of one process that sees the batches of all ranks."""
    whole, (x, y) = model(0).to(torch.float64), data(world)
    gradients = []
    for epoch in range(EPOCHS):
        shards = torch.tensor(order(world, epoch))
        for batch in shards.split(BATCH, dim=1):
            whole.zero_grad()
            (whole(x[batch.flatten()]) - y[batch.flatten()]).square().mean().backward()
            gradients.append(flat(whole))
            with torch.no_grad():
                for p in whole.parameters():
                    p -= RATE * p.grad
    return gradients, whole.state_dict()


def flat(module: nn.Module) -> torch.Tensor:
    """All gradients of a model, one after the other."""
    return torch.cat([p.grad.flatten().clone() for p in module.parameters() if p.grad is not None])


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
        raise SystemExit(f"golden mismatch: {what}, element {i}: expected {wanted:.6f} got {found:.6f}")
