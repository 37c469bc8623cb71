"""Lab 05, mismatch: every rank must make the same calls, in the same order, with the same shapes and types.

    torchrun --standalone --nproc-per-node 2 lab.py
    torchrun --standalone --nproc-per-node 2 lab.py --variant skip
    TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun --standalone --nproc-per-node 2 lab.py --variant shape

Nothing checks that they do: what happens otherwise depends on the way in which they differ. In each broken variant
the last rank alone goes wrong; all others run the healthy lines.
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta

import golden
import torch
import torch.distributed as dist

VARIANTS = ["healthy", "skip", "monitored", "shape", "dtype", "op", "order"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="healthy")
    variant = parser.parse_args().variant

    # Two timeouts: the first rank may wait long for the last one to start, but once all are there, an operation that
    # takes 5 seconds is stuck. gloo's default is 30 minutes, which is why a hang looks like a job doing nothing.
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    group = dist.new_group(timeout=timedelta(seconds=30 if variant == "healthy" else 5))
    rank, world = dist.get_rank(), dist.get_world_size()
    fault = variant if rank == world - 1 else "healthy"
    print(f"rank {rank} of {world}: in, debug level {dist.get_debug_level().name}", flush=True)

    if fault in ("skip", "monitored"):
        time.sleep(20)  # BROKEN: alive and not coming, as behind a slow disk, a dead data loader, a debugger
        return

    if variant in ("healthy", "monitored"):
        # The plain barrier only says that somebody is missing. This one goes through rank 0, and names who.
        dist.monitored_barrier(group, timeout=timedelta(seconds=3), wait_all_ranks=True)

    a, b = golden.part("a", rank), golden.part("b", rank)
    if fault == "shape":
        a = torch.cat([a, a])  # BROKEN: 8 elements here, 4 elsewhere
    if fault == "dtype":
        a = a.to(torch.int32)  # BROKEN: the same 16 bytes, which gloo here adds up as another type than elsewhere

    if fault == "op":
        rows = [torch.empty_like(a) for _ in range(world)]
        dist.all_gather(rows, a, group)  # BROKEN: the others are in an all_reduce
    elif fault == "order":
        dist.all_reduce(b, group=group)  # BROKEN: the others begin with a; shapes match, so nothing can notice
        dist.all_reduce(a, group=group)
    else:
        dist.all_reduce(a, group=group)
        dist.all_reduce(b, group=group)
    print(f"rank {rank} of {world}: a {a.tolist()}, b {b.tolist()}", flush=True)

    dist.barrier(group)  # compare last: a rank that stopped in between would take its neighbours down
    for name, got in zip(golden.NAMES, (a, b), strict=True):
        golden.check(f"sum {name}", got.tolist(), golden.total(name, world).tolist())
    print(f"golden ok: rank {rank} holds both sums, each in its place", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
