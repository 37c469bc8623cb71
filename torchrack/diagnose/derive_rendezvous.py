"""Findings about coming together: the port, who hosts the store, who reaches it, who joins."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchrack.diagnose.derive_network import plausible_world
from torchrack.diagnose.facts import Facts, Hit
from torchrack.diagnose.findings import Finding, Who, rank_who, speakers

REJECTED = {"113", "101", "13", "1"}  # EHOSTUNREACH, ENETUNREACH, EACCES, EPERM: somebody answered "no"
REFUSED = "111"
JOIN_TIMEOUT = 600.0  # seconds: c10d's default
KEEP_ALIVE = 15.0  # seconds: c10d's keep-alive interval times its attempts, after which a node counts as dead
_C10D_KEY = re.compile(r"default_pg|store_based_barrier|/\d+//|//cpu//|//cuda//")
_GLOO_RANK = re.compile(r"/default_pg/\d+//cpu//\d+/(\d+)$")
_OF_TORCH = re.compile("python|torchrun|pt_")
_GLOBAL_IPV6 = re.compile(r"\[(?:2[0-9a-f]{3}|f[cd][0-9a-f]{2}):")
_STANDALONE = re.compile(r"--standalone\b")
_NNODES = re.compile(r"--nnodes[= ](?:\d+:)?(\d+)")


def findings(facts: Facts) -> Iterator[Finding]:
    yield from ports(facts)
    yield from standalone(facts)
    yield from connects(facts)
    yield from joins(facts)
    yield from clocks(facts)
    yield from store_counts(facts)
    yield from world_sizes(facts)


def ports(facts: Facts) -> Iterator[Finding]:
    """A bound port; by whom, if anything tells."""
    hits = [h for h in facts.all("bind-in-use") if not _became_client(facts, h)]
    holders = [h for h in facts.all("port-holder") if not _OF_TORCH.match(h.groups["holder"]) or "http" in h.text]
    if not hits:
        yield from _stranger(facts)
        if holders and any(facts.by_role("failure")):
            yield Finding("port-in-use-foreign-service", holders, speakers(facts, holders), dict(holders[0].groups))
        return
    port = next((p for h in hits if (p := h.get("port"))), None)
    words = {"port": port} if port else {}
    own, who = _own_ranks(facts, hits)
    if own:
        yield Finding("port-in-use-by-own-ranks", [*hits[:4], *own[:2]], who, words)
    elif holders and any(h.groups["port"] == port for h in holders):
        yield Finding(
            "port-in-use-foreign-service",
            [*hits[:3], *holders],
            speakers(facts, hits),
            words | {"holder": holders[0].groups["holder"]},
        )
    else:
        yield Finding("port-in-use", hits[:6], speakers(facts, hits), words)


def _became_client(facts: Facts, hit: Hit) -> bool:
    """After the failed bind this agent connected to whoever holds the port, as several agents on one host do."""
    return any(c.source == hit.source and c.line > hit.line for c in facts.all("client-connected"))


def _stranger(facts: Facts) -> Iterator[Finding]:
    """Clients of whoever held the port, who then heard nothing more, or were hung up on: that was no store."""
    bound = facts.all("bind-in-use")
    connected = facts.all("client-connected")
    hung_up = connected and facts.has("client-failed-all")
    if bound and (hung_up or not facts.traces) and not facts.has("done", "progress", "rdzv-complete"):
        yield Finding(
            "port-in-use-foreign-service", [*bound[:2], *connected[:2]], speakers(facts, bound), dict(bound[0].groups)
        )


def _own_ranks(facts: Facts, hits: list[Hit]) -> tuple[list[Hit], list[Who]]:
    """The lines that show this job itself to hold the port, and the ranks that tried to host as well."""
    ranks = sorted({h.rank for h in hits if h.rank})
    by_hand = [h for h in facts.all("local-rank-by-hand") if h.groups["nproc"] != "1"]
    twice = facts.all("init-twice")
    if by_hand:
        local = int(by_hand[0].groups["local"])
        return by_hand, [rank_who(facts, rank) for rank in ranks] or [
            Who(facts.node_of(hits[0]), 1 if local == 0 else 0)
        ]
    if twice or ranks:
        return twice or [h for h in hits if h.rank], [rank_who(facts, rank) for rank in ranks] or speakers(facts, twice)
    return [], []


def standalone(facts: Facts) -> Iterator[Finding]:
    commands = [h for h in facts.all("launch-command") if _STANDALONE.search(h.text)]
    several = [h for h in commands if (m := _NNODES.search(h.text)) and int(m[1]) > 1]
    info = facts.all("standalone-info")
    local = [
        h
        for h in facts.all("launch-config")
        if h.groups["key"] == "rdzv_endpoint" and re.match(r"(localhost|127\.0\.0\.1):0$", h.groups["value"])
    ]
    if several or ((info or local or commands) and nodes_wanted(facts) > 1) or (info and facts.has("join-timeout")):
        evidence = several or [*commands, *info, *local]
        yield Finding("launcher-standalone-multinode", evidence[:6], speakers(facts, evidence))


def nodes_wanted(facts: Facts) -> int:
    """How many nodes the job is to have, by its launch configuration; 0: not told."""
    told = [
        int(h.groups["value"])
        for h in facts.all("launch-config")
        if h.groups["key"] == "min_nodes" and h.groups["value"].isdigit()
    ]
    told += [int(m[1]) for h in facts.all("launch-command") if (m := _NNODES.search(h.text))]
    return max([facts.nodes_wanted, *told])


def connects(facts: Facts) -> Iterator[Finding]:
    """Connects to a store that never came about, by how they failed and who else was there."""
    timeouts, failed_all = facts.all("client-timeout"), facts.all("client-failed-all")
    reasons = facts.all("client-failed")
    hits = [*timeouts, *failed_all]
    if not hits:
        return
    where = next((h for h in hits if h.get("host")), None)
    words = {"host": where.groups["host"], "port": where.groups["port"]} if where else {}
    rejected = [h for h in reasons if h.groups["errno"] in REJECTED]
    who = speakers(facts, hits)
    owner = [Who(facts.node_at(words["host"]))] if words else []
    if rejected and failed_all and all(_GLOBAL_IPV6.match(h.groups["address"]) for h in reasons):
        words["address"] = reasons[0].groups["address"]
        yield Finding("ipv6-family-mismatch", [*rejected[:2], *failed_all[:2]], who, words)
    elif rejected and failed_all:
        words["reason"] = f"errno {rejected[-1].groups['errno']}, {rejected[-1].groups['reason']}"
        yield Finding("firewall-rendezvous-port", [*rejected[:2], *failed_all[:2]], owner or who, words)
    elif _nobody_hosts(facts, hits, words):
        yield Finding("rdzv-host-not-recognised", hits[:6], _owner_or_first(facts, words), words)
    elif words and _second_port(facts, hits, words):
        yield Finding("firewall-worker-store-port", hits[:6], [*owner, *who], words)
    elif _host_is_up(facts, hits, words) and not any(h.groups["errno"] == REFUSED for h in reasons):
        yield Finding("rdzv-connect-timeout", [*hits[:4], *facts.all("store-hosted")[:2]], who, words)
    else:
        yield Finding("rdzv-connection-refused", [*hits[:4], *reasons[:2]], owner or who, words)


def _clients(facts: Facts, hits: list[Hit]) -> set[str]:
    return {node for h in hits if (node := facts.node_of(h))}


def _nobody_hosts(facts: Facts, hits: list[Hit], words: dict[str, str]) -> bool:
    """All nodes, the endpoint's owner among them, are clients that time out."""
    clients = _clients(facts, hits)
    owner = facts.node_at(words.get("host"))
    everybody = len(facts.nodes) > 1 and clients >= set(facts.nodes)
    complete = len(clients) >= max(2, nodes_wanted(facts))
    agents = {h.source for h in facts.all("store-connection-error")}
    # An agent that was ended before it gave up is one of them too: each waits a random while before it tries again.
    by_agents = bool(agents) and all(h.source in agents or h.rank is None for h in hits)
    return (
        by_agents
        and not facts.has("store-hosted")
        and ((everybody and complete) or (owner in clients and len(clients) > 1))
    )


