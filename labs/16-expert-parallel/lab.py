"""Lab 16, expert parallel: every rank holds a few experts, and tokens travel to those that the router chose for them.

    torchrun --standalone --nproc-per-node 2 lab.py
    torchrun --standalone --nproc-per-node 4 lab.py --variant order

A token goes out, through one layer, and home again. Nobody knows beforehand how many will come.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path

import golden
import torch
import torch.distributed as dist

ROOM = {"roomy": golden.TOKENS, "tight": 4}  # tokens that a rank may send to one expert


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["healthy", "order", "counts"], default="healthy")
    variant = parser.parse_args().variant

    dist.init_process_group("gloo")
    group = dist.new_group(timeout=timedelta(seconds=5 if variant == "counts" else 60))
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * golden.EACH, (rank + 1) * golden.EACH)  # the experts that live here

    found = {}
    for name, capacity in ROOM.items():
        x, dout = (all_ranks[rank] for all_ranks in golden.tokens(world))
        router, first, second, bias = golden.weights(world)
        leaves = [leaf.requires_grad_() for leaf in (x, router, first[mine].clone(), second[mine].clone())]
        out, kept, dropped, here = moe(*leaves, bias, capacity, group, variant)
        dx, drouter, dfirst, dsecond = torch.autograd.grad(out, leaves, dout)
        # Every rank has the router, so its gradient is a sum. An expert's is complete where the expert lives.
        dist.all_reduce(drouter, group=group)
        grads = {"dx": dx, "drouter": drouter, "dfirst": dfirst, "dsecond": dsecond}
        found[name] = {"out": out.detach(), **grads, "kept": kept, "dropped": dropped, "here": here}

    tables = {name: torch.stack([found[name]["kept"], found[name]["dropped"]]) for name in ROOM}
    for table in tables.values():
        dist.all_reduce(table, group=group)
    if rank == 0:
        report(tables)

    dist.barrier(group)  # compare last: a rank that stopped in between would take its neighbours down
    for name, capacity in ROOM.items():
        whole, got = golden.dense(world, capacity), found[name]
        for what in ("out", "dx", "kept", "dropped"):
            golden.check(f"{name}, {what} of rank {rank}", got[what], whole[what][rank])
        golden.check(f"{name}, drouter", got["drouter"], whole["drouter"])
        for what in ("dfirst", "dsecond"):
            golden.check(f"{name}, {what} of rank {rank}", got[what], whole[what][mine])
        golden.check(f"{name}, tokens that came to rank {rank}", got["here"], whole["kept"].sum(dim=0)[mine])
    print(f"golden ok: rank {rank} equals the dense mixture, forward and backward, roomy and tight", flush=True)
    dist.destroy_process_group()


def moe(x, router, first, second, bias, capacity, group, variant):
    """Route, dispatch, compute, combine; returns the output, tokens kept and dropped by expert, and arrived here."""
    world, experts = dist.get_world_size(), bias.numel()
    gates, choice = torch.softmax(x @ router + bias, dim=-1).topk(golden.TOP, dim=-1)
    gate, expert = gates.flatten(), choice.flatten()  # one entry for each (token, choice)
    token = torch.arange(len(x)).repeat_interleave(golden.TOP)

    # 1. Room: the place of each entry in its expert's queue decides. What finds none is simply not sent.
    place = torch.nn.functional.one_hot(expert, experts).cumsum(0)[torch.arange(len(expert)), expert]
    fits = place <= capacity
    dropped = expert[~fits].bincount(minlength=experts)
    gate, expert, token = gate[fits], expert[fits], token[fits]

    # 2. Sort by expert, which is by rank, and say how many are coming before they come.
    order = expert.argsort(stable=True)
    kept = expert.bincount(minlength=experts)
    counts = torch.empty_like(kept)
    dist.all_to_all_single(counts, kept, group=group)  # from each rank: how many for each of my experts
    out_splits, in_splits = kept.view(world, -1).sum(1).tolist(), counts.view(world, -1).sum(1).tolist()
    if variant == "counts":
        in_splits = out_splits  # BROKEN: as if as many came as went
    arrived = Exchange.apply(x[token[order]], out_splits, in_splits, group)

    # 3. Compute. What arrived is sorted by sender and then by expert; each expert picks its own.
    whose = torch.arange(golden.EACH).repeat(world).repeat_interleave(counts)
    y = torch.zeros_like(arrived)
    for e in range(golden.EACH):
        rows = (whose == e).nonzero().flatten()  # none, for an expert that nobody chose
        y = y.index_copy(0, rows, torch.relu(arrived[rows] @ first[e]) @ second[e])

    # 4. Home again: the same way back, and each to the token that it came from.
    back = Exchange.apply(y, in_splits, out_splits, group)
    home = token[order] if variant != "order" else token  # BROKEN: in the order of tokens, not in that of experts
    out = torch.zeros_like(x).index_add(0, home, back * gate[order, None])
    return out, kept, dropped, whose.bincount(minlength=golden.EACH)


class Exchange(torch.autograd.Function):
    """Rows to each rank, as many as `give` says, and from each as many as `get` says; gradients go the way back."""

    @staticmethod
    def forward(ctx, rows, give, get, group):
        ctx.saved = give, get, group
        came = rows.new_empty(sum(get), rows.shape[1])
        dist.all_to_all_single(came, rows.contiguous(), get, give, group=group)
        return came

    @staticmethod
    def backward(ctx, grad):
        give, get, group = ctx.saved
        return Exchange.apply(grad, get, give, group), None, None, None


def report(tables: dict[str, torch.Tensor]) -> None:
    """Tokens by expert as text, and as pictures where there is a folder for them."""
    for name, (kept, dropped) in tables.items():
        print(f"{name}: at most {ROOM[name]} from a rank to an expert, {kept.sum()} kept, {dropped.sum()} dropped")
        for expert, (k, d) in enumerate(zip(kept.tolist(), dropped.tolist(), strict=True)):
            print(f"  expert {expert:2} on rank {expert // golden.EACH:2} {k:4} {'#' * k}{'.' * d}", flush=True)
        if out := os.environ.get("OUT"):
            series = [{"name": "kept", "values": kept.tolist()}, {"name": "dropped", "values": dropped.tolist()}]
            axes = {"x": "expert", "y": "tokens", "labels": [str(e) for e in range(len(kept))]}
            picture = {"kind": "bars", "title": f"Tokens by expert, {name}", **axes, "series": series}
            Path(out, f"picture-{name}.json").write_text(json.dumps(picture))


if __name__ == "__main__":
    main()
