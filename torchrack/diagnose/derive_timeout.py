"""Findings about time-outs: who waited in which collective, and who did not come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torchrack.diagnose.facts import Facts, Hit
from torchrack.diagnose.findings import Finding, Who, rank_who
from torchrack.diagnose.rules import rule_named
from torchrack.diagnose.tracebacks import Trace

OURS = {"deadline"}
POINT_TO_POINT = {"send", "recv", "batch_isend_irecv"}  # these differ between ranks by nature


def findings(facts: Facts) -> Iterator[Finding]:
    yield from barriers(facts)
    yield from unique_ids(facts)
    yield from watchdogs(facts)
    yield from gloo(facts)
    yield from hang(facts)


def barriers(facts: Facts) -> Iterator[Finding]:
    hits = [h for h in facts.all("monitored-barrier") if h.get("missing")]
    ranks = sorted({int(r) for h in hits for r in h.groups["missing"].replace(" ", "").split(",")})
    if hits:
        yield Finding("rank-late-at-barrier", hits[:4], [rank_who(facts, rank) for rank in ranks][:8])


def unique_ids(facts: Facts) -> Iterator[Finding]:
    """NCCL's first collective waits for the id that the group's first rank publishes when it comes to it."""
    hits = facts.all("nccl-id-wait")
    ranks = sorted({int(h.groups["from"]) for h in hits} - {int(h.groups["rank"]) for h in hits})
    if ranks:
        words = {"op": "its first NCCL collective", "reporters": _ranks({h.rank or 0: None for h in hits})}
        yield Finding("rank-stuck-outside-collective", hits[:4], [rank_who(facts, rank) for rank in ranks][:8], words)


def watchdogs(facts: Facts) -> Iterator[Finding]:
    """NCCL's watchdogs: one sequence number and somebody missing, or several numbers."""
    hits = [h for h in facts.all("watchdog") if h.rank is not None]
    at = {h.rank: h.get("seq") for h in hits if h.rank is not None}
    absent = missing_ranks(facts, set(at)) if hits else []
    missing = [rank for rank in absent if rank not in facts.failed_ranks]
    if missing:
        yield _stuck(facts, hits, at, missing)
    elif hits and not absent:  # who did not come had failed: that failure is the cause, known or not
        yield from _all_came(facts, hits, at)


def _stuck(facts: Facts, hits: list[Hit], at: dict[int, str | None], missing: list[int]) -> Finding:
    words = {"op": _usual(h.groups["op"] for h in hits), "reporters": _ranks(at)}
    if numbers := [seq for seq in at.values() if seq]:
        words["seq"] = numbers[0]
    who = [rank_who(facts, rank) for rank in missing][:8]
    return Finding("rank-stuck-outside-collective", [*hits[:4], *facts.all("desync-report")[:2]], who, words)


def _all_came(facts: Facts, hits: list[Hit], at: dict[int, str | None]) -> Iterator[Finding]:
    """All wait: in different collectives, in the first one over a broken P2P, or in one that the path swallows."""
    numbers = Counter(seq for seq in at.values() if seq)
    desync = facts.all("desync-report")
    nodes = {facts.node_of(h) for h in hits}
    first = _first_collective(facts, hits)
    if len(numbers) > 1:
        yield _desync(facts, hits, at, numbers)
    elif desync:
        lagging = sorted({int(r) for h in desync for r in h.groups["ranks"].replace(" ", "").split(",") if r})
        yield Finding("collective-desync", [*desync[:4], *hits[:2]], [rank_who(facts, r) for r in lagging][:8])
    elif first and len(nodes) == 1 and (p2p := facts.all("nccl-via-p2p")):
        yield Finding("p2p-iommu-acs-hang", [*hits[:4], *p2p[:2]], [Who(node) for node in nodes])
    elif not first and len(nodes) > 1:
        words = {"op": _usual(h.groups["op"] for h in hits)}
        yield Finding("mtu-blackhole", hits[:6], [Who(n) for n in facts.nodes[:2]], words)


def _usual(values: Iterable[str]) -> str:
    return Counter(values).most_common(1)[0][0]


def _desync(facts: Facts, hits: list[Hit], at: dict[int, str | None], numbers: Counter[str]) -> Finding:
    """The rank or ranks at the rarer number; with equal camps those that are behind."""
    most = max(numbers.values())
    usual = max((seq for seq, n in numbers.items() if n == most), key=int)
    odd = sorted(rank for rank, seq in at.items() if seq != usual)
    words = {"seq": at[odd[0]] or "?", "others_seq": usual}
    evidence = [h for h in hits if h.rank in odd][:3] + [h for h in hits if h.rank not in odd][:2]
    return Finding("collective-desync", evidence, [rank_who(facts, r) for r in odd][:8], words)