def _owner_or_first(facts: Facts, words: dict[str, str]) -> list[Who]:
    owner = facts.node_at(words.get("host"))
    return [Who(owner if owner in facts.nodes else facts.nodes[0])]


def _second_port(facts: Facts, hits: list[Hit], words: dict[str, str]) -> bool:
    """The rendezvous worked and this is another port: the workers' own store."""
    endpoint = [h.groups["value"] for h in facts.all("launch-config") if h.groups["key"] == "rdzv_endpoint"]
    endpoint += re.findall(r"--rdzv[-_]endpoint[= ](\S+)", " ".join(h.text for h in facts.all("launch-command")))
    other = bool(endpoint) and all(not e.endswith(":" + words["port"]) for e in endpoint)
    by_worker = any(h.rank is not None for h in hits) or _in_worker(facts, hits)
    under_agent = facts.has("worker-failed", "rdzv-complete", "closing-workers") or bool(facts.exits)
    everybody = _clients(facts, hits) >= set(facts.nodes)  # also the owner, which no firewall keeps from itself
    return under_agent and by_worker and not everybody and (other or int(words["port"]) >= 30000)


def _in_worker(facts: Facts, hits: list[Hit]) -> bool:
    sources = {h.source for h in hits}
    return any(t.source in sources and t.op == "init_process_group" for t in facts.traces)


