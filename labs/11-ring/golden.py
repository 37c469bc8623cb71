"""What lab 11 must end with, worked out in one process: one sum, and how many bytes and rounds each way to it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def part(rank: int, count: int) -> torch.Tensor:
    """What `rank` puts in: `count` whole numbers, no two ranks alike, whose sum is exact in float32 in any order."""
    return torch.arange(count, dtype=torch.float32).mul_(rank + 1).remainder_(1000)


def total(world: int, count: int) -> torch.Tensor:
    whole = torch.zeros(count)
    for rank in range(world):
        whole += part(rank, count)
    return whole


def ring_bytes(size: int, world: int) -> int:
    """Bytes that each rank sends: (n-1)/n of the data while summing, as much again while handing round."""
    return 2 * (world - 1) * size // world


def tree_bytes(size: int, rank: int, world: int) -> int:
    """All of the data to the parent, if there is one, and to each child: who becomes `rank` without its lowest bit."""
    children = sum(1 for child in range(1, world) if child & (child - 1) == rank)
    return size * ((rank > 0) + children)


def rounds(how: str, world: int) -> int:
    """Messages that follow one another, none of which can start before the one before it has arrived."""
    return {"ring": 2 * (world - 1), "tree": 2 * math.ceil(math.log2(world))}[how]


def check(what: str, got: torch.Tensor | Sequence[int], expected: torch.Tensor | Sequence[int]) -> None:
    """End this process with exit code 1 at the first element that differs."""
    g, e = torch.as_tensor(got), torch.as_tensor(expected)
    for i in (g != e).nonzero().flatten().tolist()[:1]:
        raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e[i].item()} got {g[i].item()}")


def check_wire(what: str, got: int, payload: int) -> None:
    """A NIC counts headers, acknowledgements and barriers as well: 8 % in frames of 1500 bytes, less in large ones."""
    least, most = payload, int(1.1 * payload) + 65536
    if not least <= got <= most:
        raise SystemExit(f"golden mismatch: {what}, element 0: expected {least} to {most} got {got}")
