"""Lab 11, ring: an all-reduce made by hand from sends and receives, and every byte of it counted.

    torchrun --standalone --nproc-per-node 3 lab.py

The data are cut into n chunks. For n-1 steps each rank passes a chunk to its right and adds what comes from its left:
then each holds one chunk of the sum. For n-1 more steps the finished chunks are handed round.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

import golden
import torch
import torch.distributed as dist

CHUNK = 1 << 18  # numbers in each chunk: 1 MiB of float32


class Wire:
    """All that one rank sends. Counts the bytes, and the rounds: messages that had to wait for the one before."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(), dist.get_world_size()
        self.bytes = self.rounds = 0

    def send(self, out: torch.Tensor, to: int) -> dist.Work:
        self.bytes += out.nbytes
        return dist.isend(out, to, self.group)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        dist.recv(into := torch.empty_like(like), source, self.group)
        return into

    def pass_on(self, out: torch.Tensor, blocking: bool = False) -> torch.Tensor:
        """Send to the right while something of the same size comes from the left."""
        right, left = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        if blocking:
            dist.send(out, right, self.group)  # BROKEN: returns when the neighbour receives, and nobody gets that far
        going = self.send(out, right)
        into = self.receive(out, left)
        going.wait()
        self.rounds += 1
        return into


def ring(x: torch.Tensor, wire: Wire, variant: str) -> None:
    """Sum `x` over all ranks, in place. In step s of the first half, rank r sends chunk r-s and adds to chunk r-s-1."""
    rank, world, chunks = wire.rank, wire.world, x.view(wire.world, -1)
    for step in range(world - 1):
        chunks[(rank - step - 1) % world] += wire.pass_on(chunks[(rank - step) % world], variant == "blocking")
    # The chunk that came last holds all parts. BROKEN: chunk r holds nothing but what this rank put in.
    finished = rank if variant == "off-by-one" else rank + 1
    for step in range(world - 1):
        out = (finished - step) % world
        chunks[(out - 1) % world] = wire.pass_on(chunks[out])


def whole(x: torch.Tensor, wire: Wire, variant: str) -> None:
    """BROKEN: the same sum in half the rounds, but everybody's whole tensor goes all the way round."""
    passing = x.clone()
    for _ in range(wire.world - 1):
        passing = wire.pass_on(passing)
        x += passing


def tree(x: torch.Tensor, wire: Wire, variant: str) -> None:
    """The same sum: up to rank 0 with partners 1, 2, 4, … apart, and down the same way. Few rounds, whole tensors."""
    rank, reaches = wire.rank, [1 << level for level in range((wire.world - 1).bit_length())]
    for reach in reaches:
        if rank % (2 * reach) == reach:
            wire.send(x, rank - reach).wait()
        elif rank % (2 * reach) == 0 and rank + reach < wire.world:
            x += wire.receive(x, rank + reach)
    for reach in reversed(reaches):
        if rank % (2 * reach) == 0 and rank + reach < wire.world:
            wire.send(x, rank + reach).wait()
        elif rank % (2 * reach) == reach:
            x.copy_(wire.receive(x, rank - reach))
    wire.rounds += 2 * len(reaches)


def on_the_nics() -> int:
    """Bytes sent on all NICs but lo, as the kernel of this node counts them: column 9 of /proc/net/dev."""
    rows = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(numbers.split()[8]) for name, numbers in rows if name.strip() != "lo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["healthy", "off-by-one", "blocking", "whole"], default="healthy")
    variant = parser.parse_args().variant
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    group = dist.new_group(timeout=timedelta(seconds=5 if variant == "blocking" else 60))
    rank, world = dist.get_rank(), dist.get_world_size()
    size = 4 * CHUNK * world
    alone = os.environ["LOCAL_WORLD_SIZE"] == "1" and world > 1  # else ranks share their node's NICs, or use none
    ways = {"ring": whole if variant == "whole" else ring, "tree": tree}
    ways["all_reduce"] = lambda x, wire, _: dist.all_reduce(x, group=wire.group)
    sums, wires, nics = {}, {name: Wire(group) for name in ways}, {}
    for name, way in ways.items():
        x, wire = golden.part(rank, CHUNK * world), wires[name]
        dist.barrier()
        before = on_the_nics()
        way(x, wire, variant)
        dist.barrier()
        sums[name], nics[name] = x, on_the_nics() - before
        sent = f"{wire.bytes:,} sent in {wire.rounds} rounds" if wire.rounds else "not counted"
        seen = f"{nics[name]:,} on its NICs" if alone else "NICs shared, not compared"
        print(f"rank {rank} of {world}: {name} of {size:,} bytes, {sent}, {seen}", flush=True)

    dist.barrier()  # compare last: a rank that stopped in between would take its neighbours down
    for name, got in sums.items():
        golden.check(f"sum by {name}", got, golden.total(world, CHUNK * world))
    wanted = {"ring": golden.ring_bytes(size, world), "tree": golden.tree_bytes(size, rank, world)}
    for name, number in wanted.items():
        got = [wires[name].bytes, wires[name].rounds]
        golden.check(f"bytes, rounds by {name}", got, [number, golden.rounds(name, world)])
        if alone:
            golden.check_wire(f"bytes on the NICs by {name}", nics[name], number)
    print(f"golden ok: rank {rank} sent 2·({world}-1)/{world} x {size:,} = {wires['ring'].bytes:,} bytes", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
