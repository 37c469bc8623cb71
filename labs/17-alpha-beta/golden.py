"""What lab 17 must end with: the numbers of a published table, and the same times added up step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

ALPHA, BETA = 5e-6, 200e9  # seconds a step, bytes a second (GB = 10^9), as in the table
KB, MB, GB = 4 << 10, 4 << 20, 1 << 30  # what the table calls 4 KB, 4 MB and 1 GB are powers of two
GRADIENT, COMPUTE = 14 << 30, 0.3  # bytes of a 7B model's bf16 gradients, and seconds of a step's arithmetic

# (cards, bytes): microseconds of a ring and of a tree all-reduce, to one decimal.
TABLE = {
    (4, KB): (30.0, 20.1),
    (4, MB): (61.5, 103.9),
    (4, GB): (8083.1, 21494.8),
    (8, KB): (70.0, 30.1),
    (8, MB): (106.7, 155.8),
    (8, GB): (9465.2, 32242.3),
    (16, KB): (150.0, 40.2),
    (16, MB): (189.3, 207.8),
    (16, GB): (10216.3, 42989.7),
    (64, KB): (630.0, 60.2),
    (64, MB): (671.3, 311.7),
    (64, GB): (11199.6, 64484.5),
}
# cards: milliseconds of the all-reduce of GRADIENT, and its share of a step in per cent, to one decimal.
STEP = {8: (131.6, 30.5), 16: (141.1, 32.0), 64: (148.6, 33.1), 256: (152.3, 33.7)}


def ring_steps(size: int, n: int, times: int = 2) -> float:
    """Seconds of a ring, step by step: `times` rounds (2: all-reduce, 3: ZeRO-3) of n - 1 steps, each with 1/n."""
    return sum(ALPHA + size / n / BETA for _ in range(times) for _ in range(n - 1))


def tree_steps(size: int, n: int) -> float:
    """Seconds of a tree, step by step: what one holds doubles its holders until there are n, and back."""
    seconds, holders = 0.0, 1
    while holders < n:
        seconds, holders = seconds + 2 * (ALPHA + size / BETA), 2 * holders
    return seconds


def crossover(n: int) -> float:
    """Bytes from which a ring is faster than a tree, by halving an interval."""
    low, high = 1.0, 1e12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if ring_steps(middle, n) < tree_steps(middle, n) else (middle, high)
    return high


def invented(sizes: Sequence[int], alpha: float, beta: float) -> list[float]:
    """Times of a link that does exactly what the model says: a fit must give alpha and beta back."""
    return [alpha + size / beta for size in sizes]


def check(what: str, got: Sequence[float], expected: Sequence[float], digits: int | None = None) -> None:
    """End this process at the first number that differs: after rounding to `digits`, or by more than 1e-9 of it."""
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if (abs(g - e) > 1e-9 * abs(e)) if digits is None else (round(g, digits) != e):
            raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")


def check_holds(what: str, got: float, holds: Callable[[float], bool], must: str) -> None:
    """The same for a measured number: end this process if it is not as it must be."""
    if not holds(got):
        raise SystemExit(f"golden mismatch: {what}, element 0: expected {must} got {got:.3g}")
