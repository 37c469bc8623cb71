"""What lab 18 must end with, in one process: rounding from the formats' definitions, the scaler's rules in plain
Python, the gradients of a small network by hand, and the memory that they need, counted on paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

import torch

# name: significant binary digits, largest exponent (IEEE 754 binary16; bfloat16 is the upper half of binary32)
FORMATS = {"float16": (11, 15), "bfloat16": (8, 127)}
NUMBERS = (90000.0, 65504.0, 65519.0, 65520.0, 257.0, 1 + 2**-9, 2**-14, 2**-24, 2**-25, 3 * 2**-26)


def rounded(x: float, name: str) -> float:
    """The nearest number that the format has, ties to the even one; infinity beyond its range."""
    digits, top = FORMATS[name]
    unit = 2.0 ** (max(math.frexp(x)[1] - 1, 1 - top) - digits + 1)  # the distance of neighbours around x
    y = round(x / unit) * unit
    return y if y < 2.0 ** (top + 1) else math.inf


# A model of two weights, whose gradient is the sum over ranks of `batch` times TINY: too small for float16 as it is.
STEPS, LOUD, TINY, LR = 10, (2, 5, 6, 9), 2.0**-26, 2.0**18
FIRST_SCALE, GROW_AFTER, CLIP = 2.0**28, 3, 40 * TINY


def batch(step: int, rank: int, world: int) -> list[float]:
    """Small whole numbers; on the last rank, in loud steps, one that is large."""
    k = rank + 1 + step
    return [32768.0 if step in LOUD and rank == world - 1 else 3.0 * k, 4.0 * k]


def trained(world: int, name: str, scaling: bool) -> tuple[list[float], list[float]]:
    """The weights at the end, and the scale after each step: halved and skipped on overflow, doubled after a while."""
    weights, scale, good, scales = [0.0, 0.0], FIRST_SCALE if scaling else 1.0, 0, []
    for step in range(STEPS):
        parts = [batch(step, rank, world) for rank in range(world)]
        if any(math.isinf(rounded(TINY * scale * x, name)) for part in parts for x in part):
            scale, good = scale / 2, 0
        else:
            gradient = [TINY * sum(column) for column in zip(*parts, strict=True)]
            shrink = min(1.0, CLIP / math.hypot(*gradient))
            weights = [w - LR * shrink * g for w, g in zip(weights, gradient, strict=True)]
            good += 1
            if scaling and good == GROW_AFTER:
                scale, good = scale * 2, 0
        scales.append(scale)
    return weights, scales


BLOCKS, ROWS, WIDTH, HIDDEN, SEED = 4, 8, 16, 64, 0
NUMBER = 8  # bytes of a float64


def network() -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Input and weights, float64; each block is x + dropout(relu(x @ w1)) @ w2. Leaves the dice at SEED."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    shapes = ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
    weights = [[torch.randn(s, dtype=torch.float64) / s[0] ** 0.5 for s in shapes] for _ in range(BLOCKS)]
    torch.manual_seed(SEED)
    return x, weights


def gradients() -> list[torch.Tensor]:
    """Of half the sum of squares of the output, for w1, w2 of each block, backward by hand, everything kept."""
    x, weights = network()
    kept = []
    for w1, w2 in weights:
        before = x @ w1
        mask = (torch.rand(ROWS, HIDDEN) < 0.5) * 2.0
        after = before.clamp(min=0) * mask
        kept.append((x, before, mask, after))
        x = x + after @ w2
    flow, found = x, []
    for (w1, w2), (x, before, mask, after) in reversed(list(zip(weights, kept, strict=True))):
        through = flow @ w2.T * mask * (before > 0)
        found += [after.T @ flow, x.T @ through]
        flow = flow + through @ w1.T
    return found[::-1]


def kept_bytes(recompute: bool) -> int:
    """Most bytes that wait for backward at once: of a block its input, relu's result, the mask, and their product."""
    inside, inputs = 3 * ROWS * HIDDEN, BLOCKS * ROWS * WIDTH
    # With recomputation only inputs are kept, and one block's inside at a time. Else all, and the output for the loss.
    return NUMBER * (inputs + inside if recompute else inputs + BLOCKS * inside + ROWS * WIDTH)


def operations(recompute: bool) -> int:
    """Multiplications and additions of all matrix products: forward, twice that for backward, forward once more."""
    return (4 if recompute else 3) * BLOCKS * 2 * (2 * ROWS * WIDTH * HIDDEN)


def check(what: str, got: Sequence[float | str], expected: Sequence[float | str], rel: float = 0.0) -> None:
    """End this process with exit code 1 at the first element that differs by more than `rel` times the largest."""
    limit = rel * max((abs(e) for e in expected if not isinstance(e, str)), default=0.0)
    for i, (g, e) in enumerate(zip_longest(got, expected)):
        if g != e and (isinstance(g, str) or isinstance(e, str) or None in (g, e) or not abs(g - e) <= limit):
            raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")
