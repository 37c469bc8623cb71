"""What lab 09 must end with, worked out in one process: which card of its node each rank holds, in each scene."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

SCENES = ("whole", "half", "backwards")


def node(scene: str, per_node: int) -> tuple[int, str | None]:
    """How many cards a node has, and what CUDA_VISIBLE_DEVICES says there, with `per_node` ranks a node."""
    half = [str(card) for card in range(per_node, 2 * per_node)]
    return {
        "whole": (per_node, None),
        "half": (2 * per_node, ",".join(half)),
        "backwards": (2 * per_node, ",".join(reversed(half))),
    }[scene]


def cards(scene: str, world: int, per_node: int) -> list[str]:
    """Node and physical card of each rank, in rank order: a card each, from the first that the job may use."""
    order = {
        "whole": range(per_node),
        "half": range(per_node, 2 * per_node),
        "backwards": range(2 * per_node - 1, per_node - 1, -1),
    }[scene]
    return [f"node {n}, card {card}" for n in range(world // per_node) for card in order]


def check(what: str, got: Sequence[object], expected: Sequence[object]) -> None:
    """End this process with exit code 1 at the first element that differs."""
    for i, (g, e) in enumerate(zip_longest(got, expected)):
        if g != e:
            raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")
