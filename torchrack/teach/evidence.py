"""The dated table that a whole grade leaves: what ran, on which versions, with how many ranks, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from torchrack.run.folder import disk_errors, state_root
from torchrack.run.record import read_result
from torchrack.teach.grade import GradeRow, summary

OK = {True: "yes", False: "**no**", None: "–"}


def write_evidence(rows: Sequence[GradeRow], now: datetime | None = None) -> Path:
    """Write .torchrack/evidence/grade-<UTC time>-<runtime>.md and return its path."""
    when = now or datetime.now(UTC)
    results = [read_result(Path(row.record)) for row in rows]
    runtime = next((result.runtime for result in results if result), "none")
    path = state_root() / ".torchrack" / "evidence" / f"grade-{when:%Y%m%d-%H%M%S}-{runtime}.md"
    table = [
        _row(row.lab, row.variant, f"{r.nodes}×{r.nproc}" if r else "", row.launcher, row.expected, row.verdict)
        + f" {' '.join(row.culprits)} | {OK[row.ok]} | {row.seconds:.1f} |"
        for row, r in zip(rows, results, strict=True)
    ]
    told = {name: value for result in results if result for name, value in result.versions.items()}
    text = [
        f"# Grade of {when:%Y-%m-%d %H:%M} UTC on {runtime}",
        "",
        ", ".join(f"{name} {value}" for name, value in told.items()),
        "",
        _row("lab", "side", "nodes×ranks", "launcher", "expected", "verdict") + " blames | as expected | seconds |",
        "|" + "---|" * 9,
        *table,
        "",
        f"{summary(rows)}.",
    ]
    with disk_errors(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(text) + "\n")
    return path


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