def _host_is_up(facts: Facts, hits: list[Hit], words: dict[str, str]) -> bool:
    """Another node's log shows that it hosts the store, waits in join, or works."""
    clients = {h.source for h in hits}
    client_nodes = _clients(facts, hits)
    signs = facts.all("store-hosted", "join-timeout", "clients-missing", "store-barrier", "rdzv-complete")
    if any(h.source not in clients or facts.node_of(h) not in client_nodes for h in signs):
        return True
    others = [log for log in facts.logs.values() if log.node and log.node not in client_nodes and log.lines]
    return any(log.node == facts.node_at(words.get("host")) for log in others)


def joins(facts: Facts) -> Iterator[Finding]:
    """Join time-outs: on how many of the wanted nodes, and with which ids?"""
    hits = facts.all("join-timeout")
    waiting = sorted({facts.node_of(h) or h.source for h in hits})
    if not waiting:
        return
    config = [h for h in facts.all("launch-config") if h.groups["key"] == "run_id"]
    ids = {facts.node_of(h) or h.source: h.groups["value"] for h in config}
    ids |= {
        facts.node_of(h) or h.source: m[1]
        for h in facts.all("launch-command")
        if (m := re.search(r"--rdzv[-_]id[= ](\S+)", h.text))
    }
    differ = len(set(ids.values())) > 1
    if differ or len(waiting) >= max(2, nodes_wanted(facts)):
        words = {"ids": ", ".join(f"{node}: {value}" for node, value in ids.items())} if differ else {}
        yield Finding("rdzv-id-mismatch", [*hits[:4], *config[:4]], [Who(node) for node in waiting], words)
    else:
        yield from _missing(facts, hits, waiting)


def _missing(facts: Facts, hits: list[Hit], waiting: list[str]) -> Iterator[Finding]:
    wanted = nodes_wanted(facts)
    words = {"seen": " and ".join(waiting), "wanted": str(wanted)} if wanted else {}
    absent = [f"node{i}" for i in range(wanted) if f"node{i}" not in facts.nodes]
    if not all(re.fullmatch(r"node\d+", node) for node in waiting):
        absent = []
    elif not absent and len(waiting) == 1 and not wanted:
        absent = ["node1" if waiting[0] == "node0" else "node0"]
    if (
        not absent
        and 0 < wanted <= len(facts.nodes)
        and (gone := [node for node in facts.nodes if node not in waiting])
    ):
        absent, words = gone, {"seen": " and ".join(waiting), "again": str(wanted)}  # it was there, and has a log
    yield Finding("rdzv-missing-node", hits[:4], [Who(node) for node in absent[:8]] or speakers(facts, hits), words)


def clocks(facts: Facts) -> Iterator[Finding]:
    """Live nodes taken for dead, or one event that carries offset stamps on the nodes."""
    removed = [h for h in facts.all("node-removed") if any(node in h.groups["dead"] for node in facts.nodes)]
    shared: dict[str, dict[str, Hit]] = {}
    for hit in facts.all("joined-round", "rdzv-complete"):
        node = facts.node_of(hit)
        if node and hit.at is not None:
            shared.setdefault(hit.rule.id + hit.groups.get("round", ""), {}).setdefault(node, hit)
    apart = next((hits for hits in shared.values() if len(hits) > 1 and _spread(hits) > KEEP_ALIVE), None)
    apart = apart or _starts_apart(facts)
    if apart:
        words = {"offset": f"{_spread(apart):.0f} s"}
        yield Finding("clock-skew", [*apart.values(), *removed[:2]], [Who(node) for node in apart], words)
    elif removed:
        yield Finding("clock-skew", removed[:4], [Who(n) for n in facts.nodes if n in removed[0].groups["dead"]])


