"""Lab 17, alpha-beta: how long a message takes is alpha + bytes / beta. First computed, then fitted to real wires.

    torchrun --standalone --nproc-per-node 2 lab.py
    torchrun --standalone --nproc-per-node 2 lab.py --variant units

alpha is what a message costs however short it is, beta is how many bytes a second pass once it flows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path

import golden
import torch
import torch.distributed as dist

PIN = "GLOO_SOCKET_IFNAME"
# 4 KiB to 4 MiB, and 192 KiB to 1.5 MiB: beyond the 64 KiB that a shaper lets pass at once. Every other is held out.
FAST, SLOW = [1 << k for k in range(12, 23)], sorted(n << k for n in (3, 4) for k in range(16, 20))[:-1]
ROUNDS, TRIES, WITHIN = {"pinned": 20, "unpinned": 3}, 5, 0.25
ALPHA, BETA = golden.ALPHA, golden.BETA
variant = "healthy"


def ring(size: float, n: int) -> float:
    """Seconds of a ring all-reduce: 2(n-1) steps, each with 1/n of the data."""
    if variant == "tree-for-ring":
        return tree(size, n)  # BROKEN: every step with all of the data
    beta = BETA if variant != "units" else 200 * 2**30  # BROKEN, with units: GiB/s, where GB/s was measured
    return 2 * (n - 1) * (ALPHA + size / n / beta)


def tree(size: float, n: int) -> float:
    """Seconds of a tree all-reduce: log2(n) steps up and as many down, each with all of the data."""
    return 2 * math.ceil(math.log2(n)) * (ALPHA + size / BETA)


def crossover(n: int) -> float:
    """Bytes for which ring and tree take as long: 2(n-1)(a + S/nb) = 2L(a + S/b), solved for S."""
    levels = math.ceil(math.log2(n))
    return ALPHA * BETA * (n - 1 - levels) / (levels - (n - 1) / n)


def computed(say) -> None:
    """The model's own tables, held against published numbers and against the same times added up step by step."""
    say(f"{'cards':>5}{'bytes':>12}{'ring':>13}{'tree':>13}")
    for (n, size), published in golden.TABLE.items():
        times = ring(size, n), tree(size, n)
        faster = "ring" if times[0] < times[1] else "tree"
        say(f"{n:5}{size:12}{times[0] * 1e6:10.1f} us{times[1] * 1e6:10.1f} us  {faster}")
        golden.check(f"ring and tree, {n} cards, {size} bytes", [t * 1e6 for t in times], published, digits=1)
    for n, size in golden.TABLE:
        steps = golden.ring_steps(size, n), golden.tree_steps(size, n)
        golden.check(f"steps of {n} cards, {size} bytes", (ring(size, n), tree(size, n)), steps)
    for n, published in golden.STEP.items():
        seconds = ring(golden.GRADIENT, n)
        share = seconds / (golden.COMPUTE + seconds)
        say(f"{n:5} cards, 14 GiB of gradients: {seconds * 1e3:.1f} ms, {share:.1%} of a step")
        golden.check(f"share of a step, {n} cards", [seconds * 1e3, share * 100], published, digits=1)
    zero3 = 1.5 * ring(golden.GRADIENT, 64)  # two all-gathers and a reduce-scatter, where an all-reduce is one of each
    say(f"   64 cards, ZeRO-3: {zero3 * 1e3:.0f} ms in place of {ring(golden.GRADIENT, 64) * 1e3:.0f} ms")
    golden.check("ZeRO-3's three rounds", [zero3], [golden.ring_steps(golden.GRADIENT, 64, times=3)])
    for n in (4, 8, 16, 64):
        say(f"{n:5} cards: a ring is faster from {crossover(n) / 1e6:.2f} MB")
        golden.check(f"crossover of {n} cards", [crossover(n)], [golden.crossover(n)])


