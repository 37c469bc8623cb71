"""What lab 02 must end with, worked out in one process with a dictionary in the store's place."""

from __future__ import annotations

from collections.abc import Sequence


def hello(rank: int) -> str:
    return f"rank {rank} was here"


def keys(world: int) -> list[str]:
    """Every key that is in the store when all ranks have passed the first barrier."""
    hellos = [f"hello/{rank}" for rank in range(world)]
    tickets = ["tickets", *(f"ticket/{rank}" for rank in range(world))]
    barrier = ["barrier/arrived", "barrier/go1"]
    the_stores_own = ["init/"]  # TCPStore counts in it who has connected
    return hellos + tickets + barrier + the_stores_own


def tickets(world: int) -> list[int]:
    """What `world` calls of add("tickets", 1) return, smallest first: the order is anyone's, the numbers aren't."""
    drawn: list[int] = []
    for _ in range(world):
        drawn.append(len(drawn) + 1)
    return drawn


def counts(world: int, users: list[str]) -> list[int]:
    """What each user's own counter `seen` holds after every rank has added 1 to it."""
    stores: dict[str, dict[str, int]] = {user: {"seen": 0} for user in users}
    for _ in range(world):
        for user in users:
            stores[user]["seen"] += 1
    return [stores[user]["seen"] for user in users]


def check(what: str, got: Sequence[object], expected: Sequence[object]) -> None:
    """End this process with exit code 1 at the first element that differs."""
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if g != e:
            raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e!r} got {g!r}")
