"""Lab 15, context parallel: one sequence, cut over the ranks. Attention alone must look across the cuts.

    torchrun --standalone --nproc-per-node 2 lab.py
    torchrun --standalone --nproc-per-node 4 lab.py --variant merge

Ulysses swaps tokens for heads; a ring passes keys and values round; zigzag is a ring whose ranks all work as long.
"""

from __future__ import annotations

import argparse

import golden
import torch
import torch.distributed as dist

BROKEN = ["rope", "causal", "merge", "gradients-stay"]
variant = "healthy"
cost = {"pairs": 0, "sent": 0}  # pairs of query and key that this rank looked at, and numbers that it sent


def main() -> None:
    global variant
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["healthy", *BROKEN], default="healthy")
    variant = parser.parse_args().variant

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = torch.arange(2 * world * golden.CHUNK).chunk(2 * world)
    contiguous = [torch.cat([chunks[2 * r], chunks[2 * r + 1]]) for r in range(world)]
    zigzag = [torch.cat([chunks[r], chunks[-1 - r]]) for r in range(world)]  # one early chunk and one late
    methods = {"ulysses": (ulysses, contiguous), "ring": (Ring.apply, contiguous), "zigzag": (Ring.apply, zigzag)}

    found, counts = {}, {}
    for name, (attention, where) in methods.items():
        # Each rank holds its tokens of q, k and v, and turns them by their positions in the whole sequence.
        *leaves, dout = (x[:, where[rank]] for x in golden.inputs(world))
        q, k, v = (leaf.requires_grad_() for leaf in leaves)
        # BROKEN, with rope: every rank believes that it holds the beginning
        positions = where[rank] if variant != "rope" else torch.arange(len(where[rank]))
        cost.update(pairs=0, sent=0)
        out, lse = attention(golden.rope(q, positions), golden.rope(k, positions), v, where)
        counts[name] = list(cost.values())
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        found[name] = {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}

    everyone: list = [None] * world
    dist.all_gather_object(everyone, counts)
    if rank == 0:
        for name in methods:
            pairs, sent = zip(*(costs[name] for costs in everyone), strict=True)
            print(f"{name:8} pairs by rank: {list(pairs)}   numbers sent by each: {sent[0]}", flush=True)

    dist.barrier()  # compare last: a rank that stopped in between would take its neighbours down
    whole = golden.full_attention(world)
    for name, (_, where) in methods.items():
        for what, expected in whole.items():
            golden.check(f"{name}, {what} of rank {rank}", found[name][what], expected[:, where[rank]])
        golden.check(f"{name}, cost", torch.tensor(counts[name]), golden.costs(name, where[rank], world))
    print(f"golden ok: rank {rank} has output, lse, dq, dk and dv of full attention, three ways", flush=True)
    dist.destroy_process_group()


def visible(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Which key may be looked at from which query: none that comes later in the sequence."""
    if variant == "causal":
        keys, queries = torch.arange(len(keys)), torch.arange(len(queries))  # BROKEN: every block like the diagonal
    return keys[None, :] <= queries[:, None]


def scores(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT / golden.DIM**0.5).masked_fill(~seen, -torch.inf)


class Swap(torch.autograd.Function):
    """Cut a tensor along one dimension, give each rank its piece, join what comes in along another."""

    @staticmethod
    def forward(ctx, x, cut, join):
        ctx.dims = cut, join
        pieces = [piece.contiguous() for piece in x.chunk(dist.get_world_size(), cut)]
        got = [torch.empty_like(piece) for piece in pieces]
        dist.all_to_all(got, pieces)
        cost["sent"] += (x.numel() - pieces[0].numel()) * (
            x.dim() == 3
        )  # one piece is one's own; lse is for the lab only
        return torch.cat(got, join)

    @staticmethod
    def backward(ctx, grad):
        cut, join = ctx.dims
        return Swap.apply(grad, join, cut), None, None


def ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Swap so that each rank has all tokens of its share of the heads, attend as on one card, swap back."""
    q, k, v = (Swap.apply(x, 0, 1) for x in (q, k, v))
    seen = visible(torch.cat(where), torch.cat(where))
    cost["pairs"] += int(seen.sum()) * len(q)
    s = scores(q, k, seen)
    return Swap.apply(torch.softmax(s, -1) @ v, 1, 0), Swap.apply(torch.logsumexp(s, -1), 1, 0)


def passed(block: torch.Tensor) -> torch.Tensor:
    """Give the block to the next rank, get the previous one's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    got = torch.empty_like(block)
    cost["sent"] += block.numel()
    for handle in (dist.isend(block, (rank + 1) % world), dist.irecv(got, (rank - 1) % world)):
        handle.wait()
    return got


class Ring(torch.autograd.Function):
    """Queries stay, blocks of keys and values pass by; the softmax over all keys is merged block by block."""

    @staticmethod
    def forward(ctx, q, k, v, where):
        rank, world = dist.get_rank(), dist.get_world_size()
        out, lse, block = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf), torch.stack((k, v))
        for step in range(world):
            seen = visible(where[rank], where[(rank - step) % world])
            cost["pairs"] += int(seen.sum()) * len(q)
            if seen.any():  # a block that lies wholly in the future costs nothing
                s = scores(q, block[0], seen)
                new = torch.logaddexp(lse, torch.logsumexp(s, -1))
                old_share, share = (lse - new).exp(), (s - new[..., None]).exp()
                if variant == "merge":  # BROKEN: both count in full
                    old_share, share = torch.ones_like(lse), torch.softmax(s, -1).nan_to_num()
                out, lse = out * old_share[..., None] + share @ block[1], new
            if step < world - 1:
                block = passed(block)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.where = where
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        rank, world, where = dist.get_rank(), dist.get_world_size(), ctx.where
        dq, block = torch.zeros_like(q), torch.stack((k, v, torch.zeros_like(k), torch.zeros_like(v)))
        delta = (dout * out).sum(-1, keepdim=True)
        for step in range(world):  # gradients of k and v travel with their block, and the last pass brings them home
            p = (scores(q, block[0], visible(where[rank], where[(rank - step) % world])) - lse[..., None]).exp()
            ds = p * (dout @ block[1].mT - delta) / golden.DIM**0.5
            dq += ds @ block[0]
            block[2] += ds.mT @ q
            block[3] += p.mT @ dout
            if variant != "gradients-stay" or step < world - 1:  # BROKEN: dk and dv end with a neighbour
                block = passed(block)
        return dq, block[2], block[3], None


if __name__ == "__main__":
    main()
