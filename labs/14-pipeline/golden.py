"""What lab 14 must end with, worked out in one process: all layers, the whole batch; and what a schedule must cost."""

from __future__ import annotations

import torch

ROWS, WIDTH = 16, 8  # of the whole batch, which is cut into micro-batches by rows
TOLERANCE = 1e-12  # of the largest element, in float64
NOISE = 0.1  # of a bubble: late wake-ups in passes of 20 and 40 ms; 0.06 was seen with two cores seven times overbooked


def weights(stages: int) -> list[torch.Tensor]:
    """One square matrix for each stage."""
    made = torch.Generator().manual_seed(14)
    return [torch.randn(WIDTH, WIDTH, generator=made, dtype=torch.float64) / WIDTH**0.5 for _ in range(stages)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(141)
    x, y = torch.randn((2, ROWS, WIDTH), generator=made, dtype=torch.float64)
    return x, y


def passes(stages: int) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """Each stage's output for the whole batch, the mean squared error, and the gradient of each weight."""
    whole = [w.requires_grad_() for w in weights(stages)]
    x, y = batch()
    outputs = []
    for w in whole:
        outputs.append(x := torch.tanh(x @ w))
    loss = torch.nn.functional.mse_loss(x, y)
    grads = torch.autograd.grad(loss, whole)
    return [o.detach() for o in outputs], loss.detach(), list(grads)


def bubble(stages: int, micro: int) -> float:
    """The share of the time in which a rank has nothing to do: it waits for P-1 of M+P-1 pairs of passes."""
    return (stages - 1) / (micro + stages - 1)


def live(schedule: str, stage: int, stages: int, micro: int) -> int:
    """Micro-batches whose activations a stage holds at once, at most."""
    return micro if schedule == "gpipe" else min(micro, stages - stage)


def check(what: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """End this process with exit code 1 at the first element that differs by more than `tolerance` of the largest."""
    wrong = ~((got - expected).abs() <= tolerance * expected.abs().max())
    for i in wrong.flatten().nonzero().flatten().tolist()[:1]:
        e, g = expected.flatten()[i].item(), got.flatten()[i].item()
        raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")


def check_number(what: str, got: float, expected: float, tolerance: float = 0.0) -> None:
    if not abs(got - expected) <= tolerance:
        raise SystemExit(f"golden mismatch: {what}, element 0: expected {expected:g} got {got:g}")
