"""A whole grade leaves a dated table: what ran, on which versions, and what came out."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from torchrack.model.result import RunResult
from torchrack.run.record import write_result
from torchrack.teach.evidence import write_evidence
from torchrack.teach.grade import GradeRow


def row(record: Path, variant: str, verdict: str, ok: bool) -> GradeRow:
    return GradeRow(
        lab="01",
        variant=variant,
        expected="passed",
        verdict=verdict,
        ok=ok,
        seconds=1.5,
        evidence=None,
        launcher="fork",
        record=str(record),
    )


def test_the_table_says_what_ran_and_what_came_out(home: Path) -> None:
    result = RunResult(
        run="r",
        rack="grade",
        runtime="netns",
        nodes=2,
        nproc=4,
        target="lab 01",
        verdict="passed",
        kind=None,
        ranks=(),
        wires=(),
        pinned_share=None,
        seconds=1.5,
        versions={"torch": "2.13.0+cpu"},
        record=str(home / "r"),
    )
    (home / "r").mkdir()
    write_result(home / "r", result)
    rows = [row(home / "r", "healthy", "passed", True), row(home / "gone", "skip", "not_run", False)]
    path = write_evidence(rows, datetime(2026, 11, 29, 12, 0, tzinfo=UTC))
    assert path == home / ".torchrack" / "evidence" / "grade-20261129-120000-netns.md"
    text = path.read_text()
    assert "Grade of 2026-11-29 12:00 UTC on netns" in text
    assert "torch 2.13.0+cpu" in text
    assert "| 01 | healthy | 2×4 | fork | passed | passed |  | yes | 1.5 |" in text
    assert "| 01 | skip |  | fork | passed | not_run |  | **no** | 1.5 |" in text
    assert "1 of 2 sides as expected" in text
