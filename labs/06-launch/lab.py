"""Lab 06, launch: five numbers and an address are all that a rank is told, whoever starts it.

    python lab.py --spawn 2                                   1. multiprocessing, one machine
    RANK=0 WORLD_SIZE=2 … python lab.py                       2. by hand, see README.md
    torchrun --standalone --nproc-per-node 2 lab.py           3. torchrun, one machine
    torchrun --nnodes 2 --rdzv-backend c10d … lab.py          4. torchrun, the same line on every machine

The four differ only in who fills in the environment; what main() does is the same.
"""

from __future__ import annotations

import argparse
import os
import socket

import golden
import torch
import torch.distributed as dist

NUMBERS = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
ADDRESS = ["MASTER_ADDR", "MASTER_PORT"]


def main() -> None:
    # 1. What this rank was told. Started with plain `python lab.py`, this is where it ends: KeyError: 'RANK'.
    told = {name: os.environ[name] for name in NUMBERS + ADDRESS}
    print(" ".join(f"{name}={value}" for name, value in told.items()), flush=True)

    # 2. With that it finds the others. env:// (the default) reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    # 3. All ranks compare notes.
    told["host"] = socket.gethostname()
    notes: list[dict[str, str]] = [{} for _ in range(world)]
    dist.all_gather_object(notes, told)
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    dist.barrier()

    nproc = int(told["LOCAL_WORLD_SIZE"])
    expected = golden.layout(world // nproc, nproc)
    for name in NUMBERS:
        golden.check(name, [note[name] for note in notes], [numbers[name] for numbers in expected])
    for name in ADDRESS:  # one meeting point for all
        golden.check(name, [note[name] for note in notes], [told[name]] * world)
    mine = [note["host"] for note in notes if note["GROUP_RANK"] == told["GROUP_RANK"]]
    golden.check("host of my node's ranks", mine, [told["host"]] * nproc)
    golden.check("sum over all ranks", x.tolist(), [world * (world + 1) / 2])
    node, local = told["GROUP_RANK"], told["LOCAL_RANK"]
    print(f"golden ok: rank {rank} of {world} = node {node} x {nproc} + {local}, on {told['host']}, by {launcher()}")
    dist.destroy_process_group()


def launcher() -> str:
    """Who filled in the environment: torchrun leaves more of its own in it, all named TORCHELASTIC_."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"torchrun, run {run_id}" if run_id else os.environ.get("LAB_LAUNCHER", "hand")


def spawned(index: int, world: int, port: int) -> None:
    """One process of --spawn: it is handed its index, and fills in the rest by itself."""
    numbers = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LAB_LAUNCHER="spawn")
    main()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spawn", type=int, metavar="N", help="start N ranks from this one process")
    if count := parser.parse_args().spawn:
        torch.multiprocessing.spawn(spawned, (count, free_port()), nprocs=count)
    else:
        main()
