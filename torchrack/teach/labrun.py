"""Run one side of a lab on a rack that is up, and hold its logs against the lab's checks."""

from __future__ import annotations

import re
from pathlib import Path

from torchrack.model.job import Job
from torchrack.model.result import RunResult
from torchrack.run.execute import shown
from torchrack.run.lifecycle import LiveRack
from torchrack.run.phases import Phase, Progress
from torchrack.run.record import write_result
from torchrack.run.start import start
from torchrack.teach.catalogue import Check, LabFolder, Variant
from torchrack.teach.pictures import draw_all

NOT_RUN = "not run: "


def run_lab(
    live: LiveRack,
    lab: LabFolder,
    job: Job,
    progress: Progress,
    variant: Variant | None = None,
    args: tuple[str, ...] | None = None,
    deadline: float | None = None,
) -> RunResult:
    """Run the healthy side or a variant, whose keys win over `job`; a passed run must also hold the lab's checks.

    Raises UsageError for a world size that the lab does not take.
    """
    lab.check_world(live.rack.nodes, job.nproc)
    side = variant or lab.lab
    chosen = next(a for a in (args, side.args, lab.lab.args) if a is not None)
    limit = deadline or side.deadline or lab.lab.deadline
    job = changed(job, lab.lab.job, variant.job if variant else {})
    folder = live.folder.new_run()
    result = start(live, job, lab.target(), chosen, limit, folder, progress)
    if result.verdict == "passed":
        with progress.phase(Phase.GOLDEN) as said:
            result = checked(result, lab.lab.checks, folder)
            said.ok = result.verdict == "passed"
            said.append(f"the lab's checks hold on all {len(result.ranks)} ranks" if said.ok else str(result.why))
            if parts := len(not_run(result, folder)):
                said.append(f"{parts} part(s) not run")
            write_result(folder, result)
    for svg in draw_all(folder):
        progress.console.note(f"  picture: {shown(svg)}")
    return result


def changed(job: Job, *keys: dict[str, object]) -> Job:
    """A job with some of its keys replaced, validated again."""
    data = job.model_dump()
    for more in keys:
        data |= more
    return Job.model_validate(data)


def checked(result: RunResult, checks: tuple[Check, ...], folder: Path) -> RunResult:
    """The result, turned into `check-failed` if a log does not show what the lab says it must."""
    texts = {rank.rank: _text(folder / rank.log) for rank in result.ranks}
    for check in checks:
        if check.any_rank and not any(_shows(check.any_rank, text) for text in texts.values()):
            return _failed(result, f"no rank's log shows {check.any_rank!r}", None)
        for rank in result.ranks:
            if check.every_rank and not _shows(check.every_rank, texts[rank.rank]):
                where = f"{shown(folder / rank.log)}:1"
                return _failed(result, f"rank {rank.rank}'s log does not show {check.every_rank!r}", where)
    return result


def not_run(result: RunResult, folder: Path) -> dict[str, str]:
    """What ranks said that they could not run here ("not run: needs a GPU: ..."), with the first place that says so."""
    found: dict[str, str] = {}
    for rank in result.ranks:
        for number, line in enumerate(_text(folder / rank.log).splitlines(), 1):
            if line.startswith(NOT_RUN):
                found.setdefault(line.removeprefix(NOT_RUN), f"{rank.log}:{number}")
    return found


def _failed(result: RunResult, why: str, evidence: str | None) -> RunResult:
    update = {"verdict": "failed", "kind": "check-failed", "why": why, "evidence": evidence}
    return result.model_copy(update=update)


def _shows(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.MULTILINE) is not None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
