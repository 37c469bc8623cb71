"""Lab 10, buckets: DDP sends gradients in parcels, and each leaves while backward is still at work on the rest.

    torchrun --standalone --nproc-per-node 2 lab.py
    torchrun --standalone --nproc-per-node 2 lab.py --cap-mb 25

A hook in place of DDP's own all-reduce writes down when each parcel leaves and when it is back.
"""

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import golden
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

ITERATIONS = 5
MIB = 1 << 20
WIDE = 66  # columns of the picture in the terminal


class Diary:
    """What happened in one iteration: events in order, and the clock (seconds) at each; when each bucket was back."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.at: list[float] = []
        self.buckets: list[list[int]] = []
        self.back: dict[int, float] = {}

    def note(self, event: str) -> None:
        self.events.append(event)
        self.at.append(time.perf_counter())

    def when(self, event: str) -> float:
        return self.at[self.events.index(event)]

    def overlap(self) -> float:
        """The share of the time that buckets were on their way in which backward had still gradients to find."""
        last = self.when("gradient 0")
        ways = [(self.when(f"bucket {i} leaves"), self.back[i]) for i in range(len(self.buckets))]
        together = sum(max(0.0, min(end, last) - start) for start, end in ways)
        return together / (sum(end - start for start, end in ways) or 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["healthy", "sync-in-step"], default="healthy")
    parser.add_argument("--cap-mb", type=float, default=2.0, metavar="MIB", help="DDP's bucket_cap_mb (2)")
    options = parser.parse_args()
    cap = int(options.cap_mb * MIB)

    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank, world = dist.get_rank(), dist.get_world_size()
    model = golden.model()
    layer_of = {id(p): layer for layer, p in enumerate(model.parameters())}
    ddp = DDP(model, bucket_cap_mb=options.cap_mb)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)  # the weights stay, so that every iteration is like the next
    diary = Diary()

    def send(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP calls this when all gradients of a bucket are ready; what it does is what DDP does by itself."""
        number, at = bucket.index(), diary
        at.note(f"bucket {number} leaves")
        at.buckets.append([layer_of[id(p)] for p in bucket.parameters()])
        work = dist.all_reduce(bucket.buffer().div_(world), async_op=True)

        def back(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            at.back[number] = time.perf_counter()
            return future.value()[0]

        return work.get_future().then(back)

    ddp.register_comm_hook(None, send)
    for layer, p in enumerate(model.parameters()):
        p.register_hook(lambda _, layer=layer: diary.note(f"gradient {layer}"))

    diaries = []
    for _ in range(ITERATIONS):
        diary = Diary()
        diaries.append(diary)
        optimizer.zero_grad()
        loss = ddp(golden.batch(rank)).square().mean()
        dist.barrier()  # so that no rank's buckets wait for another's forward pass
        diary.note("backward begins")
        loss.backward()
        diary.note("backward returns")
        optimizer.step()
        diary.note("step returns")
    if rank == 0:
        report(diaries)

    dist.barrier()  # compare when all communication is over
    steady = diaries[1:]
    for i, diary in enumerate(diaries):
        golden.check(f"buckets of iteration {i}", diary.buckets, golden.buckets(i, cap))
    early = [sum(diary.at[e] < diary.when("gradient 0") for e in leaves(diary)) for diary in steady]
    golden.check("iterations without overlap", [i for i, n in enumerate(early, 1) if n == 0], [])
    for i, diary in enumerate(diaries):
        expected = golden.events(i, cap)
        if options.variant == "sync-in-step":  # BROKEN: what many believe, that step() is where gradients are exchanged
            expected = [e for e in expected if "leaves" not in e]
            expected[-1:-1] = [f"bucket {n} leaves" for n in range(len(diary.buckets))]
        golden.check(f"events of iteration {i}", diary.events[1:], expected)
        late = [n for n, at in diary.back.items() if at > diary.when("backward returns")]
        golden.check(f"buckets on their way after backward of iteration {i}", late, [])
    for layer, (p, want) in enumerate(zip(model.parameters(), golden.gradients(world), strict=True)):
        golden.close(f"gradient of layer {layer}", p.grad, want)
    print(f"golden ok: rank {rank} of {world}: {len(steady[0].buckets)} buckets, each left in time, gradients equal")
    dist.destroy_process_group()


def leaves(diary: Diary) -> list[int]:
    """Where in the events buckets leave."""
    return [e for e, event in enumerate(diary.events) if event.endswith("leaves")]


def report(diaries: list[Diary]) -> None:
    """Print the buckets and the overlap, and draw the last iteration: in the terminal, and for $OUT/picture.json."""
    for i, diary in enumerate(diaries):
        sizes = " + ".join(f"{len(layers) * golden.BYTES / MIB:.1f}" for layers in diary.buckets)
        took = diary.when("backward returns") - diary.when("backward begins")
        print(f"iteration {i}: {sizes} MiB, backward {took * 1e3:.0f} ms, overlap {diary.overlap():.0%}", flush=True)
    diary = diaries[-1]
    zero = diary.when("backward begins")
    scale = WIDE / (diary.when("step returns") - zero)
    rows, before = [("backward", [])], zero
    for layer in reversed(range(golden.LAYERS)):
        rows[0][1].append((before, diary.when(f"gradient {layer}"), f"{layer:x}"))
        before = diary.when(f"gradient {layer}")
    for number in range(len(diary.buckets)):
        rows.append((f"bucket {number}", [(diary.when(f"bucket {number} leaves"), diary.back[number], str(number))]))
    rows.append(("step", [(diary.when("backward returns"), diary.when("step returns"), "s")]))
    for name, bars in rows:
        line = [" "] * (WIDE + 1)
        for start, end, label in bars:
            first, last = int((start - zero) * scale), max(int((end - zero) * scale), int((start - zero) * scale) + 1)
            line[first:last] = label * (last - first)
        print(f"{name:>9} |{''.join(line[:WIDE])}|", flush=True)
    if folder := os.environ.get("OUT"):
        drawn = [
            {"name": name, "bars": [bar((s - zero) * 1e3, (e - zero) * 1e3, label, name) for s, e, label in bars]}
            for name, bars in rows
        ]
        picture = {"kind": "gantt", "title": "One iteration of DDP on rank 0", "x": "ms", "rows": drawn}
        Path(folder, "picture.json").write_text(json.dumps(picture))


def bar(start: float, end: float, label: str, row: str) -> dict[str, object]:
    return {"start": start, "end": end, "label": label, "group": row.split()[0]}


if __name__ == "__main__":
    main()
