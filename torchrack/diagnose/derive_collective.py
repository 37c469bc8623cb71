"""Findings about ranks that do not agree: on the collective, its size, NCCL's version or its settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torchrack.diagnose.facts import Facts, Hit
from torchrack.diagnose.findings import Finding, Who, rank_who

_PRINT = re.compile(r"OpType=(?P<op>\w+)(?:, TensorShape=\[(?P<shape>[^\]]*)\])?(?:, TensorDtypes=(?P<dtype>[^,)]+))?")


def findings(facts: Facts) -> Iterator[Finding]:
    yield from fingerprints(facts)
    yield from ras(facts)
    yield from versions(facts)
    yield from truncated(facts)


def fingerprints(facts: Facts) -> Iterator[Finding]:
    """PyTorch's check names the prints of two ranks; over all messages the odd one out is the culprit."""
    prints: dict[int, tuple[str, str, str]] = {}
    hits = facts.all("fingerprint-mismatch")
    for hit in hits:
        for rank, text in ((hit.groups["rank"], hit.get("mine")), (hit.groups["peer_rank"], hit.get("theirs"))):
            if match := _PRINT.search(text or ""):
                prints[int(rank)] = (match["op"], match["shape"] or "", match["dtype"] or "")
    if not prints:
        return
    ops = Counter(op for op, _, _ in prints.values())
    part = 0 if len(ops) > 1 else slice(1, 3)
    common = _common(facts, [p[part] for p in prints.values()], [prints[r][part] for r in sorted(prints)])
    odd = sorted(rank for rank, p in prints.items() if p[part] != common)
    usual = next(p for p in prints.values() if p[part] == common)
    if not odd:
        return
    op, shape, dtype = prints[odd[0]]
    words = {"op": op, "others_op": usual[0], "shape": f"[{shape}]", "others_shape": f"[{usual[1]}]",
             "dtype": dtype, "others_dtype": usual[2]}  # fmt: skip
    kind = "collective-mismatch" if len(ops) > 1 else "collective-shape-mismatch"
    yield Finding(kind, hits[:6], [rank_who(facts, rank) for rank in odd], words)


def _common(facts: Facts, values: list[object], in_rank_order: list[object]) -> object:
    """What most ranks do; with two equal camps what the lowest rank does."""
    counts = Counter(values)
    best = max(counts.values())
    return next(value for value in in_rank_order if counts[value] == best)


def ras(facts: Facts) -> Iterator[Finding]:
    """Add to the RAS report's own finding which ranks are behind. The report lists the minority, healthy or not."""
    hits = facts.all("ras-mismatch")
    counts = [h for h in facts.all("ras-count") if h.get("count")]
    if not hits or not counts:
        return
    groups = {(h.get("n"), h.groups["count"]) for h in counts if h.get("n")}
    text = ", ".join(f"{n} ranks at operation {count}" for n, count in sorted(groups, key=lambda g: int(g[1])))
    behind = min(int(h.groups["count"]) for h in counts)
    slow = [h for h in counts if h.get("rank") and int(h.groups["count"]) == behind]
    who = [rank_who(facts, int(h.groups["rank"])) for h in slow][:8]
    yield Finding(
        "collective-desync-ras", [*hits, *counts[:6]], who, {"counts": text or f"the slowest at operation {behind}"}
    )


def versions(facts: Facts) -> Iterator[Finding]:
    """NCCL banners that differ between nodes, while the communicator could not be made."""
    named = facts.all("nccl-version-mismatch")
    banners: dict[str, Hit] = {}
    for hit in facts.all("nccl-banner"):
        if node := facts.node_of(hit):
            banners.setdefault(node, hit)
    seen = {node: hit.groups["version"] for node, hit in banners.items()}
    if len(set(seen.values())) > 1 and not any("Init COMPLETE" in h.text for h in facts.all("progress")):
        text = ", ".join(f"{node} {version}" for node, version in seen.items())
        usual = Counter(seen.values()).most_common(1)[0][0]
        odd = [Who(node) for node, version in seen.items() if version != usual]
        yield Finding("nccl-version-mismatch", [*named, *banners.values()], odd, {"versions": text})
    elif named:
        hit = named[0]
        pairs = ((hit.get("rank"), hit.get("version")), (hit.get("peer_rank"), hit.get("peer_version")))
        words = {"versions": ", ".join(f"rank {rank}: {version}" for rank, version in pairs)}
        ranks = [int(h.groups["rank"]) for h in named if h.get("rank")]
        yield Finding("nccl-version-mismatch", named, _version_culprit(facts, named, ranks), words)


def _version_culprit(facts: Facts, named: list[Hit], ranks: list[int]) -> list[Who]:
    """The rank that differs from rank 0; where its node is not known, the node that does not speak of it."""
    who = [rank_who(facts, rank) for rank in dict.fromkeys(ranks)]
    speaking = {facts.node_of(h) for h in named}
    others = [node for node in facts.nodes if node not in speaking]
    return [Who(others[0], w.rank) if w.node is None and len(others) == 1 else w for w in who]


def truncated(facts: Facts) -> Iterator[Finding]:
    """A message of unexpected size: settings or tensor sizes differ, unless the versions do or a stranger spoke."""
    hits = [h for h in facts.all("nccl-truncated") if int(h.groups["got"]) <= 1 << 20 or "bootstrap" not in h.text]
    if not hits:
        return
    words = {"got": hits[0].groups["got"], "want": hits[0].groups["want"]}
    if difference := settings_difference(facts):
        words["difference"], nodes = difference
    else:
        nodes = []
    peer = facts.node_at(hits[0].get("address"))
    who = [Who(node) for node in nodes] or ([Who(peer)] if peer else [])
    extra = [h for h in facts.all("nccl-env") if facts.node_of(h) in nodes]
    yield Finding("nccl-env-or-size-mismatch", [*hits[:3], *extra[:3]], who, words)


def settings_difference(facts: Facts) -> tuple[str, list[str]] | None:
    """The first NCCL variable that not all nodes set to the same value, and the nodes that differ from the majority."""
    hits = facts.all("nccl-env")
    nodes = {n for log in facts.logs.values() if (n := log.node)}
    for name in dict.fromkeys(h.groups["name"] for h in hits):
        if "IFNAME" in name or name.startswith("NCCL_DEBUG"):
            continue
        values = {facts.node_of(h): h.groups["value"] for h in hits if h.groups["name"] == name}
        unset = [n for n in nodes if n not in values]
        if unset or len(set(values.values())) > 1:
            odd = sorted(n for n in values if n) if unset else sorted(n for n in values if n)[1:]
            text = ", ".join(f"{name}={value} on {node}" for node, value in values.items())
            return (text + (f" and unset on {', '.join(sorted(unset))}" if unset else ""), odd)
    return None
