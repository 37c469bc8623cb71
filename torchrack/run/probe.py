"""Preflight's second round: every node reaches the others on the data NIC, as a job would, both ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from typing import Any

from torchrack.model.checks import Check
from torchrack.model.errors import TorchrackError
from torchrack.model.rack import Nic
from torchrack.places.base import Place, Process
from torchrack.places.talk import lines, tell
from torchrack.run.preflight_rules import MEETS

SOURCE = (Path(__file__).parents[1] / "node" / "probe.py").read_text()
DEADLINE = 20.0
ALL_UP_TO = 8  # hosts; above, each looks at FEW others, which together reach everywhere
FEW = 4
WHY = "ranks talk to each other over this network, at the rendezvous port and at ports of the kernel's choice"


def peers_of(nodes: Sequence[str], deep: bool) -> dict[str, list[str]]:
    """Whom each node looks at: everyone, or above ALL_UP_TO nodes the next ones in a ring with long chords."""
    n = len(nodes)
    steps = range(1, n) if deep or n <= ALL_UP_TO else sorted({1, 2, n // 3, n // 2})[:FEW]
    return {node: [nodes[(i + step) % n] for step in steps] for i, node in enumerate(nodes)}


def probe(place: Place, nics: Mapping[str, Nic], port: int, deep: bool) -> list[Check]:
    """Rows of the second round, within DEADLINE seconds; a node that cannot take part is a row that could not run."""
    nodes = list(nics)
    with ThreadPoolExecutor(len(nodes) or 1) as pool:
        started = dict(zip(nodes, pool.map(lambda node: _start(place, node), nodes), strict=True))
        talking = {node: process for node, process in started.items() if not isinstance(process, str)}
        bound = Timer(DEADLINE, _kill, args=(list(talking.values()),))
        bound.start()
        try:
            listening = _ask(pool, talking, {node: [nics[node].name, nics[node].address, str(port)] for node in nodes})
            able = [node for node in nodes if "ports" in listening.get(node, {})]
            look = peers_of(able, deep)
            asked = {node: list(_peers(look[node], nics, listening)) for node in able}
            seen = _ask(pool, {node: talking[node] for node in able}, asked)
            over = _ask(pool, {node: talking[node] for node in able}, {node: ["over"] for node in able})
            for node in able:
                if "over" in over[node]:
                    place.worked(node, talking.pop(node))
        finally:
            bound.cancel()
            list(pool.map(_end, talking.values()))
    silent = {node: str(process) for node, process in started.items() if isinstance(process, str)}
    silent |= {node: str(said.get("error", "no answer")) for node, said in listening.items() if node not in able}
    silent |= {node: str(seen[node].get("error", "no answer")) for node in able if "seen" not in seen[node]}
    mtus = {node: listening[node]["mtu"] for node in able}
    busy = {node: listening[node]["busy"] for node in able if node == nodes[0] and listening[node]["busy"]}
    return [
        *_unable(silent),
        *_busy(busy, port),
        *rows({node: said["seen"] for node, said in seen.items() if "seen" in said}, nics, mtus),
    ]


def _unable(silent: Mapping[str, str]) -> Iterator[Check]:
    for node, why in silent.items():
        fix = "see the other rows"
        yield Check(node=node, check="data network", state="could not run", value=why, why=WHY, fix=fix)


def _busy(found: Mapping[str, str], port: int) -> Iterator[Check]:
    for node, why in found.items():
        fix = f"ss -ltnp there shows by whom; or PORT={port + 1}"
        value = f"{port} is taken: {why}"
        yield Check(node=node, check="rendezvous port", state="fail", value=value, why=MEETS, fix=fix)


def rows(seen: Mapping[str, Mapping[str, Any]], nics: Mapping[str, Nic], mtus: Mapping[str, int]) -> Iterator[Check]:
    """Pure: what the nodes saw of their peers, as rows."""
    for node, peers in seen.items():
        nic = nics[node]
        closed = {f"{p}:{port} {why}" for p, one in peers.items() for port, why in one["ports"].items() if why}
        wrong = {p: one for p, one in peers.items() if one["dev"] and one["dev"] != nic.name}
        small = {p: one["mtu"] for p, one in peers.items() if one["mtu"] not in ("", "not tried")}
        if not peers:
            yield Check(node=node, check="data network", state="ok", value="no other node to look at", why=WHY)
        elif closed:
            value = f"does not reach {', '.join(sorted(closed)[:4])}" + (" …" if len(closed) > 4 else "")
            fix = "open the job's ports between the hosts' data addresses: make provision HOSTS=…"
            yield Check(node=node, check="data network", state="fail", value=value, why=WHY, fix=fix)
        else:
            yield Check(node=node, check="data network", state="ok", value="reaches its peers, both ports", why=WHY)
        if wrong:
            peer, one = next(iter(wrong.items()))
            yield Check(
                node=node,
                check="route",
                state="fail",
                value=f"to {peer} ({nics[peer].address}) leaves by {one['dev']} {one['src']}, not by {nic.name}",
                why="the kernel decides by route which wire carries the bytes, whatever is pinned",
                fix=f"torchrack_nic names the NIC that reaches the others, or: ip route add … dev {nic.name}",
            )
        if small:
            peer, reason = next(iter(small.items()))
            yield Check(
                node=node,
                check="MTU",
                state="fail",
                value=f"{mtus[node]} on {nic.name}, but to {peer}: {reason}",
                why="small messages pass, and the first large one hangs",
                fix=f"ip link set {nic.name} mtu 1500 on all hosts, or the same larger one on every hop",
            )


def _peers(look: Sequence[str], nics: Mapping[str, Nic], listening: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for peer in look:
        yield from (peer, nics[peer].address, ",".join(map(str, listening[peer]["ports"])))


def _start(place: Place, node: str) -> Process | str:
    try:
        return place.work(node, SOURCE)
    except TorchrackError as error:
        return error.message


def _ask(
    pool: ThreadPoolExecutor, processes: Mapping[str, Process], given: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any]]:
    """Some words to each, one line from each."""
    return dict(zip(processes, pool.map(lambda node: _one(processes[node], given[node]), processes), strict=True))


def _one(process: Process, given: Sequence[str]) -> dict[str, Any]:
    tell(process, [" ".join(given).encode() + b"\n"])
    try:
        if said := next(lines(process), None):
            return said
    except (OSError, ValueError):
        pass
    assert process.stderr
    last = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
    return {"error": last[0] if last else f"no answer within {DEADLINE:.0f} s"}


def _kill(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()


def _end(process: Process) -> None:
    process.kill()
    with process:  # closes its streams
        pass
