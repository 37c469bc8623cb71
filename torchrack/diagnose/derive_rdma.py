"""Findings about InfiniBand and RoCE: completion errors, differing nodes, and runs that work but slowly."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchrack.diagnose.derive_network import env
from torchrack.diagnose.facts import Facts, Hit
from torchrack.diagnose.findings import Finding, Who, listed, speakers

LOCAL_PROTECTION, RETRY_EXCEEDED, RNR_RETRY_EXCEEDED = "4", "12", "13"
_HCA = re.compile(r"\[\d+\](?P<hca>[\w.-]+):\d+/(?P<type>IB|RoCE)")
_GIDS = re.compile(r"localGid (?P<local>\S+) remoteGids?:?:?(?P<remote>\S+)")
COLLAPSED = 0.25  # a large message at under a quarter of the best bandwidth is loss, not noise


def findings(facts: Facts) -> Iterator[Finding]:
    yield from mtu(facts)
    yield from completions(facts)
    yield from transports(facts)
    yield from slow(facts)


def hcas(facts: Facts) -> dict[str, str]:
    """HCA -> link type, as NCCL listed those it uses."""
    return {m["hca"]: m["type"] for hit in facts.all("nccl-ib-using") for m in _HCA.finditer(hit.groups["list"])}


def mtu(facts: Facts) -> Iterator[Finding]:
    hits = facts.all("ib-active-mtu")
    by_node = {facts.node_of(h) or h.source: h.groups["mtu"] for h in hits}
    errors = facts.all("ib-completion-error", "ib-qp-event")
    if len(set(by_node.values())) > 1 and errors:
        text = ", ".join(f"{node} mtu {value}" for node, value in by_node.items())
        yield Finding("mtu-mismatch", [*hits[:4], *errors[:3]], [Who(node) for node in by_node], {"mtus": text})


def completions(facts: Facts) -> Iterator[Finding]:
    hits = facts.all("ib-completion-error")
    if not hits:
        return
    protection = [h for h in hits if h.groups["status"] == LOCAL_PROTECTION]
    retries = [h for h in hits if h.groups["status"] in (RETRY_EXCEEDED, RNR_RETRY_EXCEEDED)]
    if protection:
        extra = facts.all("gdr-enabled")
        yield Finding("gdr-acs-enabled", [*protection, *extra[:2]], speakers(facts, protection))
    elif retries:
        yield from _retries(facts, retries)


def _retries(facts: Facts, hits: list[Hit]) -> Iterator[Finding]:
    peer = next((h.groups["address"] for h in hits if h.get("address")), None)
    ends = [*speakers(facts, hits), *([Who(facts.node_at(peer))] if peer else [])]
    words = {"address": peer} if peer else {}
    if extra := _prefix_matched(facts, hits):
        chosen = next(iter(env(facts, "NCCL_IB_HCA").values()))
        evidence = [*hits[:4], *(h for h in facts.all("nccl-env") if h.groups["name"] == "NCCL_IB_HCA")]
        yield Finding("ib-hca-prefix-match", evidence, speakers(facts, hits), {"filter": chosen, "extra": extra})
        return
    roce = set(hcas(facts).values()) == {"RoCE"}
    kind = "roce-gid-index" if roce and not _plausible_gids(hits) else "ib-retry-exceeded"
    hca = next((m[1] for h in hits if (m := re.search(r"\bhca (\w+)", h.text))), None)
    words["node"] = listed(speakers(facts, hits)[:1])
    words["hca_text"] = f", {hca}" if hca else ""
    yield Finding(kind, [*hits[:4], *facts.all("nccl-ib-using")[:1]], list(dict.fromkeys(ends)), words)


def _prefix_matched(facts: Facts, hits: list[Hit]) -> str | None:
    """The HCA that NCCL_IB_HCA selected only because it works as a prefix, if traffic may have failed on it."""
    for value in env(facts, "NCCL_IB_HCA").values():
        if value.startswith(("=", "^")):
            continue
        asked = {part.split(":")[0] for part in value.split(",")}
        extra = [h for h in hcas(facts) if h not in asked and any(h.startswith(a) for a in asked)]
        failing = {m[1] for h in hits if (m := re.search(r"\bhca (\w+)", h.text))}
        if extra and (not failing or failing & set(extra)):
            return ", ".join(extra)
    return None


def _plausible_gids(hits: list[Hit]) -> bool:
    """Both ends show an IPv4-mapped GID of one kind, as a right GID index gives."""
    pairs = [m for h in hits if (m := _GIDS.search(h.text))]
    return any("::ffff:" in m["local"] and "ffff:" in m["remote"] for m in pairs)


def transports(facts: Facts) -> Iterator[Finding]:
    """One node on RDMA, another on sockets."""
    by_net: dict[str, set[str]] = {}
    hits = facts.all("nccl-network")
    for hit in hits:
        if node := facts.node_of(hit):
            by_net.setdefault("Socket" if hit.groups["net"] == "Socket" else "RDMA", set()).add(node)
    socket, rdma = by_net.get("Socket", set()), by_net.get("RDMA", set())
    if socket and rdma and not socket & rdma:
        words = {"rdma": " and ".join(sorted(rdma)), "socket": " and ".join(sorted(socket))}
        evidence = [h for h in hits if facts.node_of(h) in socket][:2] + [h for h in hits if facts.node_of(h) in rdma][
            :2
        ]
        who = [Who(node) for node in sorted(socket)]
        yield Finding("transport-mismatch-between-nodes", [*evidence, *facts.all("ib-none")[:1]], who, words)


def slow(facts: Facts) -> Iterator[Finding]:
    """A job that works, slower than its network allows."""
    if any(True for role in ("failure", "unexplained") for _ in facts.by_role(role)):
        return
    disabled = [h for h in facts.all("gdr-disabled") if not _enabled(facts, h)]
    if disabled:
        yield Finding("perf-gdr-disabled", disabled, speakers(facts, disabled))
    fallback = facts.all("ib-none")
    sockets = [h for h in facts.all("nccl-network") if h.groups["net"] == "Socket"]
    expected = facts.has("rdma-expected") or env(facts, "NCCL_IB_HCA")
    if fallback and sockets and expected:
        yield Finding(
            "perf-socket-fallback",
            [*fallback[:2], *sockets[:2], *facts.all("bandwidth")[:1]],
            speakers(facts, fallback),
        )
    yield from _loss(facts)


def _enabled(facts: Facts, hit: Hit) -> bool:
    return any(facts.node_of(h) == facts.node_of(hit) for h in facts.all("gdr-enabled"))


def _loss(facts: Facts) -> Iterator[Finding]:
    """Bandwidth that rises with size and then collapses, on RoCE; or the NIC's own counters of lost packets."""
    counters = facts.all("rdma-loss")
    rows = sorted(
        ((int(h.groups["size"]), float(h.groups["busbw"]), h) for h in facts.all("bandwidth-row")), key=lambda r: r[0]
    )
    best = max(rows, key=lambda r: r[1], default=None)
    later = [row for row in rows if best and row[0] > best[0] and row[1] < COLLAPSED * best[1]]
    if best and later and "RoCE" in hcas(facts).values():
        worst = min(later, key=lambda r: r[1])
        words = {"best": f"{best[1]:g}", "worst": f"{worst[1]:g}"}
        yield Finding("perf-roce-packet-loss", [best[2], worst[2], *counters[:2]], speakers(facts, [best[2]]), words)
    elif counters:
        yield Finding("perf-roce-packet-loss", counters, speakers(facts, counters))
