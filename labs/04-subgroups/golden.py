"""What lab 04 must end with, worked out in one process: who is with whom, and one whole matrix product."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FEATURES_A_RANK, OUTPUTS = 4, 3


def neighbours(rank: int, world: int, tp: int) -> tuple[list[int], list[int]]:
    """The ranks of `rank`'s tp and dp group, from coordinates: rank = dp_index * tp + tp_index."""
    dp_index, tp_index = divmod(rank, tp)
    everyone = range(world)
    return [r for r in everyone if r // tp == dp_index], [r for r in everyone if r % tp == tp_index]


def weights(tp: int) -> torch.Tensor:
    """(features, outputs), whole numbers, so that every sum is exact in float32."""
    return torch.arange(tp * FEATURES_A_RANK * OUTPUTS, dtype=torch.float32).view(-1, OUTPUTS) % 7


def batch(world: int, tp: int) -> torch.Tensor:
    """(samples, features): one sample for each data-parallel replica."""
    samples, features = world // tp, tp * FEATURES_A_RANK
    return torch.arange(samples * features, dtype=torch.float32).view(samples, features) % 11


def outputs(world: int, tp: int) -> torch.Tensor:
    """(samples, outputs), with no splitting at all."""
    return batch(world, tp) @ weights(tp)


def check(what: str, got: Sequence[float], expected: Sequence[float]) -> None:
    """End this process with exit code 1 at the first element that differs."""
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if g != e:
            raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")
