"""Lab 01, one world: every rank puts a number in, every rank gets the sum out.

    torchrun --standalone --nproc-per-node 2 lab.py

Every process runs this same file from top to bottom; they differ by one integer, their rank.
"""

from __future__ import annotations

import argparse
import os
import time

import golden
import torch
import torch.distributed as dist

CALLS = 5
SIZE = 16 << 20  # bytes in each of the large all-reduces: 16 MiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["healthy", "one-rank-short", "wrong-sum"], default="healthy")
    variant = parser.parse_args().variant

    # torchrun has put RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT into the environment: that is all it takes.
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    last = rank == world - 1

    if variant == "one-rank-short" and last:
        print(f"rank {rank} of {world}: nothing to do here, leaving", flush=True)
        return  # BROKEN: the others are about to wait for this rank

    # 1. Two numbers. all_reduce works in place: what goes in is overwritten by the sum over all ranks.
    x = torch.full((2,), rank + 1.0)
    if variant == "wrong-sum" and last:
        dist.all_reduce(x.clone())  # BROKEN: the sum lands in the copy, and x stays what it was
    else:
        dist.all_reduce(x)
    print(f"rank {rank} of {world}: {x.tolist()}", flush=True)

    # 2. Five times 16 MiB, so that there is something to see on the wires.
    seconds = []
    for _ in range(CALLS):
        y = golden.large(rank, SIZE)
        dist.barrier()  # all start together, or we would time the slowest rank's typing above
        start = time.perf_counter()
        dist.all_reduce(y)
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        report(world, int(os.environ["LOCAL_WORLD_SIZE"]), sum(seconds))

    # 3. Compare last: a rank that stopped in between would take its neighbours down, and hide which one was wrong.
    dist.barrier()
    golden.check("sum of two numbers", x, golden.total([golden.small(r) for r in range(world)]))
    expected = golden.large(0, SIZE)
    for r in range(1, world):  # one at a time: 256 ranks' worth at once would be 4 GiB
        expected += golden.large(r, SIZE)
    golden.check("sum of 16 MiB", y, expected)
    print(f"golden ok: rank {rank} holds the sum of {world} ranks, {x.numel() + y.numel():,} numbers equal", flush=True)
    dist.destroy_process_group()


def report(world: int, ranks_a_node: int, seconds: float) -> None:
    """Print speed (MB/s = 10^6 bytes a second) and the payload that each node must put on the wire.

    A ring all-reduce passes 2·(n-1)/n of the data along every edge of the ring (nccl-tests, PERFORMANCE.md). Ranks
    are numbered node by node, so exactly one edge leaves each node, however many ranks it has.
    """
    factor = 2 * (world - 1) / world
    algbw = CALLS * SIZE / seconds / 1e6
    print(f"all_reduce: {CALLS} x 16 MiB in {seconds:.2f} s, algbw {algbw:.0f} MB/s, busbw {algbw * factor:.0f} MB/s")
    payload = f"{CALLS * SIZE * factor / 1e6:.1f} MB = {CALLS} x 16 MiB x 2·({world}-1)/{world}"
    print(f"payload: {payload} {'leaves each node' if world > ranks_a_node else 'stays inside the node'}", flush=True)


if __name__ == "__main__":
    main()
