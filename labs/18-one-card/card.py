"""The parts of lab 18 that need a card: each gives (found, expected) for the golden check, or why it was not run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

Outcome = tuple[list[float], list[float]] | str
MANY = 1 << 26  # bytes


def pretend() -> None:
    """Let NCCL take every rank for a host of its own, or it refuses two ranks on one card. Before the first group."""
    os.environ.setdefault("NCCL_HOSTID", f"pretend-{os.environ['RANK']}")


def parts() -> dict[str, Outcome]:
    """Every part by its name, in an order that is the same on all ranks."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    run: dict[str, Callable[[], Outcome]] = {
        "several NCCL ranks on one card": nccl,
        "pinned memory, and copies beside arithmetic": copies,
        "memory of one process read by another (CUDA IPC)": ipc,
        "the allocator's peak, and out of memory": memory,
    }
    return {name: part() if torch.cuda.is_available() else "needs a GPU" for name, part in run.items()}


def nccl() -> Outcome:
    """A sum over all ranks, and one over the even ones, whole numbers; asynchronous on a stream until wait()."""
    if not dist.is_nccl_available():
        return "needs NCCL"
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone, even = dist.new_group(backend="nccl"), dist.new_group([*range(0, world, 2)], backend="nccl")
    x = torch.full((1000,), rank + 1.0, device="cuda")
    y = x.clone()
    dist.all_reduce(x, group=everyone, async_op=True).wait()  # the stream waits, not this process
    if rank % 2 == 0:
        dist.all_reduce(y, group=even)
    own = sum(range(1, world + 1, 2)) if rank % 2 == 0 else rank + 1
    return [x.min().item(), x.max().item(), y.max().item()], [world * (world + 1) / 2] * 2 + [float(own)]


def copies() -> Outcome:
    """What arrives is what was sent; how fast, and how much of it hides behind a product, is printed only."""
    host, a = torch.arange(MANY // 4, dtype=torch.float32), torch.randn(4096, 4096, device="cuda")
    pinned, there, side = host.pin_memory(), torch.empty(MANY // 4, device="cuda"), torch.cuda.Stream()

    def copy_beside() -> None:
        with torch.cuda.stream(side):
            there.copy_(pinned, non_blocking=True)
        a @ a

    def copy_then() -> None:
        there.copy_(pinned)
        a @ a

    taken = [timed(lambda: there.copy_(host)), timed(lambda: there.copy_(pinned)), timed(copy_then), timed(copy_beside)]
    print("GB/s to the card: {:.1f} pageable, {:.1f} pinned".format(*(MANY / t / 1e9 for t in taken[:2])))
    print("copy and product: {:.2f} ms one after the other, {:.2f} ms beside".format(*(t * 1e3 for t in taken[2:])))
    back = there.cpu()
    return [float(torch.equal(back, host)), back[-1].item()], [1.0, host[-1].item()]


def timed(work: Callable[[], object]) -> float:
    """Seconds, the best of five, with the card idle before and after."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def ipc() -> Outcome:
    """The first rank of a node hands out a handle, no bytes; the second writes through it; the first sees that."""
    if int(os.environ["LOCAL_WORLD_SIZE"]) < 2:
        return "needs two ranks on a node"
    local_rank, rank = int(os.environ["LOCAL_RANK"]), dist.get_rank()
    mine = torch.zeros(4, device="cuda")
    handles: list[tuple] = [() for _ in range(dist.get_world_size())]
    dist.all_gather_object(handles, reduce_tensor(mine) if local_rank == 0 else ())
    if local_rank == 1:
        rebuild, told = handles[rank - 1]
        theirs = rebuild(*told)
        theirs.fill_(7.0)
        torch.cuda.synchronize()
        del theirs
    dist.barrier()
    return mine.tolist(), [7.0 if local_rank == 0 else 0.0] * 4


def memory() -> Outcome:
    """Kept activations show in the allocator's peak, to the byte; a request beyond the card is an exception."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = [torch.empty(MANY // 4, device="cuda") for _ in range(3)]
    kept.clear()
    peak = torch.cuda.max_memory_allocated() - before
    try:
        torch.empty(2 * torch.cuda.get_device_properties().total_memory, dtype=torch.uint8, device="cuda")
        refused = False
    except torch.OutOfMemoryError:
        refused = True
    return [float(peak), float(refused)], [3.0 * MANY, 1.0]
