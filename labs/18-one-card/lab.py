"""Lab 18, one card: what a single card adds, and how much of it a CPU can show: half precision, and memory.

    torchrun --standalone --nproc-per-node 2 lab.py

The parts that need a card are in card.py. They run where there is one; elsewhere each says that it was not run.
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import card
import golden
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

VARIANTS = ["healthy", "no-scale", "late-sync", "clip-scaled", "keeps-all", "other-dice"]


def train(dtype: torch.dtype, scaling: bool, variant: str) -> tuple[list[float], list[float]]:
    """Data parallel steps, weights in float32, arithmetic in `dtype`: weights at the end, scale after each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    w, scales = torch.zeros(2, requires_grad=True), []
    optimizer = torch.optim.SGD([w], lr=golden.LR)
    scaling = scaling and variant != "no-scale"
    scaler = torch.amp.GradScaler("cpu", golden.FIRST_SCALE, growth_interval=golden.GROW_AFTER, enabled=scaling)
    for step in range(golden.STEPS):
        x = torch.tensor(golden.batch(step, rank, world), dtype=dtype)
        loss = (w.to(dtype) * x).float().sum() * golden.TINY  # TINY as of a mean over very many tokens
        scaler.scale(loss).backward()
        if variant != "late-sync":
            dist.all_reduce(w.grad)  # where DDP does it: an overflow of one rank is now everybody's
        if variant == "clip-scaled":
            clip(w.grad)  # BROKEN: compares the scaled gradient with a limit that is meant for the true one
        scaler.unscale_(optimizer)  # true gradients, and a look whether all of them are finite
        if variant == "late-sync":
            dist.all_reduce(w.grad)  # BROKEN: each rank has looked at its own gradients only
        if variant != "clip-scaled":
            clip(w.grad)
        scaler.step(optimizer)  # skipped if any was not finite
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return w.tolist(), scales


def clip(gradient: torch.Tensor) -> None:
    gradient *= golden.CLIP / max(golden.CLIP, gradient.norm().item())


class Ledger:
    """Counts the bytes that autograd keeps for backward, each storage once, weights not at all."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.uses = {w.untyped_storage().data_ptr(): 1 for w in weights}
        self.live = self.peak = 0

    def pack(self, tensor: torch.Tensor) -> Held:
        return Held(tensor, self)


class Held:
    """A tensor in the ledger, from the moment it is saved until autograd lets go of it."""

    def __init__(self, tensor: torch.Tensor, ledger: Ledger) -> None:
        self.tensor, self.ledger, self.key = tensor, ledger, tensor.untyped_storage().data_ptr()
        ledger.uses[self.key] = ledger.uses.get(self.key, 0) + 1
        if ledger.uses[self.key] == 1:
            ledger.live += tensor.untyped_storage().nbytes()
            ledger.peak = max(ledger.peak, ledger.live)

    def __del__(self) -> None:
        self.ledger.uses[self.key] -= 1
        if not self.ledger.uses[self.key]:
            self.ledger.live -= self.tensor.untyped_storage().nbytes()


def block(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(x @ w1)
    mask = ((torch.rand(hidden.shape) < 0.5) * 2.0).to(hidden)  # dropout
    return x + (hidden * mask) @ w2


class Recomputed(torch.autograd.Function):
    """A block that keeps its input only, and runs forward again when backward needs what is inside."""

    @staticmethod
    def forward(ctx, x, w1, w2, same_dice):
        ctx.dice, ctx.same_dice = torch.get_rng_state(), same_dice
        ctx.save_for_backward(x, w1, w2)
        return block(x, w1, w2)  # autograd records nothing in here

    @staticmethod
    def backward(ctx, flow):
        x, w1, w2 = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            if ctx.same_dice:
                torch.set_rng_state(ctx.dice)  # or dropout would drop others than in forward
            block(x, w1, w2).backward(flow)
        return x.grad, w1.grad, w2.grad, None


def backward(recompute: bool, same_dice: bool = True) -> tuple[list[torch.Tensor], int, int]:
    """All gradients, the most bytes that waited for backward at once, and the arithmetic operations."""
    x, layers = golden.network()
    weights = [w.requires_grad_() for pair in layers for w in pair]
    ledger, flops, x = Ledger(weights), FlopCounterMode(display=False), x.requires_grad_()
    with flops, torch.autograd.graph.saved_tensors_hooks(ledger.pack, lambda held: held.tensor):
        for w1, w2 in layers:
            x = Recomputed.apply(x, w1, w2, same_dice) if recompute else block(x, w1, w2)
        (x.square().sum() / 2).backward()
    return [w.grad for w in weights], ledger.peak, flops.get_total_flops()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="healthy")
    variant = parser.parse_args().variant
    card.pretend()
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank, world = dist.get_rank(), dist.get_world_size()

    halves = {name: torch.tensor(golden.NUMBERS).to(getattr(torch, name)).tolist() for name in golden.FORMATS}
    scaled, plain = train(torch.float16, True, variant), train(torch.bfloat16, False, variant)
    kept = backward(recompute=False)
    saved = backward(recompute=variant != "keeps-all", same_dice=variant != "other-dice")
    if rank == 0:
        print("number       " + " ".join(f"{x:>10.4g}" for x in golden.NUMBERS))
        for name, values in halves.items():
            print(f"as {name:<9} " + " ".join(f"{x:>10.4g}" for x in values))
        print("log2 of the scale after each step: " + " ".join(f"{torch.tensor(s).log2():.0f}" for s in scaled[1]))
        print(f"kept for backward: {kept[1]} bytes, with recomputation {saved[1]}")
        print(f"operations: {kept[2]}, with recomputation {saved[2]}", flush=True)
    on_card = card.parts()

    dist.barrier()  # compare when all communication is over
    for name, values in halves.items():
        golden.check(f"numbers as {name}", values, [golden.rounded(x, name) for x in golden.NUMBERS])
    for name, (weights, scales), scaling in (("float16", scaled, True), ("bfloat16", plain, False)):
        expected = golden.trained(world, name, scaling)
        golden.check(f"weights trained in {name}", weights, expected[0], rel=1e-6)  # ten float32 steps: 10 * 2^-24
        golden.check(f"scale after each step, {name}", scales, expected[1])
    for name, run in (("all kept", kept), ("recomputed", saved)):
        for got, right in zip(run[0], golden.gradients(), strict=True):
            golden.check(f"gradient, {name}", got.flatten().tolist(), right.flatten().tolist(), rel=1e-12)
        golden.check(f"bytes kept for backward, {name}", [run[1]], [golden.kept_bytes(name == "recomputed")])
        golden.check(f"operations, {name}", [run[2]], [golden.operations(name == "recomputed")])
    for what, outcome in on_card.items():
        if isinstance(outcome, str):
            print(f"not run: {outcome}: {what}", flush=True)
        else:
            golden.check(what, *outcome)
    print(f"golden ok: rank {rank} of {world}: two formats, a scale, {len(kept[0])} gradients, two ledgers")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
