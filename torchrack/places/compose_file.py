"""The compose file of a rack, printed by templates/compose.yaml.j2: pure, no engine needed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path, PurePosixPath

from torchrack.model.rack import NETS, Rack
from torchrack.places.local import NSSWITCH, OTHER_MAKE, hosts_file, shape_argv
from torchrack.plan.render import environment

TEMPLATE = "compose.yaml.j2"
USER, UID = "rack", 1000  # the image's unprivileged user, docker/Dockerfile
HOME = PurePosixPath("/home/rack/torchrack")
READY = "ready"  # what a node prints once it has its names and its shaping


def project(rack: str) -> str:
    """The Compose project of a rack; its containers and networks are named after it."""
    return f"torchrack-{rack}"


def compose_yaml(rack: Rack, image: str, state: Path, *, gpu: bool = False) -> str:
    """The compose file of `rack`, whose owner is the state folder `state`.

    A node furnishes itself before it sleeps: an exec a node from outside costs 0.1 s of the engine's time each, and
    would be lost at a `docker restart`. It does so as uid 0, so that no job can kill what keeps its node alive.

    With `gpu`, the file for rented hosts: all GPUs, the host's network, unlimited memlock, RDMA devices. It is the same
    on every host, and each starts its own service of it. Raises ValueError while a local rack's subnets are not chosen.
    """
    template = environment().get_template(TEMPLATE)
    furnish = {} if gpu else _furnish(rack)
    return template.render(
        rack=rack, image=image, state=state, gpu=gpu, nets=NETS, project=project(rack.name), quoted=_quoted, **furnish
    )


def _furnish(rack: Rack) -> dict[str, object]:
    shape = shlex.join(shape_argv("NIC", rack.mgmt_mbit)).replace("NIC", '"$$nic"')
    names = {"hosts": hosts_file(rack), "nsswitch": NSSWITCH}
    return {**names, "other_make": OTHER_MAKE, "shape": shape, "home": HOME, "uid": UID, "ready": READY}


def _quoted(value: object) -> str:
    """A string that YAML and Compose both take literally: JSON is YAML, and a lone `$` would be interpolated."""
    return json.dumps(str(value)).replace("$", "$$")
