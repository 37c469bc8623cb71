"""What the logs say, before anything is concluded: hits of rules, exits, tracebacks, who is where and when."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from torchrack.diagnose.rules import Rule
from torchrack.diagnose.tracebacks import Trace

CLOSED = -15  # torchrun ends the other ranks of a node with SIGTERM when one has failed
ERROR_ROLES = ("cause", "symptom", "unexplained")
RESTART_GRACE = 8.0  # seconds that other agents need to notice a failure before they restart (monitor + shutdown)


@dataclass(slots=True)
class Hit:
    """A rule that matched a line. `at` as in lines.Line; `attempt` counts torchrun's restarts, from 0."""

    rule: Rule
    source: str
    line: int
    text: str
    groups: dict[str, str]
    node: str | None = None
    rank: int | None = None
    pid: str | None = None
    at: float | None = None
    attempt: int = 0

    def get(self, name: str) -> str | None:
        return self.groups.get(name)


@dataclass(slots=True)
class Exit:
    """How a rank ended, as its launcher tells; a negative code is a signal."""

    hit: Hit
    code: int
    rank: int | None
    local_rank: int | None = None


@dataclass(slots=True)
class Log:
    """One source, or one node's part of it, after reading. `ended`: its trailer said with which status."""

    key: str
    name: str
    node: str | None = None
    rank: int | None = None
    agent: bool = False
    lines: int = 0
    ended: int | None = None
    reason: str | None = None
    hosts: Counter[str] = field(default_factory=Counter)
    last_text: str = ""
    last_line: int = 0
    first_at: float | None = None
    last_at: float | None = None


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a rank stood when an autopsy was taken: derive_autopsy.py."""

    state: str
    call: str
    place: str
    line: str
    hit: Hit
    seq: int | None = None  # of the rank's last collective, where its flight recorder was asked
    done: bool = False  # that one


@dataclass
class Facts:
    logs: dict[str, Log] = field(default_factory=dict)
    hits: dict[str, list[Hit]] = field(default_factory=lambda: defaultdict(list))
    exits: list[Exit] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    rank_node: dict[int, str] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    worlds: Counter[int] = field(default_factory=Counter)
    node_status: dict[str, int] = field(default_factory=dict)
    stands: dict[int, Stand] = field(default_factory=dict)
    nodes_wanted: int = 0
    restarted: bool = False
    restart_at: float | None = None

    @property
    def lines(self) -> int:
        return sum(log.lines for log in self.logs.values())

    @property
    def world(self) -> int | None:
        """The number of ranks of the job, if any line tells; sub-groups are smaller, so the largest counts."""
        return max(self.worlds, default=None)

    @property
    def nodes(self) -> list[str]:
        """The nodes that the logs know, in order of their names."""
        named = {log.node for log in self.logs.values() if log.node} | set(self.rank_node.values())
        named |= {host for log in self.logs.values() if not log.node for host, n in log.hosts.items() if n > 1}
        return sorted(named | set(self.node_status), key=natural)

    def all(self, *ids: str) -> list[Hit]:
        """The hits of these rules that belong to the first attempt, in order of reading."""
        return [hit for name in ids for hit in self.hits.get(name, ()) if self.first_attempt(hit)]

    def has(self, *ids: str) -> bool:
        return any(self.all(name) for name in ids)

    def by_role(self, role: str) -> Iterator[Hit]:
        for hits in list(self.hits.values()):
            if hits and hits[0].rule.role == role:
                yield from (hit for hit in hits if self.first_attempt(hit))

    def first_attempt(self, what: Hit | Trace) -> bool:
        if not self.restarted:
            return True
        if what.attempt:
            return False
        return self.restart_at is None or what.at is None or what.at <= self.restart_at + RESTART_GRACE

    def node_of(self, what: Hit | Trace) -> str | None:
        """The node that a line speaks for: its source's, else its own prefix, else where its rank was seen."""
        log = self.logs.get(what.source)
        if log and log.node:
            return log.node
        if what.node:
            return what.node
        return self.rank_node.get(what.rank) if what.rank is not None else None

    def node_at(self, address: str | None) -> str | None:
        """The node that owns an address or name, or the address itself when none is known to."""
        if not address:
            return None
        bare = address.removeprefix("::ffff:").split("%")[0]
        return self.addresses.get(bare) or (bare if bare in self.nodes else self.addresses.get(address, bare))

    def ranks_on(self, node: str) -> list[int]:
        return sorted(rank for rank, where in self.rank_node.items() if where == node)

    def recovered(self, what: Hit | Trace) -> bool:
        """Its source went on to work after this line, and no further traceback or failed exit followed there."""
        worked, failed = self._last_lines
        return worked.get(what.source, 0) > what.line >= failed.get(what.source, 0)

    @cached_property
    def _last_lines(self) -> tuple[dict[str, int], dict[str, int]]:
        """Of each source the last line that shows work, and the last that shows an end by failure."""
        worked: dict[str, int] = {}
        failed: dict[str, int] = {}
        for hit in self.all("progress", "done"):
            worked[hit.source] = max(hit.line, worked.get(hit.source, 0))
        ends = [(t.source, t.line) for t in self.traces] + [(e.hit.source, e.hit.line) for e in self.exits if e.code]
        for source, line in ends:
            failed[source] = max(line, failed.get(source, 0))
        return worked, failed

    @cached_property
    def failed_ranks(self) -> set[int]:
        """Ranks that raised, died, exited non-zero, or printed an error; not those that their launcher closed."""
        ranks = {t.rank for t in self.traces} | {e.rank for e in self.exits if e.code not in (0, CLOSED)}
        ranks |= {hit.rank for role in ERROR_ROLES for hit in self.by_role(role)}
        return {rank for rank in ranks if rank is not None}

    @cached_property
    def loud_nodes(self) -> set[str]:
        """Nodes in whose logs an error, a failed exit or a traceback stands."""
        lines: list[Hit | Trace] = [*self.traces, *(e.hit for e in self.exits)]
        lines += [hit for role in ERROR_ROLES for hit in self.by_role(role)]
        return {node for line in lines if (node := self.node_of(line))}

    def peers_lost(self) -> list[Hit]:
        return self.all("gloo-peer-lost", "nccl-peer-lost")


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key by which node2 comes before node10."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name))


def earliest(hits: Iterable[Hit]) -> Hit | None:
    """The hit with the earliest stamp; without stamps the first one read."""
    found = list(hits)
    stamped = [hit for hit in found if hit.at is not None]
    return min(stamped, key=lambda hit: hit.at or 0.0) if stamped else (found[0] if found else None)
