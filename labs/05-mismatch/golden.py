"""What lab 05 must end with, worked out in one process: two sums, a and b, never mixed up."""

from __future__ import annotations

import torch

NAMES = ("a", "b")


def part(name: str, rank: int) -> torch.Tensor:
    """What `rank` puts into sum `name`: whole numbers, so that the sums are exact; a and b differ in every element."""
    return torch.arange(1.0, 5.0) * (rank + 1) * (1 if name == "a" else 100)


def total(name: str, world: int) -> torch.Tensor:
    return torch.stack([part(name, rank) for rank in range(world)]).sum(dim=0)


def check(what: str, got: list[float], expected: list[float]) -> None:
    """End this process with exit code 1 at the first element that differs."""
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if g != e:
            raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")
