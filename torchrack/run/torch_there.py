"""How torch gets to rented machines: it is there, or the kit brings it, in a virtual environment or in its image."""

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
from torchrack.places.image import Image
from torchrack.places.ssh import Ssh
from torchrack.places.torch_wheel import CPU_INDEX, TORCH
from torchrack.run.phases import HostPhase, Progress
from torchrack.run.torch_image import bring, images

SCRIPT = (Path(__file__).parents[1] / "node" / "venv.py").read_text()
WITHIN = 1800.0  # seconds; a CUDA build is gigabytes
TorchFrom = Literal["python", "venv", "image", "auto"]


@dataclass(frozen=True)
class Need:
    """A host that gets torch `version`, and why: in `image`, else in a virtual environment. `cpu`: it shows no GPU."""

    version: str
    cpu: bool
    why: str
    image: Image | None = None

    def __str__(self) -> str:
        venv = f"a virtual environment with torch {self.version}{' (CPU)' if self.cpu else ''}"
        return f"{f'the image {self.image.tag}' if self.image else venv}: {self.why}"


def needed(place: Ssh, reports: Mapping[str, Report], source: TorchFrom) -> dict[str, Need]:
    """Which nodes get one: asks their Docker where that matters. Raises Lacking; changes nothing."""
    hosts = dict(zip(place.node_names, place.hosts, strict=True))
    free = _free(hosts, reports, source) if source in ("image", "auto") else {}
    return needs(hosts, reports, source, images(place, free) if free else {})


def needs(
    hosts: Mapping[str, Host],
    reports: Mapping[str, Report],
    source: TorchFrom,
    can: Mapping[str, Image | TorchrackError],
) -> dict[str, Need]:
    """Which nodes get one. Pure; `can` has the image that each host can run, or what is against it.

    `python` takes what is there. `venv` and `image` want the kit's own on every host; raises Lacking where an image
    cannot be had. `auto` brings one only where there is no torch, of the version that all others have, or torchrack's
    own: the image if all these hosts can run it, so that they are alike. A host whose inventory names a Python is left
    alone: that choice is its owner's.
    """
    have = {report.torch.split("+")[0] for report in reports.values() if report.torch}
    wanted = next(iter(have)) if source == "auto" and len(have) == 1 else TORCH
    free = _free(hosts, reports, source)
    against = {node: error for node in free if isinstance(error := can.get(node), TorchrackError)}
    if source == "image" and against:
        raise _failed("nothing was deployed: TORCH=image is not to be had", against)
    by_image, beside = _by_image(source, wanted, against)
    found = {}
    for node, report in free.items():
        image = can[node] if by_image else None
        assert not isinstance(image, TorchrackError)
        if not _in_force(report, wanted, image):
            why = f"it has {report.torch}, and the kit's own is asked for" if report.torch else f"it has none{beside}"
            found[node] = Need(wanted, not report.health.gpus, why, image)
    return found


def _free(hosts: Mapping[str, Host], reports: Mapping[str, Report], source: TorchFrom) -> dict[str, Report]:
    """The hosts where it may be changed."""
    if source == "python":
        return {}
    free = {node: report for node, report in reports.items() if not hosts[node].python}
    return {node: report for node, report in free.items() if source != "auto" or not report.torch}


def _by_image(source: TorchFrom, wanted: str, against: Mapping[str, TorchrackError]) -> tuple[bool, str]:
    """Whether it shall be the image, and the words that say why."""
    if source != "auto":
        return source == "image", ""
    if wanted != TORCH:
        return False, f"; no image, as that has torch {TORCH}"
    for node, error in against.items():
        return False, f"; no image, as on {node}: {error.message}"
    return True, ", and its Docker can run the image"


def _in_force(report: Report, version: str, image: Image | None) -> bool:
    """Whether what the host starts is already the kit's own of this kind."""
    python, folder = report.health.python, report.health.folder
    if image:
        return python == f"{folder}/image-{image.digest}/bin/python"
    return python.startswith(f"{folder}/python/") and report.torch.split("+")[0] == version


def _failed(what: str, errors: Mapping[str, TorchrackError], hint: str = "") -> Lacking:
    hints = dict.fromkeys(error.hint for error in errors.values() if error.hint)
    return Lacking("\n".join([what, *(f"{node}: {error.message}" for node, error in errors.items())]),
                   "; ".join(hints) or hint or None)  # fmt: skip


def make_them(place: Ssh, wanted: Mapping[str, Need], progress: Progress) -> None:
    """Make all of them at once, at most WITHIN seconds. Raises Lacking with each host that failed."""
    with progress.phase(HostPhase.TORCH) as said:

        def act(node: str) -> str:
            need = wanted.get(node)
            if need and need.image:
                return bring(place, node, need.image, not need.cpu, progress)
            return _make(place, node, need, progress) if need else ""

        failed = {node: got for node, got in place.each(act).items() if isinstance(got, TorchrackError)}
        if failed:
            raise _failed("torch did not get there", failed, "see what pip says there")
        said.append(", ".join(f"{node} {need}" for node, need in list(wanted.items())[:4]))


def _make(place: Ssh, node: str, need: Need, progress: Progress) -> str:
    index = ["--index-url", CPU_INDEX] if need.cpu else []
    with place.system_python(node, SCRIPT, place.host(node).folder, need.version, *index) as process:
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
