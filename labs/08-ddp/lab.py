"""Lab 08, DDP: every rank trains on its share of the data; all end with the model of one process that saw all of it.

    torchrun --standalone --nproc-per-node 2 lab.py
    torchrun --standalone --nproc-per-node 2 lab.py --variant no-sampler

Five parts: join, bind the device, wrap the model, train with a sampler, leave.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import golden
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VARIANTS = ["healthy", "no-sampler", "no-set-epoch", "module-keys", "every-rank-writes"]
VARIANTS += ["unused", "wrap-first", "wrap-first-ids", "uneven"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="healthy")
    variant = parser.parse_args().variant

    # 1. Join.
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank, world = dist.get_rank(), dist.get_world_size()

    # 2. Bind the device. With cards, before anything touches one: torch.cuda.set_device(local_rank), see lab 09.
    device, local_rank = torch.device("cpu"), int(os.environ["LOCAL_RANK"])

    # 3. Wrap the model: first make it what it shall be and where, then DDP. Every rank begins with other weights, on
    # purpose: DDP hands out those of rank 0.
    model = golden.model(seed=rank)
    if variant == "unused":
        model.register_parameter("spare", torch.nn.Parameter(torch.ones(1)))  # BROKEN: forward never reaches it
    if variant == "wrap-first":
        ddp = DDP(model).to(device, torch.float64)  # BROKEN: DDP has hooked itself to the gradients that were
    elif variant == "wrap-first-ids":
        ddp = DDP(model, device_ids=[local_rank])  # BROKEN: the line for GPUs, but the model is still on the CPU
    else:
        ddp = DDP(model.to(device, torch.float64))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=golden.RATE)

    # 4. Train. The sampler deals the samples out; each brings its number along, so that we can see who got which.
    x, y = golden.data(world)
    dataset = TensorDataset(torch.arange(len(x)), x, y)
    sampler = DistributedSampler(dataset, world, rank, shuffle=True)
    loader = DataLoader(dataset, golden.BATCH, sampler=sampler)
    if variant == "no-sampler":
        loader = DataLoader(dataset, golden.BATCH, shuffle=True)  # BROKEN: every rank goes through all of the data
    steps = len(loader)
    if variant == "uneven" and rank == world - 1:
        steps -= 1  # BROKEN: one batch less here than elsewhere
    seen: list[list[int]] = []
    gradients = []
    for epoch in range(golden.EPOCHS):
        if variant != "no-set-epoch":  # BROKEN without: every epoch has the order of the first
            sampler.set_epoch(epoch)
        seen.append([])
        total = 0.0
        for _, (number, xb, yb) in zip(range(steps), loader, strict=False):
            optimizer.zero_grad()
            loss = (ddp(xb.to(device)) - yb.to(device)).square().mean()
            loss.backward()  # meanwhile DDP sums the gradients of all ranks and divides by the number of ranks
            gradients.append(golden.flat(ddp))
            optimizer.step()
            seen[-1] += number.tolist()
            total += loss.item()
        if rank == 0:
            print(f"epoch {epoch}: {steps} steps, rank 0's own loss {total / steps:.4f}", flush=True)
    if steps < len(loader):
        print(f"rank {rank}: {steps} steps an epoch were all I had, leaving", flush=True)
        return

    # Work with a side effect is for one rank. ddp.module is the model itself, so that its keys are what it calls them.
    out = Path(os.environ.get("OUT") or tempfile.mkdtemp()) / "model.pt"
    if rank == 0 or variant == "every-rank-writes":  # BROKEN if every rank does: on one disk they overwrite each other
        torch.save((ddp if variant == "module-keys" else ddp.module).state_dict(), out)  # BROKEN with ddp itself

    # 5. Compare when all communication is over, and leave.
    notes: list[tuple[list[list[int]], bool]] = [([], False)] * world
    dist.all_gather_object(notes, (seen, out.exists()))
    dist.barrier()
    compare(rank, world, [note[0] for note in notes], gradients, ddp.module.state_dict())
    golden.check("which ranks wrote model.pt", [note[1] for note in notes], [r == 0 for r in range(world)])
    if rank == 0:
        plain = golden.model(seed=1).to(torch.float64)  # as whoever uses the model has it, without DDP
        saved = torch.load(out)
        golden.check("keys of model.pt", list(saved), list(plain.state_dict()))
        plain.load_state_dict(saved)
        golden.close("model.pt", plain[0].weight, golden.train(world)[1]["0.weight"])
        print(f"model.pt: {len(saved)} tensors, they fit a model without DDP", flush=True)
    dist.destroy_process_group()


def compare(
    rank: int, world: int, seen: list[list[list[int]]], gradients: list[torch.Tensor], state: dict[str, torch.Tensor]
) -> None:
    """Everything against the one process. `seen` holds, by rank and epoch, the numbers of the samples, in order."""
    for epoch in range(golden.EPOCHS):
        taken = torch.tensor([number for r in range(world) for number in seen[r][epoch]])
        times = torch.bincount(taken, minlength=golden.PER_RANK * world).tolist()
        golden.check(f"times that each sample was seen in epoch {epoch}", times, [1] * len(times))
        for r, cards in enumerate(golden.order(world, epoch)):
            golden.check(f"rank {r}'s samples in epoch {epoch}", seen[r][epoch], cards)
    expected, end = golden.train(world)
    for step, (got, want) in enumerate(zip(gradients, expected, strict=True)):
        golden.close(f"gradient of step {step}", got, want)
    for name, value in state.items():
        golden.close(f"parameter {name}", value, end[name])
    total = sum(value.numel() for value in state.values())
    print(f"golden ok: rank {rank} of {world}: {len(gradients)} gradients and {total} parameters equal one process")


if __name__ == "__main__":
    main()
