"""A finding: one possible answer, with its evidence and whose fault it would be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torchrack.diagnose.facts import Facts, Hit, earliest, natural
from torchrack.diagnose.rules import Kind, kinds

CULPRITS_NAMED = 8
EVIDENCE_SHOWN = 6


@dataclass(frozen=True, order=True)
class Who:
    """A node, a global rank, or a rank on a node."""

    node: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        if self.rank is None:
            return self.node or "one rank"
        return f"rank {self.rank}" + (f" on {self.node}" if self.node else "")


@dataclass
class Finding:
    kind: str
    hits: list[Hit]
    who: list[Who] = field(default_factory=list)
    words: dict[str, str] = field(default_factory=dict)
    at: float | None = None
    weak: int = 0  # added to the kind's depth: this one rests on less than others of its kind

    def __post_init__(self) -> None:
        if self.at is None and (first := earliest(self.hits)):
            self.at = first.at

    @property
    def entry(self) -> Kind:
        return kinds()[self.kind]

    @property
    def depth(self) -> int:
        return self.entry.depth + self.weak

    def say(self, texts: Iterable[str]) -> str:
        """The first text whose {names} are all known."""
        known = self.words | {"who": listed(self.who)}
        if "node" not in known and len({w.node for w in self.who}) == 1 and self.who[0].node:
            known["node"] = self.who[0].node
        for text in (choices := list(texts))[:-1]:
            try:
                return text.format_map(known)
            except KeyError:
                continue
        return choices[-1].format_map(Placeholders(known))


class Placeholders(dict[str, str]):
    """What the logs do not tell is said as in a manual: HOST, PORT."""

    def __missing__(self, name: str) -> str:
        return name.upper()


def listed(who: Iterable[Who]) -> str:
    """As prose: "rank 3 on node1", "node0 and node1", or "one rank" when nobody is known."""
    names = [str(w) for w in who] or ["one rank"]
    if len(names) > 4:
        names = [*names[:3], f"{len(names) - 3} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def speakers(facts: Facts, hits: Iterable[Hit]) -> list[Who]:
    """Whose fault these hits are, by each rule's `blame`; the node alone where the rank is not known."""
    found: set[Who] = set()
    for hit in hits:
        if hit.rule.blame != "nobody":
            found |= _blamed(facts, hit)
    with_rank = {w.node for w in found if w.rank is not None}
    kept = [w for w in found if w.rank is not None or (w.node is not None and w.node not in with_rank)]
    kept.sort(key=lambda w: (natural(w.node or ""), -1 if w.rank is None else w.rank))
    return kept[:CULPRITS_NAMED]


def _blamed(facts: Facts, hit: Hit) -> set[Who]:
    if hit.get("peer"):
        return {Who(hit.groups["peer"])}
    if hit.rule.blame == "peer":
        return {Who(facts.node_at(hit.get("address")))}
    if hit.get("rank") and hit.rank is not None:
        return {rank_who(facts, hit.rank, hit)}
    if hit.get("node"):
        return {Who(hit.groups["node"])}
    return {Who(facts.node_of(hit), hit.rank)}


def rank_who(facts: Facts, rank: int, hit: Hit | None = None) -> Who:
    """A rank and the node it was seen on; the speaker's node if there is but one."""
    node = facts.rank_node.get(rank)
    if node is None and hit is not None and len(facts.nodes) <= 1:
        node = facts.node_of(hit)
    return Who(node, rank)


def direct(facts: Facts) -> list[Finding]:
    """The findings that single lines name by themselves, one a kind."""
    by_kind: dict[str, list[Hit]] = {}
    for hit in facts.by_role("cause"):
        if hit.rule.kind:
            by_kind.setdefault(hit.rule.kind, []).append(hit)
    found = []
    for kind, hits in by_kind.items():
        words: dict[str, str] = {}
        for hit in hits:
            for name, value in hit.groups.items():
                words.setdefault(name, value)
        found.append(Finding(kind, hits, speakers(facts, hits), words))
    return found
