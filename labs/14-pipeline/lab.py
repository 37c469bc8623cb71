"""Lab 14, pipeline: one stage of the model on each rank, micro-batches flowing through, and the time nobody works.

    torchrun --standalone --nproc-per-node 4 lab.py

GPipe: all forward passes, then all backward passes. 1F1B: as soon as the first micro-batch is through, one forward and
one backward in turn. A stage computes next to nothing here and sleeps for as long as a real one would compute: bubbles
come from the order of things, so they are real all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import golden
import torch
import torch.distributed as dist

SECONDS = {"F": 0.02, "B": 0.04}  # what a forward and a backward pass take
MICRO = [1, 2, 4, 8]  # micro-batches
DRAWN, TRIES = 4, 3
Order = list[tuple[str, int]]  # ("F" or "B", micro-batch)


def gpipe(stage: int, stages: int, micro: int) -> Order:
    return [("F", i) for i in range(micro)] + [("B", i) for i in range(micro)]


def one_f_one_b(stage: int, stages: int, micro: int) -> Order:
    """The last stage goes back at once; each stage before it is one micro-batch further ahead, to keep it busy."""
    ahead = min(stages - 1 - stage, micro)
    turns = [turn for i in range(micro - ahead) for turn in (("F", ahead + i), ("B", i))]
    return [("F", i) for i in range(ahead)] + turns + [("B", i) for i in range(micro - ahead, micro)]


class Stage:
    """One rank of the pipeline, and what it has done: outputs, losses, gradient, most micro-batches held, events."""

    def __init__(self, group: dist.ProcessGroup, scaled: bool) -> None:
        self.group, self.scaled, self.rank, self.last = group, scaled, dist.get_rank(), dist.get_world_size() - 1
        self.weight = golden.weights(self.last + 1)[self.rank].requires_grad_()
        self.sends: list[tuple[dist.Work, torch.Tensor]] = []

    def send(self, out: torch.Tensor, to: int, i: int) -> None:
        """Does not wait: the neighbour may be sending as well, and two that wait for each other wait for good."""
        if 0 <= to <= self.last:
            self.sends.append((dist.isend(out, to, self.group, tag=i), out))

    def receive(self, source: int, i: int) -> torch.Tensor:
        dist.recv(into := torch.empty_like(self.inputs[i]), source, self.group, tag=i)
        return into

    def run(self, order: Order, micro: int) -> None:
        self.micro, self.events, self.most, self.loss, self.weight.grad = micro, [], 0, 0.0, None
        self.outputs: dict[int, torch.Tensor] = {}
        self.inputs, self.targets = (part.chunk(micro) for part in golden.batch())
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        dist.barrier()
        begin = time.perf_counter()
        for kind, i in order:
            if kind == "F":
                came = self.inputs[i].clone() if self.rank == 0 else self.receive(self.rank - 1, i)
            else:
                came = self.targets[i] if self.rank == self.last else self.receive(self.rank + 1, i)
            start = time.perf_counter()
            out, to = self.forward(came, i) if kind == "F" else self.backward(came, i)
            time.sleep(max(0.0, start + SECONDS[kind] - time.perf_counter()))
            self.events.append((kind, i, start - begin, time.perf_counter() - begin))
            self.send(out, to, i)
        for work, _ in self.sends:
            work.wait()
        self.sends.clear()

    def forward(self, x: torch.Tensor, i: int) -> tuple[torch.Tensor, int]:
        y = torch.tanh(x.requires_grad_() @ self.weight)
        self.held[i], self.outputs[i] = (x, y), y.detach()
        self.most = max(self.most, len(self.held))
        return y.detach(), self.rank + 1

    def backward(self, came: torch.Tensor, i: int) -> tuple[torch.Tensor, int]:
        """`came`: the gradient of my output; on the last stage the targets. Gradients of the weight add up."""
        x, y = self.held.pop(i)
        if self.rank == self.last:
            # BROKEN if not scaled: the means of M micro-batches add up to M times the mean of the batch.
            y = torch.nn.functional.mse_loss(y, came) / (self.micro if self.scaled else 1)
            self.loss += y.item()
        y.backward(None if self.rank == self.last else came)
        return x.grad, self.rank - 1


def draw(name: str, ranks: list[list[tuple[str, int, float, float]]]) -> None:
    """Two characters are 20 ms: F0 the forward pass of micro-batch 0, B0B0 its backward pass, dots are the bubble."""
    ticks = round(max(event[3] for events in ranks for event in events) / SECONDS["F"])
    for rank, events in enumerate(ranks):
        middles = [(n + 0.5) * SECONDS["F"] for n in range(ticks)]
        cells = [[f"{kind}{i}" for kind, i, start, stop in events if start <= t < stop] or ["··"] for t in middles]
        print(f"{name:>5} rank {rank} |{''.join(cell[0] for cell in cells)}|", flush=True)
    if out := os.environ.get("OUT"):
        names, rows = {"F": "forward", "B": "backward"}, []
        for r, events in enumerate(ranks):
            bars = [{"start": 1e3 * a, "end": 1e3 * b, "label": f"{k}{i}", "group": names[k]} for k, i, a, b in events]
            rows.append({"name": f"rank {r}", "bars": bars})
        picture = {"kind": "gantt", "title": f"{name}, {DRAWN} micro-batches", "x": "ms", "rows": rows}
        (Path(out) / f"picture-{name}.json").write_text(json.dumps(picture))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["healthy", "swapped", "no-scale"], default="healthy")
    variant = parser.parse_args().variant

    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    # For sends and receives only. A rank that is late, and not stuck, is waited for in the barrier, for 2 minutes.
    group = dist.new_group(timeout=timedelta(seconds=5 if variant == "swapped" else 60))
    torch.ones(1, requires_grad=True).exp().backward(torch.ones(1))  # the first one of a process imports: seconds
    rank, stages = dist.get_rank(), dist.get_world_size()
    stage = Stage(group, scaled=variant != "no-scale")
    done = []
    for name, schedule in {"gpipe": gpipe, "1f1b": one_f_one_b}.items():
        for micro in MICRO:
            order = schedule(rank, stages, micro)
            if variant == "swapped" and rank == stages - 1:
                order = gpipe(rank, stages, micro)  # BROKEN: sends no gradient before it has all activations
            bubbles: list[float] = []
            while not bubbles or (min(bubbles) - golden.bubble(stages, micro) > golden.NOISE and len(bubbles) < TRIES):
                stage.run(order, micro)
                seen = [(stage.events, stage.most)] * stages
                dist.all_gather_object(seen, (stage.events, stage.most))
                events = [events for events, _ in seen]
                span = max(e[-1][3] for e in events) - min(e[0][2] for e in events)
                busy = sum(stop - start for e in events for _, _, start, stop in e)
                bubbles.append(1 - busy / (stages * span))  # a busy machine can only make it larger
            if rank == 0:
                says = f"bubble {min(bubbles):.3f}, formula {golden.bubble(stages, micro):.3f} ({len(bubbles)} tries)"
                print(f"{name:>5}, {micro} micro-batches: {says}, held {[most for _, most in seen]}", flush=True)
                if micro == DRAWN:
                    draw(name, events)
            outputs = torch.cat([stage.outputs[i] for i in range(micro)])
            done.append((name, micro, outputs, stage.loss, stage.weight.grad, stage.most, min(bubbles)))

    dist.barrier()  # compare last: a rank that stopped in between would take its neighbours down
    outputs, loss, grads = golden.passes(stages)
    for name, micro, got, mean, grad, most, bubble in done:
        way = f"{name} with {micro} micro-batches"
        golden.check(f"output of stage {rank}, {way}", got, outputs[rank])
        golden.check(f"gradient of stage {rank}, {way}", grad, grads[rank])
        if rank == stages - 1:
            golden.check_number(f"loss, {way}", mean, loss.item(), golden.TOLERANCE)
        golden.check_number(f"micro-batches held, {way}", most, golden.live(name, rank, stages, micro))
        golden.check_number(f"bubble, {way}", bubble, golden.bubble(stages, micro), golden.NOISE)
    print(f"golden ok: stage {rank} of {stages}, {len(done)} ways through give one gradient", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
