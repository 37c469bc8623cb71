"""Grade: each side of each lab, what it should give and what it gave. The kind is derived from logs and exit codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrack.diagnose import Diagnosis, diagnose_folder
from torchrack.model.job import Job, Launcher
from torchrack.model.rack import LocalRack, Model
from torchrack.model.result import RunResult
from torchrack.run.folder import RackFolder
from torchrack.run.lifecycle import bring_up
from torchrack.run.phases import Progress
from torchrack.run.record import read_result
from torchrack.teach.catalogue import LabFolder, Variant
from torchrack.teach.labrun import not_run, run_lab

HEALTHY = "healthy"
PASSED = "passed"
NOT_RUN = "not_run"


class GradeRow(Model):
    """One side of one lab, or a part of its healthy side that could not run here, for want of a GPU say.

    `expected` and `verdict` are `passed` or the name of a kind of failure. A part that was not run has the verdict
    `not_run` and an `ok` of null: it is listed, and counts neither as passed nor as failed. `culprits` are those whom
    diagnose blames, `suspects` those whom it may blame at the lab's own size: at least one of them, and nobody else.
    """

    lab: str
    variant: str
    expected: str
    verdict: str
    ok: bool | None
    seconds: float
    evidence: str | None
    culprits: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    launcher: str = "torchrun"
    record: str = ""


@dataclass(frozen=True)
class Side:
    """One thing to run and grade: a lab's healthy side, or one of its broken sides."""

    lab: LabFolder
    name: str
    variant: Variant | None

    @property
    def expected(self) -> str:
        return self.variant.expect if self.variant else PASSED

    @property
    def suspects(self) -> tuple[str, ...]:
        return self.variant.culprit if self.variant else ()

    @property
    def nodes(self) -> int:
        return (self.variant and self.variant.nodes) or self.lab.lab.nodes

    @property
    def nproc(self) -> int:
        return (self.variant and self.variant.nproc) or self.lab.lab.nproc

    @property
    def rack(self) -> dict[str, object]:
        """What the rack must be: keys of LocalRack."""
        return {"nodes": self.nodes} | self.lab.rack(self.variant)

    @property
    def deadline(self) -> float:
        return (self.variant and self.variant.deadline) or self.lab.lab.deadline


def sides(lab: LabFolder) -> Iterator[Side]:
    """The healthy side, then the broken ones in the order of lab.yaml."""
    yield Side(lab, HEALTHY, None)
    for name, variant in lab.lab.variants.items():
        yield Side(lab, name, variant)


def grade(side: Side, folder: Path) -> GradeRow:
    """Judge the record of a run. Reads the logs anew, so that a record with other logs gets another row."""
    result = read_result(folder)
    found = diagnose_folder(folder / "logs")
    verdict = _verdict(result, found)
    culprits = tuple(f"{who.node}" if who.rank is None else f"{who.node}/{who.rank}" for who in found.culprits)
    other_size = result and (result.nodes, result.nproc) != (side.nodes, side.nproc)  # there, other ranks are to blame
    blamed = other_size or (set(culprits) <= set(side.suspects) and bool(culprits) == bool(side.suspects))
    return GradeRow(
        lab=side.lab.number,
        variant=side.name,
        expected=side.expected,
        verdict=verdict,
        ok=verdict == side.expected and bool(blamed),
        seconds=result.seconds if result else 0.0,
        evidence=_evidence(result, found),
        culprits=culprits,
        suspects=side.suspects,
        launcher=result.launcher if result else "torchrun",
        record=result.record if result else str(folder),
    )


def not_run_rows(side: Side, row: GradeRow, folder: Path) -> list[GradeRow]:
    """A row for each part that a healthy side left out; broken sides would repeat them."""
    result = read_result(folder) if side.variant is None else None
    return [
        row.model_copy(
            update={
                "variant": f"{side.name}: {what}",
                "verdict": NOT_RUN,
                "ok": None,
                "seconds": 0.0,
                "evidence": where,
            }
        )
        for what, where in (not_run(result, folder) if result else {}).items()
    ]


def all_ok(rows: Sequence[GradeRow]) -> bool:
    """At least one side ran, and each that did gave what it must."""
    return any(row.ok for row in rows) and not any(row.ok is False for row in rows)


def summary(rows: Sequence[GradeRow]) -> str:
    ran = [row for row in rows if row.ok is not None]
    good, seconds = sum(row.ok is True for row in ran), sum(row.seconds for row in ran)
    left_out = f", {len(rows) - len(ran)} part(s) not run" if len(ran) < len(rows) else ""
    return f"{good} of {len(ran)} sides as expected{left_out}, {seconds:.0f} s"


def _verdict(result: RunResult | None, found: Diagnosis) -> str:
    if result is None:
        return NOT_RUN
    if result.verdict == PASSED:
        # A run that ended well, but whose logs name a fault, did not pass: one of the two is wrong.
        return PASSED if found.verdict != "fault" else str(found.kind)
    if result.kind == "check-failed":
        return result.kind
    if found.verdict == "fault":
        return str(found.kind)
    return "hang" if result.verdict == "timed_out" else "unknown"


def _evidence(result: RunResult | None, found: Diagnosis) -> str | None:
    if found.evidence:
        return f"logs/{found.evidence[0].file}:{found.evidence[0].line}"
    return result.evidence if result else None


def grade_sides(
    wanted: Iterable[Side],
    rack: LocalRack,
    launcher: Launcher,
    folder: RackFolder,
    lock_fd: int,
    progress: Progress,
) -> Iterator[GradeRow]:
    """Run and judge each side in turn, on a rack that is made anew only when a side needs another size.

    `launcher` is for labs that do not teach launching; those always go by torchrun itself. An interrupt ends it all.
    """
    for side in wanted:
        progress.console.note(f"— lab {side.lab.number} {side.name}: expected {side.expected}")
        live = bring_up(rack.model_copy(update=side.rack), side.nproc, progress, folder, lock_fd)
        by: Launcher = "torchrun" if side.lab.lab.teaches_launching else launcher
        result = run_lab(live, side.lab, Job(nproc=side.nproc, launcher=by), progress, side.variant)
        row = grade(side, folder.path / result.run)
        blames = f", blames {', '.join(row.culprits)}" if row.culprits else ""
        progress.console.note(f"{'✓' if row.ok else '✗'} lab {row.lab} {row.variant}: {row.verdict}{blames}")
        yield row
        yield from not_run_rows(side, row, folder.path / result.run)
        if result.verdict == "interrupted":
            return
