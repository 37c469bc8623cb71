"""How torch gets to rented machines: it is there, or the kit makes a virtual environment for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Literal

from torchrack.model.errors import Lacking, TorchrackError
from torchrack.model.health import Report
from torchrack.model.hosts import Host
from torchrack.places.ssh import Ssh
from torchrack.places.torch_wheel import CPU_INDEX, TORCH
from torchrack.run.phases import HostPhase, Progress

SCRIPT = (Path(__file__).parents[1] / "node" / "venv.py").read_text()
WITHIN = 1800.0  # seconds; a CUDA build is gigabytes
TorchFrom = Literal["python", "venv", "auto"]


@dataclass(frozen=True)
class Need:
    """A host that gets a virtual environment with torch `version`, and why; `cpu`: no GPU was seen there."""

    version: str
    cpu: bool
    why: str

    def __str__(self) -> str:
        return f"torch {self.version}{' (CPU)' if self.cpu else ''}: {self.why}"


def needs(hosts: Mapping[str, Host], reports: Mapping[str, Report], source: TorchFrom) -> dict[str, Need]:
    """Which nodes get one. Pure.

    `python` takes what is there. `venv` wants the kit's own on every host. `auto` makes one only where there is no
    torch, of the version that all others have, or torchrack's own. A host whose inventory names a Python is left alone:
    that choice is its owner's.
    """
    have = {report.torch.split("+")[0] for report in reports.values() if report.torch}
    wanted = next(iter(have)) if source == "auto" and len(have) == 1 else TORCH
    found = {}
    for node, report in reports.items():
        is_ours = report.health.python.startswith(f"{report.health.folder}/venv")
        right = report.torch.split("+")[0] == wanted
        if source == "python" or hosts[node].python or (source == "auto" and report.torch) or (is_ours and right):
            continue
        why = "it has none" if not report.torch else f"it has {report.torch}, and the kit's own is asked for"
        found[node] = Need(wanted, not report.health.gpus, why)
    return found


def make_them(place: Ssh, wanted: Mapping[str, Need], progress: Progress) -> None:
    """Make all of them at once, at most WITHIN seconds. Raises Lacking with each host that failed."""
    with progress.phase(HostPhase.TORCH) as said:

        def act(node: str) -> str:
            return _make(place, node, wanted[node], progress) if node in wanted else ""

        failed = {node: got.message for node, got in place.each(act).items() if isinstance(got, TorchrackError)}
        if failed:
            raise Lacking("\n".join(f"{node}: {why}" for node, why in failed.items()), "see what pip says there")
        said.append(", ".join(f"{node} {need}" for node, need in list(wanted.items())[:4]))


def _make(place: Ssh, node: str, need: Need, progress: Progress) -> str:
    index = ["--index-url", CPU_INDEX] if need.cpu else []
    with place.spawn_python(node, SCRIPT, place.host(node).folder, need.version, *index) as process:
        assert process.stdout and process.stderr
        bound = Timer(WITHIN, process.kill)
        bound.start()
        try:
            for raw in process.stdout:
                told = json.loads(raw)
                if "python" in told:
                    return str(told["python"])
                if "failed" in told:
                    raise Lacking(str(told["failed"]))
                progress.console.update(f"{node}: {told['step']}")
        finally:
            bound.cancel()
        last = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        raise Lacking(last[0] if last else "the connection broke, or it took too long")