def _starts_apart(facts: Facts) -> dict[str, Hit] | None:
    """Agents that waited for each other in vain, by stamps further apart than any of them waits."""
    waits = {node: hit for hit in facts.all("join-timeout") if (node := facts.node_of(hit))}
    firsts = [facts.logs[hit.source].first_at for hit in waits.values()]
    stamps = [at for at in firsts if at is not None]
    return waits if len(stamps) > 1 and max(stamps) - min(stamps) > JOIN_TIMEOUT else None


def _spread(hits: dict[str, Hit]) -> float:
    stamps = [hit.at for hit in hits.values() if hit.at is not None]
    return max(stamps) - min(stamps)


def store_counts(facts: Facts) -> Iterator[Finding]:
    """The store's own count of who came."""
    barrier = facts.all("store-barrier")
    clients = facts.all("clients-missing")
    waits = [h for h in facts.all("store-wait-timeout") if h.get("keys")]
    inner = [h for h in waits if _C10D_KEY.search(h.groups["keys"])]
    static = [h for h in waits if "torchelastic/" in h.groups["keys"]]
    if barrier:
        count, world = (max(int(h.groups[name]) for h in barrier) for name in ("count", "world"))
        words = {"count": str(count), "world": str(world)}
        if count > world:
            yield Finding("stale-or-duplicate-workers", barrier[:6], [], words)
        else:
            absent = sorted(set(range(min(world, 100_000))) - {h.rank for h in barrier})
            unseen = [rank for rank in absent if rank not in facts.rank_node]
            missing = absent if len(absent) <= world - count else unseen if len(unseen) <= world - count else []
            if missing:
                words["missing"] = ", ".join(f"rank {rank}" for rank in missing[:8])
            yield Finding("missing-rank-store-barrier", barrier[:6], [rank_who(facts, r) for r in missing[:8]], words)
    elif clients:
        yield from _clients_missing(facts, clients)
    elif static:
        who = sorted({facts.node_of(h) or "" for h in static} - {""})
        yield Finding(
            "duplicate-node-rank", static[:4], [Who(node) for node in who], {"node_rank": "0"} if len(who) > 1 else {}
        )
    elif inner:
        yield from _waited_for(facts, inner)
    elif waits:  # a key of the script's own
        words = {"exception": f"DistStoreError: {waits[0].text.split('DistStoreError: ')[-1]}"}
        yield Finding("app-exception", waits[:4], speakers(facts, waits), words, weak=20)


def _clients_missing(facts: Facts, hits: list[Hit]) -> Iterator[Finding]:
    """One store that lacks clients; two such stores mean that two agents both took themselves for the first node."""
    hosts = {facts.node_of(h) or h.source for h in hits}
    hit = hits[0]
    words = {"count": hit.groups["count"], "world": hit.groups["world"]}
    agents = [log for log in facts.logs.values() if log.node in hosts]
    if len(hosts) > 1 and len(agents) > 1:
        yield Finding(
            "duplicate-node-rank", hits[:4], [Who(node) for node in sorted(hosts)], words | {"node_rank": "0"}
        )
        return
    absent = [node for node in facts.nodes if node not in hosts]
    yield Finding("missing-rank-store-join", hits[:4], [Who(node) for node in absent] or speakers(facts, hits), words)


def _waited_for(facts: Facts, hits: list[Hit]) -> Iterator[Finding]:
    """Gloo's keys of the default group end in the rank waited for; else it is who does not wait with the others."""
    waiting = {h.rank for h in hits if h.rank is not None}
    ranks = {int(m[1]) for h in hits if (m := _GLOO_RANK.search(h.groups["keys"]))} - waiting
    if not ranks and facts.world and facts.world <= 100_000:
        ranks = set(range(facts.world)) - waiting
    missing = [rank_who(facts, rank) for rank in sorted(ranks)][:8]
    words = {"missing": ", ".join(f"rank {w.rank}" for w in missing)} if missing else {}
    yield Finding("missing-rank-store-barrier", hits[:6], missing or speakers(facts, hits), words)


def world_sizes(facts: Facts) -> Iterator[Finding]:
    hits = [
        h for h in facts.all("world-size-differs") if plausible_world(h.groups["a"]) and plausible_world(h.groups["b"])
    ]
    if hits:
        words = {"sizes": f"{hits[0].groups['a']} and {hits[0].groups['b']}"}
        yield Finding("world-size-mismatch", hits[:4], speakers(facts, hits), words)
