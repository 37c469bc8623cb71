"""What lab 21 must end with, worked out in one process: a node's table, who sees whom, what loaders yield."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SAMPLES = 8  # in a batch
WIDTH = 1024  # numbers that each local rank writes into its row of the table


def row(node: int, local: int) -> torch.Tensor:
    """What a local rank writes: whole numbers, no two of them alike on all nodes."""
    return torch.arange(WIDTH, dtype=torch.float64) + 1_000_000 * node + 10_000 * local


def table(node: int, nproc: int) -> torch.Tensor:
    """What every rank of the node must then read: the rows of its own node's ranks, and no other's."""
    return torch.stack([row(node, local) for local in range(nproc)])


def neighbours(node: int, nproc: int) -> list[int]:
    """The ranks whose files a rank sees: /dev/shm belongs to a node, and ranks are numbered node by node."""
    return list(range(node * nproc, (node + 1) * nproc))


def batch_sums(rank: int, batches: int, numbers: int) -> list[float]:
    """The sum of each batch of `numbers` that a rank's loader yields, in order; sample i is full of rank + i."""
    firsts = range(0, batches * SAMPLES, SAMPLES)
    return [sum(float(rank + i) for i in range(first, first + SAMPLES)) * numbers / SAMPLES for first in firsts]


def check(what: str, got: Sequence[object], expected: Sequence[object]) -> None:
    """End this process with exit code 1 at the first element that differs."""
    for i in range(max(len(got), len(expected))):
        g, e = (side[i] if i < len(side) else "nothing" for side in (got, expected))
        if g != e:
            raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")
