"""make bench: what the kit adds, side by side with the thing itself, in one run on this machine.

Medians of alternated rounds; on a noisy machine quote the ratios, not the seconds. Each row tells its bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
TR = str(BIN / "torchrack")
RACK = f"bench-{os.getpid()}"  # a name of its own: another bench on this engine must not be in the way
LAB = Path("labs/01-one-world/lab.py").resolve()


@dataclass(frozen=True)
class Row:
    """One claim: what was measured, beside what, and whether it keeps its bound."""

    name: str
    ours: float
    other: float | None
    claim: str
    ok: bool

    def __str__(self) -> str:
        beside = f"{self.other:8.2f}  {self.ours / self.other:5.2f}×" if self.other else " " * 16
        return f"{'✓' if self.ok else '✗'} {self.name:<58} {self.ours:8.2f}  {beside}  {self.claim}"


def timed(argv: Sequence[str], **kwargs: object) -> float:
    start = time.monotonic()
    subprocess.run(argv, check=True, capture_output=True, **kwargs)  # type: ignore[call-overload]
    return time.monotonic() - start


def alternated(rounds: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Seconds of each measure, taken in turn so that the machine's drift meets all alike; one round is thrown away."""
    taken: list[list[float]] = [[] for _ in measures]
    for i in range(rounds + 1):
        for seconds, measure in zip(taken, measures, strict=True):
            value = measure()
            if i:
                seconds.append(value)
    return taken


def job_rows(runtime: str, rounds: int) -> list[Row]:
    """A warm `lab run` against the same commands typed by hand on the same rack, and against bare torchrun."""
    from torchrack.run.lifecycle import attach

    lab = [TR, "lab", "run", "01", "--nodes", "2", "--runtime", runtime, "--rack", RACK, "--json"]
    subprocess.run(lab, check=True, capture_output=True)
    live = attach(RACK)

    def by_hand() -> float:
        start = time.monotonic()
        target = ["bash", "scripts/rank.sh", "labs/01-one-world/lab.py"]
        run = ["--nproc-per-node=1", f"--rdzv-id=hand{time.monotonic_ns()}", "--no-python", *target]
        launched = [live.place.spawn(node, ["bash", "scripts/launch.sh", *run]) for node in live.rack.node_names]
        for process in launched:
            _, errors = process.communicate()
            assert process.returncode == 0, errors.decode()
        return time.monotonic() - start

    bare = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", str(LAB)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ours, hand, standalone = alternated(rounds, lambda: timed(lab), by_hand, lambda: timed(bare, env=env))
    subprocess.run([TR, "down", "--rack", RACK], check=True, capture_output=True)
    a, b, c = (statistics.median(x) for x in (ours, hand, standalone))
    return [
        Row(f"{runtime}: warm lab 01, 2×1, beside the same by hand", a, b, f"adds {a - b:.2f} s (≤ 1.0)", a - b <= 1.0),
        Row(f"{runtime}: the same beside bare torchrun --standalone", a, c, "≤ 1.5×", a <= 1.5 * c),
    ]


def up_netns(rounds: int) -> Row:

    def once() -> float:
        from torchrack.model.rack import Rack
        from torchrack.run.folder import RackFolder
        from torchrack.run.lifecycle import LOCAL_PLACES

        folder = RackFolder(RACK)
        folder.make()
        place = LOCAL_PLACES["netns"](RACK, folder.place)
        start = time.monotonic()
        place.up(Rack(name=RACK, nodes=8), lambda text: None)
        seconds = time.monotonic() - start
        place.down()
        return seconds

    [seconds] = alternated(rounds, once)
    median = statistics.median(seconds)
    return Row("netns: 8 nodes up", median, None, "≤ 1 s", median <= 1.0)


def up_compose(rounds: int) -> Row:
    """Our up, hosts, nsswitch and shaping included, against plain `docker compose up -d` on the same file."""
    from torchrack.model.rack import Rack
    from torchrack.run.folder import RackFolder
    from torchrack.run.lifecycle import LOCAL_PLACES

    folder = RackFolder(RACK)
    folder.make()
    place = LOCAL_PLACES["compose"](RACK, folder.place)
    place.prepare(lambda text: None)

    def ours() -> float:
        start = time.monotonic()
        place.up(Rack(name=RACK, nodes=8), lambda text: None)
        seconds = time.monotonic() - start
        file = (folder.place / "compose.yaml").read_text()
        place.down()
        (folder.path / "plain.yaml").write_text(file)
        return seconds

    def plain() -> float:
        compose = ["docker", "compose", "-f", str(folder.path / "plain.yaml")]
        seconds = timed([*compose, "up", "-d"])
        for _ in range(5):  # the engine may still count an endpoint of a container that has just gone
            if subprocess.run([*compose, "down", "-t", "0"], capture_output=True).returncode == 0:
                return seconds
            time.sleep(1)
        raise RuntimeError(f"{' '.join(compose)} down leaves something behind")

    a, b = (statistics.median(x) for x in alternated(rounds, ours, plain))
    return Row("compose: 8 nodes up beside plain docker compose up -d", a, b, "≤ 1.2×", a <= 1.2 * b)


def render_1024() -> Row:
    from torchrack.model.job import Job
    from torchrack.model.rack import Rack
    from torchrack.plan.render import node_files
    from torchrack.run.preview import preview

    rack = Rack(name="bench-render", nodes=1024, mgmt_subnet="10.80.0.0/16", fabric_subnet="10.81.0.0/16")
    node_files(preview(rack.model_copy(update={"nodes": 1}), Job(), 8))
    start = time.monotonic()
    files = node_files(preview(rack, Job(nproc=8), 128))
    seconds = time.monotonic() - start
    assert len(files) == 1024
    return Row("plan and render for 1,024 nodes", seconds, None, "≤ 1 s", seconds <= 1.0)


def cli_start(rounds: int) -> Row:
    seconds = statistics.median(alternated(rounds, lambda: timed([TR, "--help"]))[0])
    return Row("torchrack --help", seconds, None, "≤ 0.5 s", seconds <= 0.5)


def runtimes() -> list[str]:
    from torchrack.model.errors import TorchrackError
    from torchrack.run.lifecycle import LOCAL_PLACES

    found = []
    for kind, make in LOCAL_PLACES.items():
        try:
            make("probe", Path("/nonexistent/torchrack-probe")).check()
            found.append(kind)
        except TorchrackError as error:
            print(f"– {kind} is left out: {error}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="torchrack-bench-") as home:
        os.environ["TORCHRACK_HOME"] = home  # the user's racks are not touched
        print(f"{'':60} {'seconds':>8}  {'beside':>8}")
        rows = []
        for measure in measures(rounds):
            for row in measure():
                print(row, flush=True)
                rows.append(row)
    return 0 if all(row.ok for row in rows) else 1


def measures(rounds: int) -> list[Callable[[], list[Row]]]:
    there = runtimes()
    chosen: list[Callable[[], list[Row]]] = [lambda: [cli_start(rounds)], lambda: [render_1024()]]
    if "netns" in there:
        chosen.append(lambda: [up_netns(rounds)])
    if "compose" in there:
        chosen.append(lambda: [up_compose(rounds)])
    chosen += [lambda kind=kind: job_rows(kind, rounds) for kind in there]  # type: ignore[misc]
    return chosen


sys.exit(main())
