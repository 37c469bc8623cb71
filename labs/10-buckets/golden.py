"""What lab 10 must end with, worked out in one process: what shares a parcel, when it leaves, what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import nn

LAYERS, WIDTH, BATCH = 12, 256, 128
BYTES = WIDTH * WIDTH * 8  # of one layer's gradient, float64: 0.5 MiB
TOLERANCE = 1e-12  # of the largest element; float64 leaves 1e-16 a term


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    return nn.Sequential(*layers).to(torch.float64)


def batch(rank: int) -> torch.Tensor:
    """The input of one rank, (BATCH, WIDTH)."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def buckets(iteration: int, cap: int) -> list[list[int]]:
    """The layers in each bucket, in the order in which the buckets leave; `cap` in bytes.

    Iteration 0 has one bucket for all, while DDP learns in which order gradients become ready. From then on layers are
    packed in that order, the last layer first, and a bucket is closed as soon as it holds `cap` bytes or more
    (compute_bucket_assignment_by_size in torch's csrc/distributed/c10d/reducer.cpp).
    """
    if iteration == 0:
        return [list(range(LAYERS))]
    packed: list[list[int]] = [[]]
    for layer in reversed(range(LAYERS)):
        if len(packed[-1]) * BYTES >= cap:
            packed.append([])
        packed[-1].append(layer)
    return packed


def events(iteration: int, cap: int) -> list[str]:
    """What happens in one iteration, in order: a bucket leaves when the last gradient in it is ready, not later."""
    happens: list[str] = []
    waiting = dict(enumerate(buckets(iteration, cap)))
    for layer in reversed(range(LAYERS)):
        happens.append(f"gradient {layer}")
        for number, layers in waiting.items():
            if layer == min(layers):
                happens.append(f"bucket {number} leaves")
    return [*happens, "backward returns", "step returns"]


def gradients(world: int) -> list[torch.Tensor]:
    """The mean over the ranks' batches of every layer's gradient, (WIDTH, WIDTH) each."""
    whole = model()
    for rank in range(world):
        (whole(batch(rank)).square().mean() / world).backward()
    return [p.grad for p in whole.parameters()]


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
        raise SystemExit(f"golden mismatch: {what}, element {i}: expected {wanted:.6e} got {found:.6e}")
