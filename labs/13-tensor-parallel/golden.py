"""What lab 13 must end with, worked out in one process: the whole block, the whole batch, autograd."""

from __future__ import annotations

import torch

SAMPLES, TOKENS, HEADS, HEAD, HIDDEN = 2, 8, 4, 8, 64  # SAMPLES: for each data-parallel replica
WIDTH = HEADS * HEAD
TOLERANCE = 1e-12  # of the largest element; float64 rounds at 1e-16, a missing term is as large as what is there


def weights() -> dict[str, torch.Tensor]:
    """The block's four matrices. qkv is (width, 3, heads, head); the others (in, out); biases are left out."""
    made = torch.Generator().manual_seed(13)
    shapes = {"qkv": (WIDTH, 3, HEADS, HEAD), "out": (WIDTH, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {
        name: torch.randn(shape, generator=made, dtype=torch.float64) / shape[0] ** 0.5
        for name, shape in shapes.items()
    }


def batch(replicas: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, (replicas * SAMPLES, TOKENS, WIDTH) each."""
    made = torch.Generator().manual_seed(131)
    x, y = torch.randn((2, replicas * SAMPLES, TOKENS, WIDTH), generator=made, dtype=torch.float64)
    return x, y


def block(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """One transformer block with causal attention, written with loops and one head at a time."""
    normed = torch.nn.functional.layer_norm(x, x.shape[-1:])
    outs = []
    for head in range(HEADS):
        q, k, v = (normed @ w["qkv"][:, i, head] for i in range(3))
        scores = q @ k.transpose(1, 2) / HEAD**0.5
        ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        outs.append(torch.softmax(scores.masked_fill(ahead, float("-inf")), dim=-1) @ v)
    x = x + torch.cat(outs, dim=-1) @ w["out"]
    normed = torch.nn.functional.layer_norm(x, x.shape[-1:])
    return x + torch.relu(normed @ w["up"]) @ w["down"]


def passes(replicas: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The block's output, and the gradients of the mean squared error for the input and for each weight."""
    w = {name: value.requires_grad_() for name, value in weights().items()}
    x, target = batch(replicas)
    y = block(x.requires_grad_(), w)
    torch.nn.functional.mse_loss(y, target).backward()
    grads = {name: value.grad for name, value in w.items() if value.grad is not None}
    assert x.grad is not None
    return y.detach(), x.grad, grads


def crossings(sequence: bool) -> list[int]:
    """Calls in forward; then all_reduce, all_gather, reduce_scatter in both passes. Each half of the block is entered
    and left once in each pass; a whole sequence needs no call to enter in forward, and none to leave in backward."""
    return [4, 0, 4, 4] if sequence else [2, 4, 0, 0]


def sent(tp: int) -> int:
    """Bytes that a rank sends in forward and backward, either way: four all-reduces, or four halves of each kind."""
    return 4 * 2 * SAMPLES * TOKENS * WIDTH * 8 * (tp - 1) // tp


def check_counts(what: str, got: list[int], expected: list[int]) -> None:
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if g != e:
            raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")


def check(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """End this process with exit code 1 at the first element that differs by more than TOLERANCE of the largest."""
    if got.shape != expected.shape:
        raise SystemExit(f"golden mismatch: {what}, element 0: expected shape {expected.shape} got {got.shape}")
    wrong = ~((got - expected).abs() <= TOLERANCE * expected.abs().max())
    for i in wrong.flatten().nonzero().flatten().tolist()[:1]:
        e, g = expected.flatten()[i].item(), got.flatten()[i].item()
        raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")
