"""Bring home what the ranks wrote, to $OUT or to their working directory; once it is here it leaves the nodes."""

from __future__ import annotations

import json
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

from torchrack.model.errors import NotEnough, NotPermitted, TorchrackError
from torchrack.places.base import Place, Process
from torchrack.plan.plan import Plan
from torchrack.run.folder import disk_errors
from torchrack.run.target import Target

SCRIPT = (Path(__file__).parents[1] / "node" / "collect.py").read_text()
COLLECT_WITHIN = 300.0
# Debian 12's Python 3.11.2 has no extraction filters yet; newer ones ask for one.
FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def collect_outputs(place: Place, plan: Plan, run: str, target: Target, out: Path) -> str:
    """Fetch rank<r>/ ($OUT) and <node>/ (new files in the working directory) into `out`; returns what to say of it."""
    nodes = [node.node for node in plan.present]
    with disk_errors(str(out)):
        out.mkdir(parents=True, exist_ok=True)  # once: tarfile makes it too, and two nodes at once collide
    with ThreadPoolExecutor(8) as pool:
        fetched = list(pool.map(lambda node: _fetched(place, node, run, target, out), nodes))
    names = [name for found in fetched if isinstance(found, list) for name in found]
    gone = [node for node, found in zip(nodes, fetched, strict=True) if not isinstance(found, list)]
    written = sum(name.startswith("rank") for name in names)
    told = [f"{written} file{'s' * (written != 1)} from $OUT"] if written else []
    dumps = sum(name.startswith("flight/") for name in names)
    beside = len(names) - written - dumps
    told += [f"{beside} file{'s' * (beside != 1)} from the working directories"] if beside else []
    told += [f"{dumps} flight recorders"] if dumps else []
    told += [f"not all of {', '.join(gone)} came, and it is still there"] if gone else []
    return ", ".join(told) or "nothing was written"


def _fetched(place: Place, node: str, run: str, target: Target, out: Path) -> list[str] | None:
    """None: the node does not answer, or not to the end, and the record is kept without it."""
    try:
        return _fetch(place, node, run, target, out)
    except (NotEnough, NotPermitted):  # this machine's disk, which is no fault of the node
        raise
    except (TorchrackError, tarfile.TarError, EOFError):
        return None


def _fetch(place: Place, node: str, run: str, target: Target, out: Path) -> list[str]:
    """Stream one node's files as a tar: checkpoints may be larger than memory. Bounded in time."""
    folder = f"{place.home(node)}/runs/{run}"
    cwd = f"{place.home(node)}/{target.cwd}" if target.cwd else f"{folder}/work"
    with place.spawn(node, [place.python(node), "-I", "-S", "-c", SCRIPT, folder, node, cwd]) as process:
        bound = Timer(COLLECT_WITHIN, process.kill)
        bound.start()
        try:
            return _extract(process, sorted(target.files) if target.cwd else [], out)
        finally:
            bound.cancel()


def _extract(process: Process, before: list[str], out: Path) -> list[str]:
    assert process.stdout and process.stdin
    with suppress(OSError):
        process.stdin.write(json.dumps(before).encode() + b"\n")
        process.stdin.flush()
    names = []
    if process.stdout.readline() == b"tar\n":
        with tarfile.open(fileobj=process.stdout, mode="r|") as tar, disk_errors(str(out)):
            for member in tar:
                if harmless(member):
                    (out / member.name).parent.mkdir(parents=True, exist_ok=True)  # another node may be at it too
                    tar.extract(member, out, **FILTER)
                if member.isfile():
                    names.append(member.name)
    if process.stdout.readline() != b"end\n":
        raise EOFError
    with suppress(OSError):
        process.stdin.write(b"kept\n")
        process.stdin.close()
    return names


def harmless(member: tarfile.TarInfo) -> bool:
    """A file or folder that stays inside the record; links and devices have no business there."""
    path = Path(member.name)
    return (member.isfile() or member.isdir()) and not path.is_absolute() and ".." not in path.parts
