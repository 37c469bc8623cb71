"""Lab 03, backends: which libraries can move the bytes here, and does every operation give the right numbers?

    torchrun --standalone --nproc-per-node 2 lab.py

"It returned" proves nothing: each result below is compared with golden.py, element by element.
"""

from __future__ import annotations

import argparse
import warnings

import golden
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["healthy", "nccl", "wrong-op"], default="healthy")
    variant = parser.parse_args().variant
    # torch 2.13 renames these two to …_single and warns; older releases know only the old names.
    warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor). is deprecated", FutureWarning)

    # "device:backend", several with commas between. BROKEN in nccl: there is no GPU, or no NCCL in this torch.
    dist.init_process_group("nccl" if variant == "nccl" else "cpu:gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print_backends()

    got = run_all(rank, world, dist.ReduceOp.MAX if variant == "wrong-op" else dist.ReduceOp.SUM)
    dist.barrier()  # compare last: a rank that stopped in between would take its neighbours down

    expected = golden.results(rank, world)
    for operation in expected:
        golden.check(operation, got[operation], expected[operation])
        if rank == 0:
            print(f"  {operation:<24}{'ok':<4}{shorten(got[operation])}")
    print(f"golden ok: rank {rank} of {world}, {len(expected)} operations gave the right numbers", flush=True)
    dist.destroy_process_group()


def print_backends() -> None:
    known = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    print("backends in this torch: " + ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in known.items()))
    print(f"this group: {dist.get_backend_config()}")
    # One group can carry two libraries: the device of the tensor decides which one moves it.
    for device, backend in BackendConfig(dist.Backend("cpu:gloo,cuda:nccl")).get_device_backend_map().items():
        print(f'"cpu:gloo,cuda:nccl": {device} tensors go through {backend}')


def run_all(rank: int, world: int, sum_op: dist.ReduceOp.RedOpType) -> dict[str, list[float]]:
    """Every operation once, on a fresh copy of this rank's row."""
    got: dict[str, list[float]] = {}
    mine = torch.tensor(golden.row(rank, world))
    left, right = (rank - 1) % world, (rank + 1) % world

    x = mine.clone()
    dist.broadcast(x, src=world - 1)
    got["broadcast"] = x.tolist()

    x = mine.clone()
    dist.all_reduce(x, op=sum_op)  # BROKEN in wrong-op: all ranks agree, on the wrong thing
    got["all_reduce SUM"] = x.tolist()

    x = mine.clone()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    got["all_reduce MAX"] = x.tolist()

    x = mine.clone()
    dist.reduce(x, dst=0)
    got["reduce"] = x.tolist() if rank == 0 else []  # elsewhere x is scratch space now: never read it

    rows = [torch.empty(world) for _ in range(world)]
    dist.gather(mine, rows if rank == 0 else None, dst=0)
    got["gather"] = torch.cat(rows).tolist() if rank == 0 else []

    rows = [torch.empty(world) for _ in range(world)]
    dist.all_gather(rows, mine)
    got["all_gather"] = torch.cat(rows).tolist()

    big = torch.empty(world * world)
    dist.all_gather_into_tensor(big, mine)  # the same into one tensor, with no list and no copies: FSDP's way
    got["all_gather_into_tensor"] = big.tolist()

    one = torch.empty(1)
    dist.scatter(one, list(mine.split(1)) if rank == 0 else None, src=0)
    got["scatter"] = one.tolist()

    one = torch.empty(1)
    dist.reduce_scatter_tensor(one, mine.clone())
    got["reduce_scatter_tensor"] = one.tolist()

    x = torch.empty(world)
    dist.all_to_all_single(x, mine)  # row r, column c becomes row c, column r: a transpose over the ranks
    got["all_to_all_single"] = x.tolist()

    x = torch.empty(world)
    if rank % 2 == 0:  # send blocks until it is received: if all sent first, all would wait
        dist.send(mine, right)
        dist.recv(x, left)
    else:
        dist.recv(x, left)
        dist.send(mine, right)
    got["send / recv"] = x.tolist()

    x = torch.empty(world)
    for work in (dist.isend(mine, left), dist.irecv(x, right)):  # both are under way, so the order is no matter
        work.wait()
    got["isend / irecv"] = x.tolist()

    store = dist.group.WORLD.get_group_store()  # lab 02's counter, to see that a barrier is one
    store.add("arrived", 1)
    dist.barrier()
    got["barrier"] = [float(store.add("arrived", 0))]
    return got


def shorten(numbers: list[float]) -> str:
    shown = ", ".join(f"{number:g}" for number in numbers[:6])
    return f"[{shown}{', …' if len(numbers) > 6 else ''}]"


if __name__ == "__main__":
    main()
