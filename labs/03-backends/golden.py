"""What lab 03 must end with, worked out in one process on a table of numbers: row r is what rank r puts in.

Every operation is a different way of reading one table, so its definition is one line here.
"""

from __future__ import annotations

Row = list[float]


def row(rank: int, world: int) -> Row:
    """What `rank` puts in; element i is meant for rank i, where the operation cares."""
    return [100.0 * rank + i + 1 for i in range(world)]


def results(rank: int, world: int) -> dict[str, Row]:
    """What `rank` holds after each operation. Root is rank 0, except for broadcast: the last rank."""
    table = [row(r, world) for r in range(world)]
    columns = [list(column) for column in zip(*table, strict=True)]
    sums = [sum(column) for column in columns]
    everything = [number for r in table for number in r]
    at_root = rank == 0
    return {
        "broadcast": table[world - 1],
        "all_reduce SUM": sums,
        "all_reduce MAX": [max(column) for column in columns],
        "reduce": sums if at_root else [],
        "gather": everything if at_root else [],
        "all_gather": everything,
        "all_gather_into_tensor": everything,
        "scatter": [table[0][rank]],
        "reduce_scatter_tensor": [sums[rank]],
        "all_to_all_single": columns[rank],
        "send / recv": table[(rank - 1) % world],
        "isend / irecv": table[(rank + 1) % world],
        "barrier": [float(world)],
    }


def check(what: str, got: Row, expected: Row) -> None:
    """End this process with exit code 1 at the first element that differs."""
    if len(got) != len(expected):
        raise SystemExit(f"golden mismatch: {what}: expected {len(expected)} elements got {len(got)}")
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if g != e:
            raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")
