"""Start a job on a rack that is up: facts → plan → execution. Labs and users' scripts come through here alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchrack.model.job import Job, RunSpec
from torchrack.model.result import RunResult
from torchrack.plan.plan import Plan, plan
from torchrack.run.execute import Execution
from torchrack.run.lifecycle import LiveRack
from torchrack.run.phases import Phase, Progress
from torchrack.run.target import Target


def start(
    live: LiveRack,
    job: Job,
    target: Target,
    args: tuple[str, ...],
    deadline: float,
    folder: Path,
    progress: Progress,
    secrets: Mapping[str, str] | None = None,
) -> RunResult:
    """Plan and run; returns the recorded result. `deadline` is in seconds, `folder` the run's own, named by its id.

    `secrets` are variables for every rank whose values no file, log or record ever shows.
    """
    with progress.phase(Phase.PLAN) as said:
        made = plan(live.rack, live.facts, job)
        said.append(summary(made))
    run = RunSpec(id=folder.name, target=target.path, args=args, deadline=deadline, title=target.title)
    return Execution(live, made, run, target, folder, progress, secrets).execute()


def summary(made: Plan) -> str:
    """Where the agents meet and over which network the bytes go, in one line."""
    job = made.job
    meets = "standalone" if job.mode == "standalone" else f"{job.mode} at node0 {job.endpoint_net} {made.endpoint}"
    pin = "not pinned" if job.pin == "none" else f"pinned to {job.pin}"
    ranks = f"{job.nproc} rank{'s' * (job.nproc > 1)} a node"
    return f"{meets}, {pin}, {ranks}   (why: make render EXPLAIN=1)"
