"""The check of the labs' checks: `make mutants`, a step of CI, runs it whole; here, that it can fail."""

from __future__ import annotations

import pytest

from torchrack.model.errors import InvalidFile
from torchrack.teach.catalogue import Mutant, find, labs
from torchrack.teach.mutate import mutated, tried

pytest.importorskip("torch")


def test_every_lab_has_mutants_and_each_changes_one_place() -> None:
    for lab in labs():
        assert len(lab.lab.mutants) >= 2, f"lab {lab.number} has {len(lab.lab.mutants)} mutants"
        for name, mutant in lab.lab.mutants.items():
            assert mutated(lab, name, mutant) != (lab.path / mutant.file).read_text()


def test_a_mutant_whose_line_is_gone_is_told_with_its_place() -> None:
    with pytest.raises(InvalidFile, match=r"lab\.yaml:mutants\.gone\.old: .* 0 times"):
        mutated(find("01"), "gone", Mutant(old="no such line", new=""))


def test_a_mutant_that_changes_nothing_is_not_caught() -> None:
    """The control: the check of the check can fail."""
    lab = find("02")
    harmless = Mutant(old="def main() -> None:", new="def main() -> None:  # harmless")
    lab.lab = lab.lab.model_copy(update={"mutants": {"harmless": harmless}})
    healthy, row = tried([lab])
    assert healthy.caught and not row.caught
