"""Lab 21, shared memory: /dev/shm is a file system in memory that the processes of one node share. What fills it?

    torchrun --standalone --nproc-per-node 2 lab.py

It has a size. Containers give it 64 MiB, and whoever writes beyond that is not told by an exception.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import golden
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

SHM = Path("/dev/shm")
MiB = 1 << 20
BATCHES, BATCH = 6, 24 * MiB  # of each rank's loader, and bytes in each batch
WORKERS, PREFETCH = 2, 2


class Numbers(Dataset):
    """Sample i of a rank is full of rank + i."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return BATCHES * golden.SAMPLES

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((BATCH // golden.SAMPLES // 4,), float(self.rank + i))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["healthy", "big-table"], default="healthy")
    variant = parser.parse_args().variant

    dist.init_process_group("gloo")
    rank, node, local = dist.get_rank(), int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])
    nproc = int(os.environ["LOCAL_WORLD_SIZE"])
    run = [os.urandom(4).hex()]
    dist.broadcast_object_list(run)  # one name for all ranks of this run, so that no other's files are met
    if local == 0:
        size, used = space()
        print(f"node {node}: /dev/shm has {size / MiB:.0f} MiB, {used / MiB:.0f} MiB of it used", flush=True)

    # 1. Who sees whose? Every rank leaves a file, then all look.
    mark = SHM / f"lab21-{run[0]}-rank-{rank}"
    mark.touch()
    dist.barrier()
    seen = sorted(int(path.name.split("-")[-1]) for path in SHM.glob(f"lab21-{run[0]}-rank-*"))
    print(f"rank {rank} on node {node} sees the files of ranks {seen}", flush=True)

    # 2. A table that the ranks of a node share: one file, which each maps into its memory. No message is sent.
    name = SHM / f"lab21-{run[0]}-table"
    rows = nproc if variant == "healthy" else 96 * MiB // 8 // golden.WIDTH  # BROKEN: 96 MiB, in one file
    numbers = rows * golden.WIDTH
    table = torch.from_file(str(name), shared=True, size=numbers, dtype=torch.float64).view(rows, golden.WIDTH)
    table[local] = golden.row(node, local)
    if variant == "big-table":
        table[nproc:] = 1.0  # making the file cost nothing; writing takes pages, and there are none left
    dist.barrier()
    held = table.clone()
    dist.barrier()
    for path in (mark, name):
        path.unlink(missing_ok=True)  # the name goes, the memory stays until the last map of it is gone
    del table

    # 3. A DataLoader's workers hand their batches over in /dev/shm, and work ahead. How much of it is that?
    dist.barrier()
    before = space()[1]
    dist.barrier()
    loader = DataLoader(Numbers(rank), golden.SAMPLES, num_workers=WORKERS, prefetch_factor=PREFETCH)
    sums, peak = [], 0
    for batch in loader:
        peak = peak if sums else ahead(before)
        sums.append(batch.sum(dtype=torch.float64).item())
    dist.barrier()
    if local == 0:
        most = nproc * (WORKERS * PREFETCH + 1) * BATCH
        print(f"node {node}: loaders took {peak / MiB:.0f} MiB of /dev/shm; at most", end=" ")
        print(f"{nproc} ranks x ({WORKERS} workers x {PREFETCH} ahead + 1 in hand) = {most / MiB:.0f} MiB", flush=True)

    golden.check(f"ranks that rank {rank} sees", seen, golden.neighbours(node, nproc))
    golden.check(f"table of node {node}", held[:nproc].flatten().tolist(), golden.table(node, nproc).flatten().tolist())
    golden.check("sum of each batch", sums, golden.batch_sums(rank, BATCHES, BATCH // 4))
    golden.check(f"loaders hold {WORKERS * PREFETCH} batches in /dev/shm", [peak >= WORKERS * PREFETCH * BATCH], [True])
    print(
        f"golden ok: rank {rank} shares with ranks {seen}, {len(sums) + held[:nproc].numel():,} numbers equal",
        flush=True,
    )
    dist.destroy_process_group()


def space() -> tuple[int, int]:
    """Size and used bytes of /dev/shm. `ls` shows less: torch takes the name off its files as soon as they are open."""
    shm = os.statvfs(SHM)
    return shm.f_frsize * shm.f_blocks, shm.f_frsize * (shm.f_blocks - shm.f_bfree)


def ahead(before: int) -> int:
    """Bytes used beyond `before`, once the workers are as far ahead as they may be, or after 10 s."""
    end = time.monotonic() + 10
    while (used := space()[1] - before) < WORKERS * PREFETCH * BATCH and time.monotonic() < end:
        time.sleep(0.01)
    return used


if __name__ == "__main__":
    main()
