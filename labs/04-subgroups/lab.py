"""Lab 04, subgroups: the world is cut in two directions, and every rank is in one group of each.

    torchrun --standalone --nproc-per-node 4 lab.py

Tensor parallel (tp): neighbours hold slices of one weight matrix and work on the same sample.
Data parallel (dp): ranks at the same place in their tp groups hold the same slice and work on different samples.
With 8 ranks and tp = 2: tp groups 01 23 45 67, dp groups 0246 1357.
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import golden
import torch
import torch.distributed as dist

VARIANTS = ["healthy", "skip-group", "global-src", "global-rank"]
PER = golden.FEATURES_A_RANK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="healthy")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share one weight matrix; must divide the world")
    args = parser.parse_args()

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world = dist.get_rank(), dist.get_world_size()
    tp, samples = args.tp, world // args.tp

    if args.variant == "skip-group" and rank == world - 1:
        print(f"rank {rank} of {world}: needs no groups, goes straight to the barrier", flush=True)
        dist.barrier()  # BROKEN: the others wait for this rank in new_group
        return

    # 1. Make the groups. Every rank makes every group, in the same order, also those that it is not in: a group's
    #    name is a number that each rank counts for itself.
    timeout = timedelta(seconds=5 if args.variant == "skip-group" else 30)
    tp_group = make_mine([list(range(first, first + tp)) for first in range(0, world, tp)], rank, timeout)
    dp_group = make_mine([list(range(place, world, tp)) for place in range(tp)], rank, timeout)

    # 2. Position in a group is another integer than rank, and it is the one to cut data by.
    tp_rank, dp_rank = dist.get_rank(tp_group), dist.get_rank(dp_group)
    pair = torch.tensor([rank + 1.0])
    dist.all_reduce(pair, group=tp_group)  # only the members take part
    place = f"tp {tp_rank} of {tp}, dp {dp_rank} of {samples}"
    print(f"rank {rank} of {world}: {place}, my tp group sums to {pair.item():g}", flush=True)

    # 3. The first of each tp group has the weights; the others get them. src is a global rank, always.
    w = golden.weights(tp) if tp_rank == 0 else torch.zeros(tp * PER, golden.OUTPUTS)
    if args.variant == "global-src":
        dist.broadcast(w, src=0, group=tp_group)  # BROKEN: rank 0 is a member of one tp group only
    else:
        dist.broadcast(w, src=dist.get_global_rank(tp_group, 0), group=tp_group)

    # 4. One layer, split both ways: my slice of the features, of my replica's sample. Then the partial products of
    #    the tp group add up to the layer's output, and those of the dp group to the sum over the batch.
    replica = rank % samples if args.variant == "global-rank" else dp_rank  # BROKEN: looks fair, mixes samples
    mine = slice(tp_rank * PER, (tp_rank + 1) * PER)
    y = golden.batch(world, tp)[replica, mine] @ w[mine]
    dist.all_reduce(y, group=tp_group)
    total = y.clone()
    dist.all_reduce(total, group=dp_group)
    print(f"rank {rank} of {world}: sample {replica} gives {y.tolist()}, the batch {total.tolist()}", flush=True)

    dist.barrier()  # compare last: a rank that stopped in between would take its neighbours down
    with_tp, with_dp = golden.neighbours(rank, world, tp)
    golden.check("ranks of my tp group", dist.get_process_group_ranks(tp_group), with_tp)
    golden.check("ranks of my dp group", dist.get_process_group_ranks(dp_group), with_dp)
    golden.check("sum of my tp group", pair.tolist(), [float(sum(r + 1 for r in with_tp))])
    whole = golden.outputs(world, tp)
    golden.check("output for my sample", y.tolist(), whole[rank // tp].tolist())
    golden.check("sum over the batch", total.tolist(), whole.sum(dim=0).tolist())
    print(f"golden ok: rank {rank} is with {with_tp} in tp and {with_dp} in dp, the split layer is right", flush=True)
    dist.destroy_process_group()


def make_mine(groups: list[list[int]], rank: int, timeout: timedelta) -> dist.ProcessGroup:
    """Make all `groups`, and return the one that this rank is a member of."""
    made = [dist.new_group(ranks, timeout=timeout) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


if __name__ == "__main__":
    main()
