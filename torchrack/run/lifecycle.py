"""A rack's life: choose a place, bring it up, recreate it when it must differ, take it down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchrack.model.errors import Lacking, NameTaken, NotEnough, NotFound
from torchrack.model.rack import Model, Nic, NodeFacts, Rack, RuntimeName, size_text
from torchrack.places.base import Place
from torchrack.run.folder import RackFolder, RackRecord
from torchrack.run.phases import Phase, Progress

GB = 1_000_000_000
RANK_BYTES = int(0.17 * GB)  # private memory of a rank and of an agent that have imported torch, measured
AGENT_BYTES = int(0.15 * GB)


def _compose(name: str, state: Path) -> Place:
    from torchrack.places.compose import Compose  # the docker SDK costs 0.7 s to import

    return Compose(name, state)


def _netns(name: str, state: Path) -> Place:
    from torchrack.places.netns import Netns

    return Netns(name, state)


def _ssh(name: str, state: Path) -> Place:
    from torchrack.places.ssh import Ssh

    return Ssh(name, state)


LOCAL_PLACES: dict[str, Callable[[str, Path], Place]] = {"compose": _compose, "netns": _netns}
PLACES = LOCAL_PLACES | {"ssh": _ssh}


@dataclass(frozen=True)
class LiveRack:
    """A rack that is up: what it is, what its nodes told when it came up, where it lives, where its records go."""

    rack: Rack
    facts: tuple[NodeFacts, ...]
    place: Place
    folder: RackFolder


def choose(name: str, runtime: RuntimeName, folder: RackFolder) -> tuple[Place, str]:
    """The place to use and why, in one line. `auto`: compose if the engine answers, else netns.

    Raises the asked-for place's own Lacking error, or with `auto` one that tells of both.
    """
    if runtime != "auto":
        place = LOCAL_PLACES[runtime](name, folder.place)
        place.check()
        return place, "asked for"
    try:
        place = _compose(name, folder.place)
        place.check()
    except Lacking as no_compose:
        return _fallback(name, folder, no_compose)
    return place, "the Docker engine answers"


def _fallback(name: str, folder: RackFolder, no_compose: Lacking) -> tuple[Place, str]:
    place = _netns(name, folder.place)
    try:
        place.check()
    except Lacking as no_netns:
        raise Lacking(f"compose: {no_compose}\nnetns: {no_netns}", "either of the two above") from no_netns
    return place, f"{no_compose.message.splitlines()[0]}: {no_compose.hint}" if no_compose.hint else no_compose.message


def bring_up(rack: Rack, nproc: int, progress: Progress, folder: RackFolder, lock_fd: int) -> LiveRack:
    """The rack as asked for: the one that is there if it fits, else a new one, saying so. The caller holds the lock."""
    recorded = folder.read_rack()
    if recorded and recorded.runtime == "ssh":
        hint = f"RACK=another-name, or make down RACK={rack.name} to remove what was deployed there"
        raise NameTaken(f"rack {rack.name} is on rented machines", hint)
    check_memory(rack.nodes, nproc)
    return _standing(rack, progress, folder) or _anew(rack, progress, folder, lock_fd)


def _standing(rack: Rack, progress: Progress, folder: RackFolder) -> LiveRack | None:
    """The rack that is up, if it is what is asked for: then nothing need be checked or prepared again."""
    recorded = folder.read_rack()
    if recorded is None or recorded.rack is None:
        return None
    kind = recorded.runtime if rack.runtime == "auto" else rack.runtime
    if not _same(recorded, rack, kind):
        return None
    with progress.phase(Phase.CHECK) as said:
        place = LOCAL_PLACES[kind](rack.name, folder.place)
        said.ok = _all_up(place, rack.nodes)
        said.append(f"{kind} (rack {rack.name} is there{'' if said.ok else ', but not all of its nodes'})")
    if not said.ok:
        return None
    with progress.phase(Phase.RACK) as said:
        said.append(_size(recorded.rack) + " (was up)")
    return LiveRack(recorded.rack, recorded.facts, place, folder)


def _anew(rack: Rack, progress: Progress, folder: RackFolder, lock_fd: int) -> LiveRack:
    with progress.phase(Phase.CHECK) as said:
        place, why = choose(rack.name, rack.runtime, folder)
        said.append(f"{place.kind} ({why})")
    with progress.phase(Phase.PREPARE) as said:
        place.prepare(progress.console.update)
        said.append("ready" if place.kind == "netns" else "image ready")
    with progress.phase(Phase.RACK) as said:
        how = _clear(rack, place, folder, progress)
        live = _make(rack, place, folder, progress, lock_fd)
        said.append(_size(live.rack) + how)
    return live


def _clear(rack: Rack, place: Place, folder: RackFolder, progress: Progress) -> str:
    """Take down what stands under that name, saying why it cannot stay."""
    recorded = folder.read_rack()
    if not recorded and not place.nodes():
        return ""
    why = _difference(recorded, rack, place.kind)
    progress.console.note(f"rack {rack.name} is taken down and made anew: {why}")
    take_down(folder)
    return " (recreated)"


def _size(rack: Rack) -> str:
    return f"{rack.nodes} node{'s' * (rack.nodes > 1)} × 2 NICs, {size_text(rack.shm)} /dev/shm"


def _make(rack: Rack, place: Place, folder: RackFolder, progress: Progress, lock_fd: int) -> LiveRack:
    folder.make()
    started = RackRecord(runtime=place.kind, asked=rack)
    folder.write_rack(started)
    place.inherit_fds = (lock_fd,)
    try:
        made = place.up(rack, progress.console.update)  # removes what it made if it fails
        try:
            live = LiveRack(made, place.facts(), place, folder)
            folder.write_rack(started.model_copy(update={"rack": live.rack, "facts": live.facts}))
        except BaseException:
            place.down()
            raise
    except BaseException:
        folder.forget_rack()
        raise
    return live


def _asked(rack: Rack, kind: str) -> dict[str, object]:
    return rack.model_dump() | {"runtime": kind}


def _same(recorded: RackRecord, rack: Rack, kind: str) -> bool:
    return _asked(recorded.asked, recorded.runtime) == _asked(rack, kind)


def _difference(recorded: RackRecord | None, rack: Rack, kind: str) -> str:
    if recorded is None or recorded.rack is None:
        return "it was left half-made"
    old, new = _asked(recorded.asked, recorded.runtime), _asked(rack, kind)
    old["shm"], new["shm"] = size_text(recorded.asked.shm), size_text(rack.shm)
    changes = [f"{key} {old[key]} → {new[key]}" for key in new if old[key] != new[key]]
    return ", ".join(changes) or "some of its nodes are gone"


def _all_up(place: Place, nodes: int) -> bool:
    states = place.nodes()
    return len(states) == nodes and all(state.state == "up" for state in states)


def check_memory(nodes: int, nproc: int) -> None:
    """Refuse, with the sum, a rack whose ranks the machine's available memory would not hold."""
    need = (nodes * nproc * RANK_BYTES + nodes * AGENT_BYTES) * 12 // 10
    have = _memory_available()
    if have < need:
        raise NotEnough(
            f"{nodes} nodes × {nproc} ranks need {need / GB:.1f} GB: ({nodes * nproc} ranks × 0.17 GB"
            f" + {nodes} agents × 0.15 GB) + 20 %; {have / GB:.1f} GB are available",
            "fewer NODES or NPROC",
        )


