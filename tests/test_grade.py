"""Every side of every lab on every runtime fails or passes as it must; with two sides' logs swapped, both rows turn red."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from racks import RUNTIMES, Cli

from torchrack.diagnose import KINDS
from torchrack.model.result import RankResult, RunResult
from torchrack.run.record import write_result
from torchrack.teach.catalogue import GRADE_BUDGET, find, labs
from torchrack.teach.grade import HEALTHY, PASSED, GradeRow, Side, all_ok, grade, not_run_rows, sides, summary

ALL = [side for lab in labs() for side in sides(lab)]
GRADE_WITHIN = 3000.0
# On compose the labs on launching and networks, which are what a runtime could change: all of them take 25 minutes more
# there (make grade-nightly; TORCHRACK_GRADE=all).
COMPOSE = (
    [lab.number for lab in labs()]
    if os.environ.get("TORCHRACK_GRADE") == "all"
    else ["01", "02", "03", "04", "05", "06"]
)


@pytest.fixture(scope="module", params=RUNTIMES)
def graded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cli, list[GradeRow]]]:
    """The whole grade, once a runtime: the command itself, as a person would type it."""
    cli = Cli(tmp_path_factory.mktemp("grade"), request.param, "grade")
    rows = []
    for what in ["--all"] if cli.runtime == "netns" else COMPOSE:
        try:
            done = cli("lab", "grade", what, "--runtime", cli.runtime, "--json", timeout=GRADE_WITHIN)
        except subprocess.TimeoutExpired as error:
            cli.down()
            pytest.fail(f"no end within {GRADE_WITHIN:.0f} s; the last words: {(error.stderr or b'').decode()[-3000:]}")
        told = [GradeRow.model_validate(row) for row in json.loads(done.stdout)]
        assert done.returncode == (0 if all_ok(told) else 1)
        rows += told
    for row in rows:  # what was left out is told, is nobody's success, and is for want of a card only
        assert row.ok is not None or (row.verdict == "not_run" and ": needs a GPU: " in row.variant), row
    yield cli, [row for row in rows if row.ok is not None]
    assert cli("status", "--json").stdout.strip() == "[]", "grade takes its rack down"


def wanted(cli: Cli) -> list[Side]:
    return [side for side in ALL if cli.runtime == "netns" or side.lab.number in COMPOSE]


@pytest.mark.slow
def test_every_side_gives_what_it_must(graded: tuple[Cli, list[GradeRow]]) -> None:
    cli, rows = graded
    assert [(row.lab, row.variant) for row in rows] == [(side.lab.number, side.name) for side in wanted(cli)]
    red = [
        f"{row.lab} {row.variant}: expected {row.expected} of {row.suspects}, got {row.verdict} of {row.culprits} ({row.record})"
        for row in rows
        if not row.ok
    ]
    assert not red, "\n".join(red)


@pytest.mark.slow
def test_each_side_ends_before_its_deadline(graded: tuple[Cli, list[GradeRow]]) -> None:
    cli, rows = graded
    for row, side in zip(rows, wanted(cli), strict=True):
        result = json.loads((Path(row.record) / "result.json").read_text())
        assert result["verdict"] != "timed_out" or row.expected == "hang", f"{row.lab} {row.variant}"
        assert row.seconds < side.deadline, f"{row.lab} {row.variant}"


@pytest.mark.slow
def test_a_broken_side_has_evidence_that_exists(graded: tuple[Cli, list[GradeRow]]) -> None:
    _, rows = graded
    for row in rows:
        if row.variant == HEALTHY:
            continue
        assert row.evidence, f"{row.lab} {row.variant}"
        file, _, line = row.evidence.rpartition(":")
        assert len((Path(row.record) / file).read_text(errors="replace").splitlines()) >= int(line)
        told = find(row.lab).variant(row.variant).evidence
        logs = [log.read_text(errors="replace") for log in (Path(row.record) / "logs").rglob("*.log")]
        assert told is None or any(re.search(told, log, re.MULTILINE) for log in logs), f"{row.lab} {row.variant}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [("05 shape", "05 monitored"), ("05 healthy", "05 dtype"), ("06 missing-node", "06 port-taken")],
)
def test_swapped_logs_turn_both_rows_red(
    one: str, other: str, graded: tuple[Cli, list[GradeRow]], tmp_path: Path
) -> None:
    _, rows = graded
    by_name = {f"{row.lab} {row.variant}": row for row in rows}
    for name, logs_of in ((one, other), (other, one)):
        folder = tmp_path / name.replace(" ", "-")
        shutil.copytree(by_name[name].record, folder, ignore=lambda _, names: [n for n in names if n == "logs"])
        shutil.copytree(Path(by_name[logs_of].record) / "logs", folder / "logs")
        number, variant = name.split()
        lab = find(number)
        side = Side(lab, variant, None if variant == HEALTHY else lab.variant(variant))
        assert grade(side, Path(by_name[name].record)).ok, "with its own logs it is green"
        assert not grade(side, folder).ok, f"{name} is green with the logs of {logs_of}"


def test_a_part_that_was_not_run_is_listed_and_is_no_pass(tmp_path: Path) -> None:
    """The healthy side of lab 18 as it runs without a card, on two ranks that say the same."""
    ranks = [RankResult(rank=r, node="node0", local_rank=r, exit=0, signal=None, log=f"logs/{r}.log") for r in (0, 1)]
    (tmp_path / "logs").mkdir()
    for rank in ranks:
        (tmp_path / rank.log).write_text("hello\nnot run: needs a GPU: CUDA IPC\ngolden ok: rank 0\n")
    told = {"run": "r", "rack": "r", "runtime": "netns", "nodes": 1, "nproc": 2, "target": "lab 18", "kind": None}
    result = RunResult.model_validate(
        told | {"verdict": "passed", "ranks": ranks, "wires": (), "pinned_share": None, "seconds": 1.0, "record": "r"}
    )
    write_result(tmp_path, result)
    lab = find("18")
    healthy = Side(lab, HEALTHY, None)
    row = grade(healthy, tmp_path)
    (left_out,) = not_run_rows(healthy, row, tmp_path)
    assert left_out.variant == "healthy: needs a GPU: CUDA IPC"
    assert (left_out.verdict, left_out.ok, left_out.evidence) == ("not_run", None, "logs/0.log:2")
    assert not not_run_rows(Side(lab, "no-scale", lab.variant("no-scale")), row, tmp_path)
    assert summary([row, left_out]) == "1 of 1 sides as expected, 1 part(s) not run, 1 s"
    assert all_ok([row, left_out])
    assert not all_ok([left_out]), "nothing that ran is no pass"
    assert not all_ok([row.model_copy(update={"ok": False}), left_out])


def test_the_labs_budgets_fit_into_the_grades() -> None:
    """make labs-bench holds the seconds that each lab takes against them."""
    assert sum(lab.lab.budget for lab in labs()) <= GRADE_BUDGET
    for side in ALL:
        assert 0 < side.deadline <= 240, f"{side.lab.number} {side.name}"


def test_every_lab_expects_kinds_that_exist() -> None:
    assert [lab.number for lab in labs()][:6] == ["01", "02", "03", "04", "05", "06"]
    for side in ALL:
        assert side.expected == PASSED or side.expected in KINDS, f"{side.lab.number} {side.name}"


def test_every_lab_has_its_pages_and_a_broken_side() -> None:
    for lab in labs():
        assert {"README.md", "lab.py", "golden.py", "lab.yaml"} <= {path.name for path in lab.path.iterdir()}
        assert lab.lab.variants
        page = (lab.path / "README.md").read_text()
        for variant in lab.lab.variants:
            assert variant in page, f"{lab.name}: the page does not tell of {variant}"
