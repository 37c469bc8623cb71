"""Push a payload to all hosts, or to none: staged and verified everywhere first, then switched everywhere.

One exec a host, which stays at work through both steps (node/receive.py has the words they exchange).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeVar

from torchrack.model.errors import Lacking, TorchrackError, Unreachable
from torchrack.places.ssh import Ssh, packed, tell
from torchrack.places.ssh_process import RemoteProcess
from torchrack.plan.render import digest, sha256

STALL_S = 60.0  # seconds without a word from a host
Files = Mapping[str, bytes]
T = TypeVar("T")


@dataclass(frozen=True)
class Payload:
    """What one node gets: files that all nodes share, and its own."""

    constant: Files
    own: Files

    @property
    def files(self) -> dict[str, bytes]:
        return {**self.constant, **self.own}

    @property
    def digest(self) -> str:
        return digest(self.files)


@dataclass
class Pushed:
    """How it went on one node. `sent` counts files, `was` is the digest before ("": none)."""

    digest: str
    was: str = ""
    sent: int = 0
    same: bool = False


@dataclass
class Packer:
    """Tars, each made once: what all hosts lack is the same on most of them."""

    made: dict[frozenset[str], bytes] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def constant(self, files: Files) -> bytes:
        with self.lock:
            key = frozenset(files)
            if key not in self.made:
                self.made[key] = packed(files)
            return self.made[key]


class NotAll(Lacking):
    """At least one host did not take the payload, so none has: `failed` maps nodes to what went wrong."""

    def __init__(self, failed: Mapping[str, TorchrackError], hint: str) -> None:
        self.failed = dict(failed)
        super().__init__("\n".join(f"{node}: {error.message}" for node, error in failed.items()), hint)


def push(place: Ssh, payloads: Mapping[str, Payload], who: str) -> dict[str, Pushed]:
    """All or nothing; raises NotAll, after which every host has what it had before."""
    packer = Packer()
    links: dict[str, RemoteProcess] = {}
    try:
        staged = place.each(lambda node: _stage(place, node, payloads[node], who, packer, links))
        ready = _all_of(staged, "nothing was changed on any host; correct this, then the same command again")
        switched = place.each(lambda node: _switch(links, node, ready[node]))
        if any(isinstance(answer, TorchrackError) for answer in switched.values()):
            place.each(lambda node: _roll_back(links, node))
        return _all_of(switched, "the other hosts went back to what they had; the same command again")
    finally:
        for link in links.values():
            link.kill()


def compare(place: Ssh, payloads: Mapping[str, Payload]) -> dict[str, list[str]]:
    """What a push would send to each node; nothing is changed."""

    def ask(node: str) -> list[str]:
        with place.receiver(node, "compare") as link:
            tell(link, {"files": sha256(payloads[node].files)})
            return list(hear(link)["want"])

    return _all_of(place.each(ask), "see make preflight HOSTS=…")


def _stage(
    place: Ssh, node: str, payload: Payload, who: str, packer: Packer, links: dict[str, RemoteProcess]
) -> Pushed:
    files = payload.files
    link = links[node] = place.receiver(node, "deploy")
    link.bound(STALL_S)
    tell(link, {"digest": payload.digest, "files": sha256(files), "who": who, "tars": 2})
    said = hear(link)
    if "same" in said:
        return Pushed(payload.digest, payload.digest, same=True)
    want = set(said["want"])
    if want:
        shared = {path: content for path, content in payload.constant.items() if path in want}
        own = {path: content for path, content in payload.own.items() if path in want}
        for tar in (packer.constant(shared), packed(own)):
            tell(link, {"bytes": len(tar)}, tar)
    hear(link)
    return Pushed(payload.digest, said["was"] or "", len(want))


def _switch(links: Mapping[str, RemoteProcess], node: str, staged: Pushed) -> Pushed:
    if not staged.same:
        tell(links[node], "commit")
        hear(links[node])
    return staged


def _roll_back(links: Mapping[str, RemoteProcess], node: str) -> None:
    tell(links[node], "rollback")
    hear(links[node])


def hear(link: RemoteProcess) -> dict[str, Any]:
    """The next line from a receiver. Raises Lacking with its reason, or Unreachable where it fell silent."""
    try:
        raw = link.stdout.readline()
    except TimeoutError:
        silent = f"fell silent for {link.patience:.0f} s"
        raise Unreachable("reachable", silent, "is the machine all right?") from None
    if not raw:
        last = link.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        raise Unreachable("reachable", f"the connection broke{': ' + last[0] if last else ''}", "is the machine up?")
    said: dict[str, Any] = json.loads(raw)
    if problem := said.get("refused") or said.get("failed"):
        raise Lacking(problem, said.get("fix"))
    return said


def _all_of(answers: Mapping[str, T | TorchrackError], hint: str) -> dict[str, T]:
    failed = {node: answer for node, answer in answers.items() if isinstance(answer, TorchrackError)}
    if failed:
        raise NotAll(failed, hint)
    return {node: answer for node, answer in answers.items() if not isinstance(answer, TorchrackError)}
