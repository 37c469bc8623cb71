"""collect: what tells how the hosts stand, and the record of a run that was left to itself."""

from __future__ import annotations

import tarfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Timer

from torchrack.model.errors import TorchrackError
from torchrack.places.ssh import Ssh
from torchrack.run.deploy import Rented
from torchrack.run.folder import disk_errors
from torchrack.run.outputs import FILTER, harmless
from torchrack.run.phases import HostPhase, Progress

SCRIPT = (Path(__file__).parents[1] / "node" / "gather.py").read_text()
WITHIN = 180.0


def collect(hosts: Rented, progress: Progress) -> tuple[Path, dict[str, str]]:
    """Fetch from every host into a fresh folder; returns it, and why a node's is missing. Hosts may be busy or hung."""
    folder = hosts.folder.path / f"hosts-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"  # two within a second are two
    with progress.phase(HostPhase.GATHER) as said:
        with disk_errors(str(folder)):
            folder.mkdir(parents=True)
        hosts.place.know()
        answers = hosts.place.each(lambda node: _gather(hosts.place, node, folder / node))
        missing = {node: answer.message for node, answer in answers.items() if isinstance(answer, TorchrackError)}
        said.append(f"{len(answers) - len(missing)} of {len(answers)} hosts into {folder}")
        said.ok = not missing
    return folder, missing


def _gather(place: Ssh, node: str, into: Path) -> int:
    """How many files came."""
    count = 0
    with place.spawn(node, [place.python(node), "-I", "-c", SCRIPT, place.home(node)]) as process:
        bound = Timer(WITHIN, process.kill)
        bound.start()
        try:
            assert process.stdout
            with suppress(tarfile.ReadError), tarfile.open(fileobj=process.stdout, mode="r|gz") as tar:
                for member in tar:
                    if harmless(member):
                        with disk_errors(str(into)):
                            tar.extract(member, into, **FILTER)
                        count += 1
            process.stdout.read()
        finally:
            bound.cancel()
    return count
