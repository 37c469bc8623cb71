"""Lab 07, elastic: a rank dies, then a machine; the job goes on, and ends with the loss that it would have had anyway.

    torchrun --standalone --nproc-per-node 2 lab.py
    LOSE=rank torchrun --standalone --nproc-per-node 2 --max-restarts 1 lab.py

torchrun starts the ranks again; it brings nothing back that was in their memory. That is the checkpoint's business.
LOSE says who is to be lost: rank, node, or rank,node.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import golden
import torch
import torch.distributed as dist

LOSE_AFTER = {"rank": 6, "node": 14}  # steps

# What outlives a rank: a folder on this node's disk. $OUT is the rank's own, the folder above belongs to all of them.
out = os.environ.get("OUT") or f"{tempfile.gettempdir()}/lab07-{os.environ.get('TORCHELASTIC_RUN_ID')}-{os.getppid()}/0"
disk, board = Path(out).parent, Path(out).parent / "board.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["healthy", "no-checkpoint"], default="healthy")
    variant = parser.parse_args().variant
    lose = [who for who in os.environ.get("LOSE", "").split(",") if who]
    disk.mkdir(parents=True, exist_ok=True)

    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    # When this process was started, before it imported torch (proc(5): field 22 of stat, in ticks since boot).
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    born = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    note("up", world=world, born=born)
    model = golden.model()
    speed = [torch.zeros_like(p) for p in model.parameters()]  # momentum by hand: torch.optim imports for 3 s
    step = 0 if variant == "no-checkpoint" else resume(model, speed)  # BROKEN with 0: all work so far is forgotten
    note("resume", step=step)
    print(f"rank {rank} of {world}: begins at step {step}", flush=True)
    while step < golden.STEPS:
        # The batch does not depend on who is there: each of `world` ranks takes its share, and the sum is the same.
        x, y = golden.batch(step)
        model.zero_grad()
        loss = (model(x[rank::world]) - y[rank::world]).square().sum() / golden.SAMPLES
        loss.backward()
        try:
            for tensor in (loss.detach(), *(p.grad for p in model.parameters())):
                dist.all_reduce(tensor)
        except RuntimeError:
            note("noticed")  # a neighbour is gone. Nothing to be saved here: end, torchrun starts us again
            raise
        with torch.no_grad():
            for p, v in zip(model.parameters(), speed, strict=True):
                p -= golden.RATE * v.mul_(golden.MOMENTUM).add_(p.grad)
        step += 1
        note("step", step=step, world=world)
        if step % golden.EVERY == 0 and local == 0:
            save(model, speed, step)
        time.sleep(0.1)  # so that there is something to interrupt
        for who in (who for who in lose if step >= LOSE_AFTER[who] and world > 1):
            lose_once(who, step, me=rank == world - 1)
        if step == golden.STEPS - 1 and world == 1 and "node" in lose:
            time.sleep(90)  # torchrun ends this sleep, and this rank, as soon as the lost node is back

    boards: list[list[dict]] = [[] for _ in range(world)]
    dist.all_gather_object(boards, list(map(json.loads, board.read_text().splitlines())) if local == 0 else [])
    dist.barrier()  # compare when all communication is over
    lines = sorted((line for part in boards for line in part), key=lambda line: line["at"])
    if rank == 0:
        print("\n".join(scoreboard(lines)), flush=True)
    sizes = [line["world"] for line in lines if line["what"] == "step"]
    golden.check("size of the world", [sizes[0], min(sizes), sizes[-1]], golden.worlds(max(sizes), "node" in lose))
    lost = [line for line in lines if line["what"] == "lost"]
    golden.check("who was lost", [line["who"] for line in lost], lose)
    again = [line["step"] - after(lines, line, "resume")["step"] for line in lost]
    golden.check("steps done again after a loss", again, [golden.done_again(line["step"]) for line in lost])
    for i, (got, want) in enumerate(zip([loss, *model.parameters()], golden.train(), strict=True)):
        golden.close(f"parameter {i}" if i else "final loss", got.detach(), want)
    print(f"golden ok: rank {rank} of {world}: loss {loss.item():.12f} after {step} steps, as if nothing had happened")
    dist.destroy_process_group()


def save(model: torch.nn.Module, speed: list[torch.Tensor], step: int) -> None:
    """Everything the next step depends on; written beside and renamed, so that a kill in between leaves the old one."""
    state = {"step": step, "model": model.state_dict(), "speed": speed}
    torch.save(state, disk / "checkpoint.new")
    (disk / "checkpoint.new").rename(disk / "checkpoint.pt")


def resume(model: torch.nn.Module, speed: list[torch.Tensor]) -> int:
    """Load the newest checkpoint that any rank has on its disk, on all ranks: a node may have missed some."""
    path = disk / "checkpoint.pt"
    mine = torch.load(path) if path.exists() else {"step": 0}
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, mine["step"])
    newest = [mine]
    dist.broadcast_object_list(newest, src=steps.index(max(steps)))
    if newest[0]["step"]:
        model.load_state_dict(newest[0]["model"])
        speed[:] = newest[0]["speed"]
    return newest[0]["step"]


def lose_once(who: str, step: int, me: bool) -> None:
    """The last rank kills itself, or its agent and itself; not again as long as one disk remembers it."""
    marker, known = disk / f"{who}-was-lost", [False] * dist.get_world_size()
    dist.all_gather_object(known, marker.exists())
    marker.touch()
    if me and not any(known):
        note("lost", who=who, step=step)
        if who == "node":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def note(what: str, **more: object) -> None:
    """One line on this node's board."""
    with board.open("a") as file:
        file.write(json.dumps({"at": time.time(), "what": what, **more}) + "\n")


def after(lines: list[dict], line: dict, what: str) -> dict:
    """The next line of this kind."""
    return next(one for one in lines if one["what"] == what and one["at"] > line["at"])


def scoreboard(lines: list[dict]) -> list[str]:
    """What each loss cost, and the size of the world over time; the latter goes to $OUT/picture.json as well."""
    told, zero, points = [], lines[0]["at"], []
    for lost in (line for line in lines if line["what"] == "lost"):
        up, again = after(lines, lost, "up"), lost["step"] - after(lines, lost, "resume")["step"]
        noticed = [one["at"] for one in lines if one["what"] == "noticed" and lost["at"] < one["at"] < up["at"]]
        seen = min([*noticed, up["born"]])
        costs = f"noticed after {seen - lost['at']:.1f} s, met again after {up['born'] - seen:.1f} s"
        costs += f", in again after {up['at'] - up['born']:.1f} s, {again} steps done again"
        told.append(f"{lost['who']} lost after step {lost['step']}: {costs}")
    for world, part in groupby((line for line in lines if "world" in line), key=lambda line: line["world"]):
        times = [line["at"] - zero for line in part]
        told.append(f"world of {world}: {'#' * world:8} from {times[0]:5.1f} s to {times[-1]:5.1f} s")
        points += [[round(times[0], 2), world], [round(times[-1], 2), world]]
    if folder := os.environ.get("OUT"):
        picture = {"kind": "lines", "title": "Size of the world", "x": "seconds", "y": "ranks"}
        series = [{"name": "ranks", "style": "line", "points": points}]
        Path(folder, "picture.json").write_text(json.dumps(picture | {"series": series}))
    return told


if __name__ == "__main__":
    main()
