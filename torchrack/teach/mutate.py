"""Mutation check: change one line of a lab, and its own check must notice. A check that cannot fail is none.

python -m torchrack.teach.mutate [LAB ...]      needs torch; exit 0: all mutants were caught
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchrack.model.errors import InvalidFile
from torchrack.model.rack import Model
from torchrack.teach.catalogue import LabFolder, Mutant, find, labs

FORKED = Path(__file__).resolve().parent.parent / "node" / "forked.py"
LIMIT = 60.0  # seconds for one mutant; a mutant that hangs is not caught by the lab's check


class MutantRow(Model):
    """One mutant and what became of it. `caught`: a rank failed and said what the lab promises it says."""

    lab: str
    mutant: str
    caught: bool
    said: str
    seconds: float


def mutated(lab: LabFolder, name: str, mutant: Mutant) -> str:
    """The mutant's source; raises InvalidFile unless the line to change occurs exactly once."""
    source = (lab.path / mutant.file).read_text()
    if (n := source.count(mutant.old)) != 1:
        problem = f"{mutant.old!r} must be in {mutant.file} once, it is there {n} times"
        raise InvalidFile(str(lab.path / "lab.yaml"), [(f"mutants.{name}.old", problem)])
    return source.replace(mutant.old, mutant.new)


def tried(wanted: Iterable[LabFolder]) -> Iterator[MutantRow]:
    """Each healthy lab, which must pass, then each of its mutants, as forked ranks on loopback, one after another."""
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, str(FORKED), "--loopback"],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What torchrun gives to several ranks on a machine; it is read as torch is imported, once for all.
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ) as runner,
    ):
        assert runner.stdin and runner.stdout
        for lab in wanted:
            for name, mutant in {"healthy": None, **lab.lab.mutants}.items() if lab.lab.mutants else ():
                copy = Path(folder) / f"{lab.number}-{name}"
                shutil.copytree(lab.path, copy)
                if mutant:
                    (copy / mutant.file).write_text(mutated(lab, name, mutant))
                job = {"script": str(copy / "lab.py"), "args": lab.lab.args, "world": lab.lab.nodes * lab.lab.nproc}
                print(json.dumps(job | {"limit": LIMIT}), file=runner.stdin, flush=True)
                yield _row(lab, name, mutant, json.loads(runner.stdout.readline()))


def _row(lab: LabFolder, name: str, mutant: Mutant | None, done: dict[str, list[int | None]]) -> MutantRow:
    output = "\n".join(map(str, done["output"]))
    said = re.search(mutant.says, output, re.MULTILINE) if mutant else None
    failed = any(code not in (0, None) for code in done["codes"])
    caught = bool(failed and said) if mutant else not any(done["codes"])
    if mutant or not caught:
        line = next((line for line in output.splitlines() if said and said[0] in line), output.strip()[-400:])
    else:
        line = f"all {len(done['codes'])} ranks passed"
    return MutantRow(lab=lab.number, mutant=name, caught=caught, said=line, seconds=float(str(done["seconds"])))


def main(args: list[str]) -> int:
    rows = []
    for row in tried([find(name) for name in args] or labs()):
        rows.append(row)
        mark = "✓" if row.caught else "✗"
        print(f"{mark} lab {row.lab} {row.mutant} ({row.seconds:.1f} s): {row.said}", file=sys.stderr, flush=True)
    mutants = [row for row in rows if row.mutant != "healthy"]
    print(f"{sum(row.caught for row in mutants)} of {len(mutants)} mutants caught", file=sys.stderr)
    return 0 if rows and all(row.caught for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