def fit(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """alpha and beta with the least squares of *relative* errors: else the largest message alone would decide."""
    t = torch.tensor(times, dtype=torch.float64)
    rows = torch.stack([torch.ones_like(t), torch.tensor(sizes, dtype=torch.float64)], dim=1) / t[:, None]
    alpha, slope = torch.linalg.lstsq(rows, torch.ones_like(t)[:, None]).solution.flatten().tolist()
    return alpha, 1 / slope


def measured(sizes: list[int], rounds: int, group: dist.ProcessGroup) -> list[list[float]]:
    """Seconds one way between the first and the last rank: half a round trip, `rounds` times for each size, in turn."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    messages, times = [torch.zeros(size // 4) for size in sizes], [[] for _ in sizes]
    for _ in range(rounds + 1 if rank in (0, last) else 0):
        for x, each in zip(messages, times, strict=True):
            start = time.perf_counter()
            for source, target in ((0, last), (last, 0)):
                dist.send(x, target, group) if rank == source else dist.recv(x, source, group)
            each.append((time.perf_counter() - start) / 2)
    dist.barrier(group)
    return [each[1:] for each in times]  # the first round warms up


def tried(name: str, sizes: list[int], group: dist.ProcessGroup) -> tuple[float, float, float]:
    """Fit every other size and predict the rest, up to TRIES times. Every rank gets alpha, beta and median error."""
    answer, all_rounds = [None], [[] for _ in sizes]
    for attempt in range(TRIES):
        more = measured(sizes, ROUNDS[name], group)  # a further try adds to what there is: the least gets surer
        all_rounds = [old + new for old, new in zip(all_rounds, more, strict=True)]
        if dist.get_rank() == 0:
            times = [min(rounds) for rounds in all_rounds]  # a busy machine can only add to what the wire needs
            alpha, beta = fit(sizes[::2], times[::2])
            errors = [(alpha + s / beta) / t - 1 for s, t in zip(sizes[1::2], times[1::2], strict=True)]
            answer = [(alpha, beta, statistics.median(map(abs, errors)))]
            print(f"{name}, try {attempt + 1}: alpha {alpha * 1e6:.0f} us, beta {beta / 1e6:.1f} MB/s; held-out sizes:")
            for s, t, rounds, error in zip(sizes[1::2], times[1::2], all_rounds[1::2], errors, strict=True):
                spread = f"median {statistics.median(rounds) * 1e6:.0f}, most {max(rounds) * 1e6:.0f}"
                predicted = f"predicted {(alpha + s / beta) * 1e6:7.0f} us, {error:+.0%}"
                print(f"  {s:8} bytes: {predicted}; least {t * 1e6:7.0f}, {spread}")
            print(f"{name}: median error {answer[0][2]:.0%}", flush=True)
            picture(name, sizes, times, alpha, beta)
        dist.broadcast_object_list(answer, group=group)
        if answer[0][2] <= WITHIN:
            break
    return answer[0]


def picture(name: str, sizes: list[int], times: list[float], alpha: float, beta: float) -> None:
    if out := os.environ.get("OUT"):
        points = [list(pair) for pair in zip(sizes, times, strict=True)]
        dots = [
            {"name": f"{what}", "style": "dots", "points": points[i::2]}
            for i, what in enumerate(("fitted", "held out"))
        ]
        line = {"name": "alpha + S/beta", "style": "line", "points": [[s, alpha + s / beta] for s in sizes]}
        axes = {"kind": "lines", "title": f"{name}: one message", "x": "bytes", "y": "seconds", "log": True}
        Path(out, f"picture-{name}.json").write_text(json.dumps({**axes, "series": [*dots, line]}))


def main() -> None:
    global variant
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["healthy", "units", "tree-for-ring"], default="healthy")
    variant = parser.parse_args().variant

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    computed(print if rank == 0 else lambda line: None)
    golden.check("fit of an invented link", fit(FAST, golden.invented(FAST, 3e-5, 4e8)), (3e-5, 4e8))

    pinned = tried("pinned", FAST, dist.new_group())
    if PIN in os.environ and world > int(os.environ["LOCAL_WORLD_SIZE"]):
        del os.environ[PIN]  # a new group reads it anew, and now takes what the hostname means: lab 20
        unpinned = tried("unpinned", SLOW, dist.new_group())
        golden.check_holds("pinned beta over unpinned beta", pinned[1] / unpinned[1], lambda x: x > 2, "more than 2")
    golden.check_holds("median error on held-out sizes", pinned[2], lambda x: x <= WITHIN, f"at most {WITHIN}")
    print(f"golden ok: rank {rank} tables as published, held-out sizes within {pinned[2]:.0%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
