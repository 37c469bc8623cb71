"""Which NIC gloo, NCCL and torchrun each take on every node: the real libraries are asked, unpinned and as planned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from torchrack.model.job import Job
from torchrack.model.rack import Model
from torchrack.places.base import Place
from torchrack.plan.plan import NodePlan, Plan, plan
from torchrack.run.lifecycle import attach

SCRIPT = Path(__file__).parents[1] / "node" / "nics.py"
ASK_WITHIN = 90.0  # seconds; importing torch on many nodes of two cores takes its time
LIBRARIES = ("gloo", "nccl", "torchrun")


class NicChoice(Model):
    """One library's choice on one node. `nic` and `net` are null where it found none, or took no NIC of the rack."""

    node: str
    library: str
    setting: Literal["unpinned", "planned"]
    nic: str | None
    net: str | None
    address: str | None
    why: str


def choices(rack: str, job: Job) -> list[NicChoice]:
    """Ask every library on every node of a rack that is up; raises NotFound when it is down."""
    live = attach(rack)
    made = plan(live.rack, live.facts, job)
    questions = [(node, library, planned) for node in made.nodes for library in LIBRARIES for planned in (False, True)]
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda q: _ask(live.place, made, *q), questions))


def _ask(place: Place, made: Plan, node: NodePlan, library: str, planned: bool) -> NicChoice:
    settings = list(_environment(node)) if planned else []
    argv = ["env", *settings, place.python(node.node), "-I", "-", library]
    output = place.run(node.node, argv, stdin=SCRIPT.read_bytes(), timeout=ASK_WITHIN)
    try:
        answer = json.loads(output.stdout)
    except ValueError:
        answer = {"address": None, "why": output.stderr.decode(errors="replace").strip()[-200:] or "no answer"}
    nic, net = _nic(node, answer["address"])
    setting: Literal["unpinned", "planned"] = "planned" if planned else "unpinned"
    return NicChoice(node=node.node, library=library, setting=setting, nic=nic, net=net, **answer)


def _environment(node: NodePlan) -> Iterator[str]:
    for setting in node.settings:
        if setting.kind == "flag":
            if setting.name == "local-addr":
                yield f"PET_LOCAL_ADDR={setting.value}"  # every torchrun flag may come as PET_<NAME> too
        else:
            yield f"{setting.name}={setting.value}"


def _nic(node: NodePlan, address: str | None) -> tuple[str | None, str | None]:
    for net, nic in node.nics.items():
        if nic.address == address:
            return nic.name, net
    return ("lo", "lo") if (address or "").startswith("127.") else (None, None)
