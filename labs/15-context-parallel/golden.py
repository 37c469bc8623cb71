"""What lab 15 must end with, worked out in one process: full causal attention with rotary positions, its gradients by
autograd, and how much of it falls to whom."""

from __future__ import annotations

import torch

CHUNK, DIM = 8, 8  # tokens in half a rank's share of the sequence, and numbers in a head


def inputs(world: int) -> tuple[torch.Tensor, ...]:
    """q, k, v and the gradient of the output, each (heads, tokens, DIM) in float64: as many heads as ranks."""
    seeded = torch.Generator().manual_seed(15)
    return tuple(torch.randn(world, 2 * world * CHUNK, DIM, dtype=torch.float64, generator=seeded) for _ in range(4))


def rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn each pair of numbers by an angle that grows with the token's position in the whole sequence."""
    speed = 100.0 ** (-torch.arange(0, DIM, 2, dtype=x.dtype) / DIM)
    angle = positions[:, None].to(x.dtype) * speed
    a, b = x[..., 0::2], x[..., 1::2]
    turned = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())
    return torch.stack(turned, dim=-1).flatten(-2)


def full_attention(world: int) -> dict[str, torch.Tensor]:
    """Output, log-sum-exp and the gradients of q, k and v, for the whole sequence at once."""
    q, k, v, dout = inputs(world)
    for leaf in (q, k, v):
        leaf.requires_grad_()
    everywhere = torch.arange(q.shape[1])
    scores = rope(q, everywhere) @ rope(k, everywhere).mT / DIM**0.5
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    out = torch.softmax(scores, dim=-1) @ v
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return {"out": out.detach(), "lse": torch.logsumexp(scores, dim=-1).detach(), "dq": dq, "dk": dk, "dv": dv}


def costs(method: str, mine: torch.Tensor, world: int) -> torch.Tensor:
    """What a rank that holds the positions `mine` pays forward: pairs of query and key, and numbers sent.

    A query at position p looks at p + 1 keys. With Ulysses a rank does that for all positions and one head in `world`.
    It swaps four tensors once; a ring passes two of them on, all but the last time.
    """
    share, tokens = world * len(mine) * DIM, world * len(mine)
    if method == "ulysses":
        return torch.tensor([tokens * (tokens + 1) // 2, 4 * share * (world - 1) // world])
    return torch.tensor([world * sum(position + 1 for position in mine.tolist()), 2 * share * (world - 1)])


def check(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """End this process with exit code 1 at the first number that differs by more than 1e-12 of the largest one."""
    wrong = (got - expected).abs() > 1e-12 * expected.abs().max().clamp(min=1)
    for i in (wrong | got.isnan()).flatten().nonzero().flatten().tolist()[:1]:
        g, e = (side.flatten()[i].item() for side in (got, expected))
        raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")
