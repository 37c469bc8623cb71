"""Lab 13, tensor parallel: one transformer block whose weights are cut up over two ranks, forward and backward.

    torchrun --standalone --nproc-per-node 4 lab.py
    torchrun --standalone --nproc-per-node 2 lab.py --variant no-all-reduce

First matrix by columns, second by rows: between the two, a rank needs nothing from others, and its product is one
summand of the output. So each half of the block (attention, MLP) ends in one all-reduce. With more than two ranks,
the rest of the world is data parallel: a mesh of replicas x 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import timedelta

import golden
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

VARIANTS = ["healthy", "no-all-reduce", "wrong-dim", "wrong-dim-quiet"]
CUTS = {"qkv": 2, "out": 0, "up": 1, "down": 0}  # the dimension along which each weight is cut; qkv's is its heads
KINDS = ["all_reduce", "all_gather", "reduce_scatter"]


class Crossing:
    """What crosses between the ranks of one tensor-parallel group; counts calls of each kind, and bytes sent."""

    def __init__(self, group: dist.ProcessGroup, variant: str) -> None:
        self.group, self.variant, self.calls, self.sent = group, variant, dict.fromkeys(KINDS, 0), 0
        self.size = dist.get_world_size(group)

    def count(self, kind: str, whole: torch.Tensor) -> None:
        """(n-1)/n of the whole tensor leave each rank, of an all-reduce twice that (lab 11)."""
        self.calls[kind] += 1
        self.sent += (2 if kind == "all_reduce" else 1) * whole.nbytes * (self.size - 1) // self.size

    def same(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.count("all_reduce", x)
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Put together what is cut by tokens (dimension 1)."""
        x = x.contiguous()
        dist.all_gather(parts := [torch.empty_like(x) for _ in range(self.size)], x, group=self.group)
        self.count("all_gather", whole := torch.cat(parts, dim=1))
        return whole

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, and keep my tokens (dimension 1)."""
        self.count("reduce_scatter", x)
        parts = torch.stack(x.chunk(self.size, dim=1))
        dist.all_to_all_single(theirs := torch.empty_like(parts), parts, group=self.group)
        return theirs.sum(dim=0)


class Cross(torch.autograd.Function):
    """A communication with the one that belongs to it in backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, there: Callable, back: Callable) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None


def block(x: torch.Tensor, w: dict[str, torch.Tensor], tp: Crossing, sequence: bool) -> torch.Tensor:
    """The block with this rank's slices of the weights; `sequence`: outside of the matrices, with its slice of tokens.

    What one way does in forward, the other does in backward: a sum becomes a copy, a gather becomes a cut.
    """
    if sequence:
        enter, leave = (tp.all_gather, tp.reduce_scatter), (tp.reduce_scatter, tp.all_gather)
    else:
        enter, leave = (tp.same, tp.all_reduce), (tp.all_reduce, tp.same)
    if tp.variant == "no-all-reduce":
        leave = (tp.same, tp.same)  # BROKEN: takes one summand for the sum

    normed = Cross.apply(torch.nn.functional.layer_norm(x, x.shape[-1:]), *enter)
    samples, tokens, _ = normed.shape
    qkv = torch.einsum("btw,wihd->ibhtd", normed, w["qkv"])  # i: query, key, value; h: this rank's heads
    attended = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, scale=golden.HEAD**-0.5)
    attended = attended.transpose(1, 2).reshape(samples, tokens, -1)
    x = x + Cross.apply(attended @ w["out"], *leave)
    normed = Cross.apply(torch.nn.functional.layer_norm(x, x.shape[-1:]), *enter)
    return x + Cross.apply(torch.relu(normed @ w["up"]) @ w["down"], *leave)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="healthy")
    parser.add_argument(
        "--tp", type=int, default=2, help="ranks that share the weights: 1, 2 or 4; must divide the world"
    )
    variant, size = (args := parser.parse_args()).variant, args.tp

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    replicas = world // size
    mesh = init_device_mesh("cpu", (replicas, size), mesh_dim_names=("dp", "tp"))
    replica, place = mesh.get_coordinate()
    cuts = dict(CUTS)
    if variant == "wrong-dim":
        cuts["up"] = 0  # BROKEN: by rows, while the input comes with all its columns: shapes do not fit
    if variant == "wrong-dim-quiet":
        cuts["qkv"] = 3  # BROKEN: half of every head instead of every other head: as many numbers, all shapes fit

    def mine(whole: torch.Tensor, sequence: bool) -> torch.Tensor:
        """My replica's samples, and of these my tokens if the sequence is cut as well."""
        samples = whole.chunk(replicas)[replica]
        return samples.chunk(size, dim=1)[place] if sequence else samples

    results = []
    for sequence in (False, True) if variant == "healthy" else (False,):
        tp = Crossing(mesh.get_group("tp"), variant)
        w = {name: v.chunk(size, cuts[name])[place].clone().requires_grad_() for name, v in golden.weights().items()}
        x, target = (mine(part, sequence).clone() for part in golden.batch(replicas))
        y = block(x.requires_grad_(), w, tp, sequence)
        way, forward = "sequence parallel" if sequence else "tensor parallel", sum(tp.calls.values())
        ((y - target) ** 2).sum().div(golden.batch(replicas)[1].numel()).backward()
        for value in w.values():
            dist.all_reduce(value.grad, group=mesh.get_group("dp"))  # each replica has seen its own samples only
        called = ", ".join(f"{calls} {kind}" for kind, calls in tp.calls.items() if calls)
        print(
            f"rank {rank} of {world}: {way}: {forward} calls in forward, with backward {called}, {tp.sent:,} bytes sent"
        )
        results.append((way, sequence, y.detach(), x.grad, w, forward, tp))

    dist.barrier()  # compare last: a rank that stopped in between would take its neighbours down
    whole_y, whole_dx, grads = golden.passes(replicas)
    for way, sequence, y, dx, w, forward, tp in results:
        golden.check(f"output, {way}", y, mine(whole_y, sequence))
        golden.check(f"gradient of the input, {way}", dx, mine(whole_dx, sequence))
        for name, grad in grads.items():
            golden.check(f"gradient of {name}, {way}", w[name].grad, grad.chunk(size, CUTS[name])[place])
        golden.check_counts(f"calls, {way}", [forward, *tp.calls.values()], golden.crossings(sequence))
        golden.check_counts(f"bytes sent, {way}", [tp.sent], [golden.sent(size)])
    print(f"golden ok: rank {rank} = replica {replica} of {replicas}, slice {place} of {size}, forward and backward")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
