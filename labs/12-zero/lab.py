"""Lab 12, ZeRO: data parallel training in which no rank holds everything.

    torchrun --standalone --nproc-per-node 2 lab.py

Every rank owns one slice of each weight (some of its rows), and keeps AdamW's two moments for this slice only. That
is stage 1. Stage 2 also lets go of each gradient, but for the slice, as soon as it is reduced. Stage 3 also lets go of
the weights, but for the slices, and fetches each layer's rest when it is needed: twice a step.
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import golden
import torch
import torch.distributed as dist

LAYERS = range(golden.LAYERS)


class Zero:
    """One rank's part of the training in one stage. Counts the bytes that it sends, and the most that it ever held."""

    def __init__(self, stage: int, variant: str) -> None:
        self.stage, self.variant, self.sent, self.most = stage, variant, 0, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.weights = golden.weights(self.world)
        self.grads: list[torch.Tensor] = []
        self.slices = [self.mine(w) for w in self.weights]  # views: AdamW writes into the weights themselves
        if stage == 3:
            self.slices, self.weights = [s.clone() for s in self.slices], []
        self.optimizer = torch.optim.AdamW(self.slices, **golden.SETTINGS)

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.world)[self.rank]

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        """All ranks' slices in one. gloo passes them on in a ring, so each rank sends n-1 slices."""
        dist.all_gather(parts := [torch.empty_like(mine) for _ in range(self.world)], mine)
        self.sent += mine.nbytes * (self.world - 1)
        return torch.cat(parts)

    def reduce_scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """My slice of the mean over all ranks. Each sends n-1 slices; gloo's own reduce_scatter sends twice as many."""
        parts = torch.empty_like(whole)
        dist.all_to_all_single(parts, whole)
        self.sent += self.mine(whole).nbytes * (self.world - 1)
        if self.variant == "unsynced":
            return self.mine(whole).clone()  # BROKEN: what this rank's part of the batch says, and no other's
        return parts.view(self.world, -1, whole.shape[1]).sum(dim=0) / self.world

    def weight(self, layer: int) -> torch.Tensor:
        return self.all_gather(self.slices[layer]) if self.stage == 3 else self.weights[layer]

    def step(self, number: int) -> None:
        """Forward and backward by hand, so that it shows when a weight is needed, and when a gradient no longer is."""
        x, y = (self.mine(part) for part in golden.batch(number, self.world))
        inputs = [x]
        for layer in LAYERS:
            inputs.append(torch.tanh(inputs[layer] @ self.weight(layer)))
        back = 2 * (inputs[-1] - y) / y.numel()  # the derivative of the mean squared error
        for layer in reversed(LAYERS):
            back = back * (1 - inputs[layer + 1] ** 2)
            weight, grad = self.weight(layer), inputs[layer].T @ back
            if self.stage == 1:
                self.grads.append(grad)  # kept whole until all are there
            else:
                self.slices[layer].grad = self.reduce_scatter(grad)
            self.weigh(weight, grad)
            back = back @ weight.T
        for layer, grad in zip(reversed(LAYERS), self.grads, strict=False):
            self.slices[layer].grad = self.mine(grad).copy_(self.reduce_scatter(grad))
        self.optimizer.step()
        self.weigh()
        self.optimizer.zero_grad()
        self.grads.clear()
        if self.variant != "no-gather":  # BROKEN without: of the other ranks' slices only the first values are known
            for weight, mine in zip(self.weights, self.slices, strict=False):
                weight.copy_(self.all_gather(mine))

    def weigh(self, *in_flight: torch.Tensor) -> None:
        """Weights, gradients and moments that are in memory now; a view takes no room beside what it is a view of."""
        moments = [m for state in self.optimizer.state.values() for m in state.values() if m.dim()]
        grads = [s.grad for s in self.slices if s.grad is not None]
        held = [*self.weights, *self.slices, *self.grads, *grads, *moments, *in_flight]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        self.most = max(self.most, sum(sizes.values()))


def fsdp(rank: int, world: int) -> list[torch.Tensor]:
    """The same by FSDP2, PyTorch's stage 3, which cuts by rows as well. Linear keeps the transpose of our weights."""
    from torch.distributed.fsdp import fully_shard

    size, model = golden.width(world), torch.nn.Sequential()
    for w in golden.weights(world):
        model.append(torch.nn.Linear(size, size, bias=False, dtype=w.dtype)).append(torch.nn.Tanh())
        model[-2].weight.data.copy_(w.T)
        fully_shard(model[-2])
    optimizer = torch.optim.AdamW(fully_shard(model).parameters(), **golden.SETTINGS)
    for number in range(golden.STEPS):
        x, y = (part.chunk(world)[rank] for part in golden.batch(number, world))
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.to_local().detach() for p in model.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["healthy", "unsynced", "no-gather"], default="healthy")
    variant = parser.parse_args().variant
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank, world = dist.get_rank(), dist.get_world_size()

    stages = [Zero(stage, variant) for stage in (1, 2, 3)]
    size = sum(w.nbytes for w in golden.weights(world))
    for zero in stages:
        for number in range(golden.STEPS):
            zero.step(number)
        sizes = (
            f"sent {zero.sent / golden.STEPS / size:.3f} parameter sizes a step, held {zero.most / size:.3f} at most"
        )
        print(f"rank {rank} of {world}: ZeRO-{zero.stage} {sizes}", flush=True)
    theirs = fsdp(rank, world) if variant == "healthy" else []

    dist.barrier()  # compare last: a rank that stopped in between would take its neighbours down
    expected = golden.trained(world)
    for zero in stages:
        for layer, whole in enumerate(expected):
            got, want = (zero.weights[layer], whole) if zero.weights else (zero.slices[layer], zero.mine(whole))
            golden.check(f"weight {layer} after {golden.STEPS} steps of ZeRO-{zero.stage}", got, want)
        golden.check_bytes(f"bytes sent by ZeRO-{zero.stage}", zero.sent, golden.sent(zero.stage, world))
        golden.check_bytes(f"bytes held by ZeRO-{zero.stage}", zero.most, golden.held(zero.stage, world))
    for layer, mine in enumerate(theirs):
        golden.check(f"weight {layer} of FSDP2", mine, expected[layer].T.chunk(world)[rank])
    print(f"golden ok: rank {rank}, ZeRO-1, 2, 3 and FSDP2 end with the weights of one process", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