def _first_collective(facts: Facts, hits: list[Hit]) -> bool:
    status = facts.all("watchdog-status")
    if status:
        return all(int(h.groups["completed"]) <= 0 for h in status)
    return all(h.get("seq") in ("0", "1") for h in hits)


def missing_ranks(facts: Facts, present: set[int]) -> list[int]:
    """The ranks of the job that are not among `present`; without a known world size, holes in the numbering."""
    size = facts.world or (max(present | set(facts.rank_node), default=-1) + 1)
    return sorted(set(range(size)) - present) if size <= 100_000 else []


def _ranks(ranks: dict[int, str | None]) -> str:
    names = sorted(ranks)
    if len(names) == 1:
        return f"Rank {names[0]}"
    return "Ranks " + ", ".join(map(str, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def gloo(facts: Facts) -> Iterator[Finding]:
    """Gloo's time-outs name nobody: compare who timed out, in which call, with who is silent."""
    hits = facts.all("gloo-timeout")
    late = _waiting(facts, hits)
    ranks = {h.rank for h in hits if h.rank is not None} | set(late)
    if not hits or not ranks or facts.has("monitored-barrier"):
        return
    op = next((t.op for t in late.values() if t.op), "a collective")
    silent = [rank for rank in missing_ranks(facts, ranks) if rank not in facts.failed_ranks]
    if silent:
        words = {"op": op, "reporters": _ranks(dict.fromkeys(ranks))}
        yield Finding("rank-stuck-outside-collective", hits[:4], [rank_who(facts, rank) for rank in silent][:8], words)
    else:
        yield from _all_waited(facts, hits, late, op)


def _all_waited(facts: Facts, hits: list[Hit], late: dict[int, Trace], op: str) -> Iterator[Finding]:
    """All ranks waited: in sends and receives only, in different operations, at different places, or in one that the
    path swallows."""
    if late and all(t.op in POINT_TO_POINT for t in late.values()):
        words = {"ops": ", ".join(f"rank {rank} in {t.op}" for rank, t in sorted(late.items())[:6])}
        yield Finding("point-to-point-deadlock", hits[:6], [], words)
        return
    ops = {rank: t.op for rank, t in sorted(late.items()) if t.op and t.op not in POINT_TO_POINT}
    places = {rank: t.place for rank, t in sorted(late.items()) if t.place}
    nodes = sorted({node for h in hits if (node := facts.node_of(h))})
    if len(set(ops.values())) > 1:
        words = {"ops": ", ".join(f"rank {rank} {o}" for rank, o in list(ops.items())[:6])}
        yield Finding("collective-mismatch", hits[:6], _odd(facts, ops), words)
    elif len(set(places.values())) > 1:
        odd = _odd(facts, places)
        words = {"op": op, "place": places[odd[0].rank or 0], "others_place": _usual(places.values())}
        yield Finding("collective-desync", hits[:6], odd, words)
    elif len(nodes) > 1 and places:
        yield Finding("mtu-blackhole", hits[:6], [Who(node) for node in nodes[:8]], {"op": op})


def _odd(facts: Facts, values: dict[int, str]) -> list[Who]:
    """The ranks that differ from most; of two equal camps those that differ from the lowest rank."""
    counts = Counter(values.values())
    usual = next(v for v in values.values() if counts[v] == max(counts.values()))
    return [rank_who(facts, rank) for rank, value in values.items() if value != usual][:8]


def _waiting(facts: Facts, hits: list[Hit]) -> dict[int, Trace]:
    """Who waited in which call: those that timed out, and those that lost a peer when the first of them gave up."""
    ends = {(h.source, h.line) for h in [*hits, *facts.peers_lost()]}
    return {
        t.rank: t for t in facts.traces if t.rank is not None and (t.source, t.line) in ends and facts.first_attempt(t)
    }


def hang(facts: Facts) -> Iterator[Finding]:
    """The deadline ended it. The trailer of our own record is the only witness."""
    rule = rule_named("closing-workers")
    ended = [log for log in facts.logs.values() if log.reason in OURS]
    hits = [Hit(rule, log.key, log.lines, f"# torchrack … reason={log.reason}", {}, log.node) for log in ended]
    if hits:
        yield Finding("hang", hits, [])