def _memory_available() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def attach(name: str) -> LiveRack:
    """The rack of that name that is up; raises NotFound."""
    folder = RackFolder(name)
    recorded = folder.read_rack()
    if recorded is None or recorded.rack is None:
        raise NotFound(f"no rack named {name} is up", f"make up RACK={name} NODES=2; rented machines: HOSTS=…")
    return LiveRack(recorded.rack, recorded.facts, PLACES[recorded.runtime](name, folder.place), folder)


def take_down(folder: RackFolder) -> list[str]:
    """Remove what is left of this rack on every place that may hold some; returns the kinds that held any.

    The caller holds the lock. Raises Remains if something cannot be removed.
    """
    recorded = folder.read_rack()
    held = []
    if recorded and recorded.runtime == "ssh":
        _ssh(folder.name, folder.place).down()
        folder.forget_rack()
        return ["ssh"]
    for kind, make in LOCAL_PLACES.items():
        place = make(folder.name, folder.place)
        mine = recorded is not None and recorded.runtime == kind
        try:
            if not mine:
                place.check()
            if place.nodes() or mine:
                held.append(kind)
            place.down()
        except Lacking:
            # A place that cannot be used here can hold nothing of this rack, unless the record says it does.
            if mine:
                raise
    folder.forget_rack()
    return held


class NodeRow(Model):
    """One row of `status`; the keys are those that --json prints. `shm` in bytes."""

    rack: str
    node: str
    state: str
    address: str | None
    nic: str | None
    shm: int
    runtime: str
    last_run: str | None


def node_rows(folder: RackFolder) -> list[NodeRow]:
    """`status` of one rack: a row a node; empty when it is down."""
    recorded = folder.read_rack()
    if not recorded:
        return []
    rack = recorded.rack or recorded.asked
    facts = {fact.node: fact for fact in recorded.facts}
    runs = folder.runs()
    return [
        NodeRow(
            rack=rack.name,
            node=state.node,
            state=state.state,
            address=nic.address if nic else None,
            nic=nic.name if nic else None,
            shm=facts[state.node].shm if state.node in facts else rack.shm,
            runtime=recorded.runtime,
            last_run=runs[-1].name if runs else None,
        )
        for state in PLACES[recorded.runtime](folder.name, folder.place).nodes()
        for nic in [_fabric_nic(rack, facts.get(state.node))]
    ]


def _fabric_nic(rack: Rack, fact: NodeFacts | None) -> Nic | None:
    return fact.nic_for("fabric", rack) if fact and ("fabric" in fact.nets or rack.fabric_subnet) else None
