"""What lab 06 must end with, worked out in one process: who is who in a world of `nodes` times `nproc` ranks."""

from __future__ import annotations

from collections.abc import Sequence


def layout(nodes: int, nproc: int) -> list[dict[str, str]]:
    """The numbers that each rank must find in its environment, in rank order: nodes one by one, ranks within."""
    found = []
    for node in range(nodes):
        for local in range(nproc):
            numbers = {"RANK": node * nproc + local, "LOCAL_RANK": local, "GROUP_RANK": node}
            numbers |= {"WORLD_SIZE": nodes * nproc, "LOCAL_WORLD_SIZE": nproc}
            found.append({name: str(number) for name, number in numbers.items()})
    return found


def check(what: str, got: Sequence[object], expected: Sequence[object]) -> None:
    """End this process with exit code 1 at the first element that differs."""
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if g != e:
            raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")
