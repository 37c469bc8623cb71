"""labs/SEEDS.md: every lesson of the three texts is there, and every side, mutant and question that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchrack.teach.catalogue import LabFolder, labs
from torchrack.teach.grade import HEALTHY

ROOT = Path(__file__).resolve().parent.parent
# Counted by hand in the texts: their table rows, exercises, self-test questions, traps and pitfalls.
LESSONS = {"A": 15, "B": 86, "C": 61}
ROW = re.compile(r"^\| ([ABC]\d+) \|(.*)\|(.*)\|(.*)\|$", re.MULTILINE)
REFERENCE = re.compile(r'(?P<lab>\d\d) (?:mutant `(?P<mutant>[^`]+)`|`(?P<side>[^`]+)`|question "(?P<question>[^"]+)")')
ROWS = {
    number: (what.strip(), shown.strip())
    for number, what, shown, _ in ROW.findall((ROOT / "labs/SEEDS.md").read_text())
}


def faults(shown: str, known: dict[str, LabFolder]) -> list[str]:
    """What is wrong with the third cell of a row: nothing, if it is a list of things that exist."""
    found = []
    for item in shown.split("; "):
        named = REFERENCE.fullmatch(item)
        if not named:
            found.append(f"{item!r} names no side, mutant or question of a lab")
        elif not (lab := known.get(named["lab"])):
            found.append(f"there is no lab {named['lab']}")
        elif (side := named["side"]) and side not in (HEALTHY, *lab.lab.variants):
            found.append(f"lab {lab.number} has no side {side}")
        elif (mutant := named["mutant"]) and mutant not in lab.lab.mutants:
            found.append(f"lab {lab.number} has no mutant {mutant}")
        elif (question := named["question"]) and f"- *{question}*" not in (lab.path / "README.md").read_text():
            found.append(f"the page of lab {lab.number} does not ask: {question}")
    return found


@pytest.fixture(scope="module")
def known() -> dict[str, LabFolder]:
    return {lab.number: lab for lab in labs()}


def test_every_lesson_has_its_row_in_order() -> None:
    assert list(ROWS) == [f"{text}{n}" for text, count in LESSONS.items() for n in range(1, count + 1)]


def test_every_row_says_what_and_where(known: dict[str, LabFolder]) -> None:
    wrong = {number: faults(shown, known) for number, (what, shown) in ROWS.items() if what or pytest.fail(number)}
    assert not {number: found for number, found in wrong.items() if found}


def test_every_lab_and_every_broken_side_is_somewhere(known: dict[str, LabFolder]) -> None:
    """The other way round: a lab that no lesson needs would be one too many."""
    named = {found["lab"] for _, shown in ROWS.values() for found in REFERENCE.finditer(shown)}
    assert named == set(known)


@pytest.mark.parametrize(
    "shown",
    [
        "",
        "05",
        "lab 05 `skip`",
        "99 `healthy`",
        "05 `nonsense`",
        "05 mutant `nonsense`",
        '05 question "Why?"',
        "05 `skip`; ",
    ],
)
def test_a_row_that_names_nothing_real_is_a_fault(shown: str, known: dict[str, LabFolder]) -> None:
    assert faults(shown, known)
