"""Lab 19, threads, seeds, printing: three things that are harmless in one process, and not in many.

    torchrun --standalone --nproc-per-node 2 lab.py
    OMP_NUM_THREADS=$(nproc) torchrun --standalone --nproc-per-node 2 lab.py

One machine's ranks share its cores; ranks that must be alike must be seeded alike; all ranks share one terminal.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import time
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path

import golden
import torch
import torch.distributed as dist

CALLS, SIZE = 2000, 1 << 17  # of an operation that is just large enough for torch to divide it among threads
TRIES, ROUNDS = 6, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["healthy", "seed-per-rank", "everyone-prints"], default="healthy")
    variant = parser.parse_args().variant
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank, world = dist.get_rank(), dist.get_world_size()

    # 1. Threads. Ranks under one kernel share its cores, whatever they call their hosts.
    mine = (Path("/proc/sys/kernel/random/boot_id").read_text(), torch.get_num_threads())
    everyone = gathered(mine)
    cores, here = len(os.sched_getaffinity(0)), [threads for machine, threads in everyone if machine == mine[0]]
    told = os.environ.get("OMP_NUM_THREADS", "not set")
    print(f"rank {rank}: {mine[1]} threads (OMP_NUM_THREADS {told}), {sum(here)} on {cores} cores together", flush=True)
    most = golden.most_threads(cores, len(here))
    fits = sum(here) <= most
    ratio = slowdown(cores) if fits and cores > 1 and len(here) > 1 else None

    # 2. Seeds. Weights must be alike on all ranks; what is drawn for the data must not be.
    model = golden.model(rank if variant == "seed-per-rank" else golden.SEED)  # BROKEN: other weights on every rank
    checksums = gathered(golden.checksum(model))
    augment = torch.Generator().manual_seed(1000 + rank)
    noise = gathered(torch.randn(4, generator=augment).tolist())

    # 3. Printing. The lines are caught here, to be counted, before they are let out.
    out = io.StringIO()
    with redirect_stdout(out):
        for step in range(golden.STEPS):
            loss = model(torch.full((1, 16), step + 1.0)).square().mean()
            if rank == 0 or variant == "everyone-prints":  # BROKEN: the same line from every rank
                print(f"step {step}: loss {loss.item():.4f}")
    print(out.getvalue(), end="", flush=True)
    lines = gathered(out.getvalue().count("\n"))

    dist.barrier()  # compare when all communication is over
    if not fits:
        golden.check("threads of all ranks on this machine", [sum(here)], [most])
    if ratio is not None:
        golden.check(f"slower by {golden.SLOWER} or more with too many threads", [ratio >= golden.SLOWER], [True])
    golden.check("checksum of the parameters, by rank", checksums, [golden.checksum(golden.model(golden.SEED))] * world)
    golden.check("ranks with noise of their own", [len({tuple(n) for n in noise})], [world])
    golden.check("lines printed, by rank", lines, golden.lines(world))
    print(f"golden ok: rank {rank} of {world}: threads fit, weights {checksums[rank]}, {lines[rank]} lines printed")
    dist.destroy_process_group()


def gathered(value: object) -> list:
    """What every rank has, in rank order, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowdown(cores: int) -> float:
    """How many times slower the same work is with a thread a core on every rank; the same number on all ranks."""
    capped = torch.get_num_threads()
    for _ in range(TRIES):  # a busy machine may hide the effect once
        fair, greedy = seconds(capped), seconds(cores)
        torch.set_num_threads(capped)
        ratio = torch.tensor(greedy / fair)
        dist.broadcast(ratio, 0)
        if dist.get_rank() == 0:
            work = f"{CALLS} small operations on every rank: {fair * 1e3:.1f} ms with {capped} thread(s) each"
            print(f"{work}, {greedy * 1e3:.1f} ms with {cores}: {ratio.item():.1f} times slower", flush=True)
        if ratio.item() >= golden.SLOWER:
            break
    return ratio.item()


def seconds(threads: int) -> float:
    """The median time of CALLS operations, all ranks at once."""
    torch.set_num_threads(threads)
    x = torch.ones(SIZE)
    x.mul_(1.0)  # the first call makes the threads
    taken = []
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            x.mul_(1.0)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
