"""Which node a log or line speaks for. Host names may be missing, or the same on two nodes; then the file tells."""

from __future__ import annotations

import re

from torchrack.diagnose.facts import Facts, Hit, natural

_NODE = re.compile(
    r"(?:^|[/._-])((?:node|host|worker|server|machine|gpu|vm|pod|master)[-_]?\d{1,5})(?=$|[/._-])", re.IGNORECASE
)
_NOISE_WORDS = {
    *("log", "logs", "txt", "out", "err", "stdout", "stderr", "stdin"),
    *("agent", "output", "torchrun", "train", "dmesg", "kern"),
}
ONLY = "node0"  # the name of the only node of a log that names none


def node_in_path(name: str) -> str | None:
    """node1 from logs/node1/0.log, log.node1.txt or node1.out; None when no part of the path looks like a node."""
    match = _NODE.search(name)
    return match[1] if match else None


def attempt_in_path(name: str) -> int:
    """The restart attempt: torchrun --log-dir writes <run>/attempt_<n>/<local rank>/stderr.log."""
    match = re.search(r"(?:^|/)attempt_(\d{1,4})/", name)
    return int(match[1]) if match else 0


def name_nodes(facts: Facts) -> None:
    """Settle the node of every source and what addresses belong to which node."""
    _name_by_host(facts)
    _name_by_file(facts)
    _map_addresses(facts)
    _place_ranks(facts)
    if len(facts.logs) == 1 and not facts.nodes:
        next(iter(facts.logs.values())).node = ONLY


def _name_by_host(facts: Facts) -> None:
    """A source without a node in its path takes the one host that speaks in it, unless another source has the same."""
    for hit in facts.hits.get("summary-host", []):
        if hit.groups["host"] != "localhost":
            facts.logs[hit.source].hosts[hit.groups["host"]] += 1
    unnamed = [log for log in facts.logs.values() if not log.node and len(log.hosts) == 1]
    hosts = [next(iter(log.hosts)) for log in unnamed]
    for log, host in zip(unnamed, hosts, strict=True):
        if hosts.count(host) == 1 or len(facts.logs) == 1:
            log.node = host


def _name_by_file(facts: Facts) -> None:
    """What still has no name takes the part of its path in which it differs from the others."""
    unnamed = [log for log in facts.logs.values() if not log.node and len(log.hosts) <= 1]
    if len(unnamed) < 2:
        return
    parts = {log.name: [p for p in re.split(r"[/._]+", log.name) if p.lower() not in _NOISE_WORDS] for log in unnamed}
    common = set.intersection(*(set(p) for p in parts.values()))
    for log in unnamed:
        own = [
            p for p in parts[log.name] if p not in common and not p.isdigit() and not re.fullmatch(r"rank[-_]?\d+", p)
        ]
        log.node = own[0] if own else None


def _map_addresses(facts: Facts) -> None:
    for hit in [*facts.hits.get("nccl-bootstrap-if", []), *facts.hits.get("own-address", [])]:
        node = facts.node_of(hit)
        address = hit.groups["address"]
        if node and not address.startswith(("127.", "169.254.", "fe80", "::1")):
            facts.addresses.setdefault(address, node)


def _place_ranks(facts: Facts) -> None:
    """Say of every hit and traceback whose rank is only known by its process which rank that is."""
    ranks: dict[tuple[str, str | None, str | None], int] = {}
    for hit in facts.hits.get("nccl-rank", []):
        ranks.setdefault((hit.source, hit.node, hit.pid), int(hit.groups["rank"]))
    for hits in facts.hits.values():
        for hit in hits:
            _place(facts, hit, ranks)
    facts.rank_node = {rank: node for rank, node in sorted(facts.rank_node.items()) if node}


def _place(facts: Facts, hit: Hit, ranks: dict[tuple[str, str | None, str | None], int]) -> None:
    if hit.rank is None and hit.pid:
        hit.rank = ranks.get((hit.source, hit.node, hit.pid))
    own = "rank" not in hit.groups or hit.rule.id == "nccl-rank"
    if hit.rank is not None and own and (node := facts.node_of(hit)):
        facts.rank_node.setdefault(hit.rank, node)


__all__ = ["ONLY", "name_nodes", "natural", "node_in_path"]
