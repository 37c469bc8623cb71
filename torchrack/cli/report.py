"""What is printed after a run: results in rank order, wires, verdict, the next command to type."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchrack.cli import tables
from torchrack.model.job import Pin
from torchrack.model.result import RunResult

if TYPE_CHECKING:
    from torchrack.teach.catalogue import Variant
    from torchrack.teach.grade import GradeRow

WARN_BELOW = 0.99  # of the bytes on the pinned network; the store and the rendezvous cost a few kB elsewhere


def report(result: RunResult, pin: Pin, next_command: str) -> None:
    """Tables on stdout, verdict and next step on stderr; a run that was interrupted needs no tables."""
    if result.verdict != "interrupted":
        tables_of(result, pin)
    _say(verdict_lines(result), [f"! {warning}" for warning in warnings(result, pin)], [f"  Next: {next_command}"])


def tables_of(result: RunResult, pin: Pin) -> None:
    """The ranks in rank order and the wires, on stdout."""
    tables.show(tables.ranks(result.ranks, last_lines(result)))
    print()
    if result.wires:
        tables.show(tables.wires(result, pin))
        print()
    sys.stdout.flush()


def _say(*groups: list[str]) -> None:
    for group in groups:
        for line in group:
            print(line, file=sys.stderr)


def rack(result: RunResult) -> str:
    """What to add to a make command so that it means this rack."""
    return "" if result.rack == "lab" else f" RACK={result.rack}"


def verdict_lines(result: RunResult) -> list[str]:
    """The verdict and, if it is not a pass, why, the evidence, the fix and where the record is."""
    if result.verdict == "passed":
        return [f"✓ {result.target} passed in {result.seconds:.1f} s.   Record: {result.record}"]
    kind = f": {result.kind}" if result.kind else ""
    head = f"✗ {result.target} {result.verdict.replace('_', ' ')} after {result.seconds:.1f} s{kind}"
    return [head, *reasons(result)]


def reasons(result: RunResult) -> list[str]:
    """Why a run failed, the line that shows it, what to change, and its record; only what is known."""
    evidence = result.evidence and f"{result.record}/{result.evidence}"
    known = {"why": result.why, "evidence": evidence, "fix": result.fix, "record": result.record}
    return [f"  {name:<9} {text}" for name, text in known.items() if text]


def warnings(result: RunResult, pin: Pin) -> list[str]:
    """What a passed run should still make its user look at."""
    share = result.pinned_share
    if result.verdict != "passed" or share is None or share >= WARN_BELOW:
        return []
    return [
        f"only {share:.0%} of the bytes went over {pin}, which the job is pinned to: torchrack nic shows who picks what"
    ]


def exit_code(result: RunResult, pin: Pin) -> int:
    if result.verdict != "passed":
        return 1
    return 3 if warnings(result, pin) else 0


def last_lines(result: RunResult) -> dict[int, str]:
    """The last line that each rank printed."""
    return {row.rank: _last(Path(result.record) / row.log) for row in result.ranks}


def _last(path: Path) -> str:
    try:
        lines = [line for line in path.read_text(errors="replace").splitlines() if not line.startswith("# torchrack")]
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def broken(row: GradeRow, result: RunResult, variant: Variant) -> None:
    """What a broken side taught: did it fail in its named way, how that looks, what to change."""
    mark, said = ("✓", "broke as it must") if row.ok else ("✗", f"should give {row.expected}, but gave")
    if row.verdict == row.expected and not row.ok:
        said = f"should blame {', '.join(row.suspects) or 'nobody'}, not {', '.join(row.culprits) or 'nobody'}"
    head = f"{mark} lab {row.lab} {row.variant} {said}: {row.verdict}, after {result.seconds:.1f} s"
    told = reasons(result.model_copy(update={"fix": variant.fix}))
    again = f"  Next: make lab-cpu LAB={row.lab}{rack(result)}   (the healthy side)"
    _say([head, f"  {'broken':<9} {variant.title}", *told, again])


def grades(rows: list[GradeRow]) -> None:
    """One row a side on stdout, the sum on stderr."""
    from torchrack.teach.grade import summary

    table = tables.boxed("", "lab", "variant", "expected", "verdict", "blames", "seconds", "evidence")
    for row in rows:
        mark = {True: "✓", False: "✗", None: "–"}[row.ok]
        evidence = row.evidence or ""
        blames = " ".join(row.culprits)
        table.add_row(mark, row.lab, row.variant, row.expected, row.verdict, blames, f"{row.seconds:.1f}", evidence)
    tables.show(table)
    print(summary(rows), file=sys.stderr)
