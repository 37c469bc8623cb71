"""Push a payload to all hosts, or to none: staged and verified everywhere first, then switched everywhere.

One exec a host, which stays at work through both steps (node/receive.py has the words they exchange).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar

from torchrack.model.errors import Lacking, TorchrackError
from torchrack.places.ssh import Ssh
from torchrack.places.ssh_process import RemoteProcess
from torchrack.places.talk import block, hear, named, tell, words
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
    """Files by their hash, each compressed once: what all hosts lack is the same on most of them."""

    made: dict[str, bytes] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def packed(self, hashed: str, content: bytes) -> bytes:
        with self.lock:
            if hashed not in self.made:
                self.made[hashed] = block(zlib.compress(content, 1))
            return self.made[hashed]


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


def compare(place: Ssh, payloads: Mapping[str, Payload], idle: bool = False) -> dict[str, list[str]]:
    """What a push would send to each node; nothing is changed. With `idle`, no run of this rack may be alive there."""

    def ask(node: str) -> list[str]:
        with place.receiver(node, "compare") as link:
            tell(link, [words(*named(sha256(payloads[node].files)))])
            said = hear(link)
        if idle and said["run"]:
            raise Lacking(f"run {said['run']} is still alive here")
        return list(said["want"])

    hint = "make collect HOSTS=… shows how it stands, make stop HOSTS=… ends it" if idle else "make preflight HOSTS=…"
    return _all_of(place.each(ask), hint)


def _stage(
    place: Ssh, node: str, payload: Payload, who: str, packer: Packer, links: dict[str, RemoteProcess]
) -> Pushed:
    files = payload.files
    hashes = sha256(files)
    link = links[node] = place.receiver(node, "deploy")
    link.bound(STALL_S)
    tell(link, [words(payload.digest, who, *named(hashes))])
    said = hear(link)
    if "same" in said:
        return Pushed(payload.digest, payload.digest, same=True)
    tell(link, (packer.packed(hashes[path], files[path]) for path in said["want"]))
    hear(link)
    return Pushed(payload.digest, said["was"] or "", len(said["want"]))


def _switch(links: Mapping[str, RemoteProcess], node: str, staged: Pushed) -> Pushed:
    if not staged.same:
        tell(links[node], [words("commit")])
        hear(links[node])
    return staged


def _roll_back(links: Mapping[str, RemoteProcess], node: str) -> None:
    tell(links[node], [words("rollback")])
    hear(links[node])


def _all_of(answers: Mapping[str, T | TorchrackError], hint: str) -> dict[str, T]:
    failed = {node: answer for node, answer in answers.items() if isinstance(answer, TorchrackError)}
    if failed:
        raise NotAll(failed, hint)
    return {node: answer for node, answer in answers.items() if not isinstance(answer, TorchrackError)}
