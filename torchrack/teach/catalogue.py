"""The lab catalogue: labs/<nn-name>/lab.yaml, parsed and validated, every problem of a file at once."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from torchrack.model.errors import NotFound, UsageError
from torchrack.model.files import parse_yaml
from torchrack.model.job import MAX_NPROC, Job
from torchrack.model.rack import LOCAL_NODES, LocalRack, Model
from torchrack.run.folder import checkout
from torchrack.run.target import Target


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    return value


def _job_keys(value: dict[str, object]) -> dict[str, object]:
    Job.model_validate(value)
    return value


def _rack_keys(value: dict[str, object]) -> dict[str, object]:
    if other := sorted(set(value) - {"shm", "shm_shared", "nic_names"}):
        raise ValueError(
            f"{', '.join(other)}: a lab may ask for shm, shm_shared and nic_names; nodes is a key of its own"
        )
    return {key: getattr(LocalRack.model_validate(value), key) for key in value}


Regex = Annotated[str, AfterValidator(_regex)]
JobKeys = Annotated[dict[str, object], AfterValidator(_job_keys)]
RackKeys = Annotated[dict[str, object], AfterValidator(_rack_keys)]


GRADE_BUDGET = 720.0  # seconds for the whole grade on netns


class Check(Model):
    """What the ranks' logs must show, beside every agent ending with 0. Exactly one of the two is given."""

    every_rank: Regex | None = None
    any_rank: Regex | None = None


class Worlds(Model):
    """The world sizes that a lab takes."""

    min: int = 1
    max: int = LOCAL_NODES * MAX_NPROC
    multiple_of: int = 1

    def takes(self, world: int) -> bool:
        return self.min <= world <= self.max and world % self.multiple_of == 0

    def __str__(self) -> str:
        step = f" in steps of {self.multiple_of}" if self.multiple_of > 1 else ""
        return f"{self.min} to {self.max} ranks{step}"


class Variant(Model):
    """A broken side: how it is started differently, and the kind of failure it must give. `deadline` in seconds.

    `culprit` is whom diagnose may blame, as log lines name them (node1, or node1/1 with the rank); [] is nobody.
    """

    title: str
    expect: str
    culprit: tuple[str, ...]
    args: tuple[str, ...] | None = None
    nodes: int | None = None
    nproc: int | None = None
    deadline: float | None = None
    evidence: Regex | None = None
    fix: str
    job: JobKeys = Field(default_factory=dict)
    rack: RackKeys = Field(default_factory=dict)


class Mutant(Model):
    """A one-line change of a lab's file that the lab's own check must notice: a rank fails and says `says`."""

    old: str
    new: str
    says: Regex = "golden mismatch"
    file: str = "lab.py"


class Lab(Model):
    """One lab as lab.yaml tells it. `deadline` in seconds from the start of the ranks, torch's import included.

    `budget` is what all its sides together may take of a grade's GRADE_BUDGET, in seconds on two quiet cores.
    """

    title: str
    teaches: str
    minutes: int = Field(ge=1)
    nodes: int = Field(ge=1, le=LOCAL_NODES)
    nproc: int = Field(default=1, ge=1, le=MAX_NPROC)
    worlds: Worlds = Worlds()
    args: tuple[str, ...] = ()
    deadline: float = Field(gt=0)
    budget: float = Field(gt=0)
    checks: tuple[Check, ...] = Field(min_length=1)
    variants: dict[str, Variant] = Field(default_factory=dict)
    mutants: dict[str, Mutant] = Field(default_factory=dict)
    teaches_launching: bool = False
    """Always by torchrun itself; other labs may be graded with a faster launcher."""
    job: JobKeys = Field(default_factory=dict)
    rack: RackKeys = Field(default_factory=dict)


class LabFolder:
    """A lab and the folder it lies in; `number` is its two digits, `name` the folder's name."""

    def __init__(self, path: Path) -> None:
        self.path, self.name, self.number = path, path.name, path.name[:2]

    @cached_property
    def lab(self) -> Lab:
        return parse_yaml(self.path / "lab.yaml", Lab)

    def variant(self, name: str) -> Variant:
        """Raises NotFound, naming the variants there are."""
        if name not in self.lab.variants:
            known = ", ".join(self.lab.variants) or "none"
            raise NotFound(f"lab {self.number} has no broken side {name!r}", f"one of: {known}")
        return self.lab.variants[name]

    def target(self) -> Target:
        """Everything that runs: the lab's Python files, the same on every node."""
        files = {str(p.relative_to(self.path)): p.read_bytes() for p in sorted(self.path.rglob("*.py"))}
        return Target(f"lab {self.number}", f"labs/{self.name}", "lab.py", files)

    def rack(self, variant: Variant | None = None) -> dict[str, object]:
        """What the rack must be for the healthy side or a variant, beside its size: keys of LocalRack."""
        return self.lab.rack | (variant.rack if variant else {})

    def check_world(self, nodes: int, nproc: int) -> None:
        if not self.lab.worlds.takes(nodes * nproc):
            raise UsageError(
                f"lab {self.number} takes {self.lab.worlds}, not {nodes} × {nproc} = {nodes * nproc}",
                f"NODES={self.lab.nodes} NPROC={self.lab.nproc}",
            )


def labs(root: Path | None = None) -> list[LabFolder]:
    """All labs in teaching order."""
    folder = (root or checkout()) / "labs"
    return [LabFolder(path.parent) for path in sorted(folder.glob("[0-9][0-9]-*/lab.yaml"))]


def find(wanted: str, root: Path | None = None) -> LabFolder:
    """A lab by number or name ("1", "01", "01-one-world"); raises NotFound, naming the labs there are."""
    folder = (root or checkout()) / "labs"
    names = sorted(path.parent.name for path in folder.glob("[0-9][0-9]-*/lab.yaml"))
    number = wanted.zfill(2) if wanted.isdigit() else wanted
    matches = [name for name in names if number in (name, name[:2], name[3:])]
    if not matches:
        raise NotFound(f"no lab {wanted!r}", f"one of: {', '.join(names)}  (make labs)")
    return LabFolder(folder / matches[0])
