"""What lab 16 must end with, worked out in one process: a dense mixture of experts. Every expert sees every token, and
what the router did not choose, or what found no room, counts nothing."""

from __future__ import annotations

import torch

TOKENS, DIM, HIDDEN = 16, 8, 12  # tokens of each rank, numbers in a token, and in an expert's hidden layer
EACH, TOP = 2, 2  # experts on each rank, and experts that a token goes to


def tokens(world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank's tokens and the gradients of what becomes of them, each (ranks, TOKENS, DIM) in float64."""
    seeded = torch.Generator().manual_seed(16)
    x, dout = torch.randn(2, world, TOKENS, DIM, dtype=torch.float64, generator=seeded)
    return x, dout


def weights(world: int) -> tuple[torch.Tensor, ...]:
    """Router (DIM, experts), both layers of every expert, and a bias: all like expert 0, none the last one."""
    seeded, experts = torch.Generator().manual_seed(61), EACH * world
    shapes = (DIM, experts), (experts, DIM, HIDDEN), (experts, HIDDEN, DIM)
    router, first, second = (torch.randn(s, dtype=torch.float64, generator=seeded) / s[-2] ** 0.5 for s in shapes)
    bias = torch.zeros(experts, dtype=torch.float64)
    bias[0], bias[-1] = 2.0, -1e9
    return router, first, second, bias


def dense(world: int, capacity: int) -> dict[str, torch.Tensor]:
    """Output and gradients for all ranks' tokens, and (ranks, experts) tokens kept and dropped.

    Each rank keeps the first `capacity` tokens that it has for an expert, and drops the others.
    """
    (x, dout), (router, first, second, bias) = tokens(world), weights(world)
    leaves = [leaf.requires_grad_() for leaf in (x, router, first, second)]
    gates = torch.softmax(x @ router + bias, dim=-1)
    chosen = gates >= gates.topk(TOP, dim=-1).values[..., -1:]
    kept = chosen & (chosen.cumsum(dim=1) <= capacity)
    each = torch.relu(torch.einsum("rtd,edh->rteh", x, first))
    each = torch.einsum("rteh,ehd->rted", each, second)
    out = ((gates * kept)[..., None] * each).sum(dim=2)
    grads = dict(zip(("dx", "drouter", "dfirst", "dsecond"), torch.autograd.grad(out, leaves, dout), strict=True))
    return {"out": out.detach(), **grads, "kept": kept.sum(dim=1), "dropped": (chosen & ~kept).sum(dim=1)}


def check(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """End this process with exit code 1 at the first number that differs by more than 1e-12 of the largest one."""
    wrong = (got - expected).abs() > 1e-12 * expected.abs().max().clamp(min=1)
    for i in wrong.flatten().nonzero().flatten().tolist()[:1]:
        g, e = (side.flatten()[i].item() for side in (got, expected))
        raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")
