"""Findings about single ranks and nodes: signals, exceptions, who left early, who fell silent."""

from __future__ import annotations

from collections.abc import Iterator

from torchrack.diagnose.facts import CLOSED, Exit, Facts, Hit
from torchrack.diagnose.findings import Finding, Who, rank_who, speakers
from torchrack.diagnose.rules import rule_named
from torchrack.diagnose.tracebacks import Trace

BY_STATUS = {"137": "rank-sigkilled", "139": "rank-segfault", "135": "shm-bus-error"}  # 128 + signal, as shells say it
SIGNALS = {-9: "rank-sigkilled", -11: "rank-segfault", -7: "shm-bus-error"}
OUTSIDE = {
    "15": "agent-sigterm",
    "SIGTERM": "agent-sigterm",
    "1": "sighup-terminal-closed",
    "SIGHUP": "sighup-terminal-closed",
}
OURS = {"deadline", "lease", "end", "grace"}  # trailer reasons that say torchrack itself ended the node's processes
# Raised by launchers and stores on behalf of others; a rank's own code does not raise them.
NOT_OWN = {
    "ChildFailedError", "SignalException", "RendezvousConnectionError", "RendezvousTimeoutError",
    "RendezvousClosedError", "RendezvousGracefulExitError", "RendezvousStateError", "RendezvousError",
    "DistNetworkError", "DistStoreError", "DistBackendError", "ProcessExitedException", "ProcessRaisedException",
    "CalledProcessError", "KeyboardInterrupt", "SystemExit", "BrokenPipeError", "ConnectionResetError",
    "ConnectionRefusedError", "ActorDiedError", "RayActorError",
}  # fmt: skip


def findings(facts: Facts) -> Iterator[Finding]:
    yield from signals(facts)
    yield from statuses(facts)
    yield from launcher_signals(facts)
    yield from imports(facts)
    yield from exceptions(facts)
    yield from silent(facts)


def signals(facts: Facts) -> Iterator[Finding]:
    """Ranks that died of SIGKILL, SIGSEGV or SIGBUS by their launcher's account."""
    for code, kind in SIGNALS.items():
        exits = [e for e in facts.exits if e.code == code and facts.first_attempt(e.hit)]
        if exits:
            named = [e for e in exits if e.rank is not None] or exits
            yield Finding(kind, [e.hit for e in named], sorted({_exit_who(facts, e) for e in named}, key=str))


def statuses(facts: Facts) -> Iterator[Finding]:
    """The same by a launcher that only tells the exit status of a task."""
    for status, kind in BY_STATUS.items():
        if hits := [h for h in facts.all("task-exit") if h.groups["code"] == status]:
            yield Finding(kind, hits, speakers(facts, hits))


def _exit_who(facts: Facts, end: Exit) -> Who:
    return rank_who(facts, end.rank, end.hit) if end.rank is not None else Who(facts.node_of(end.hit))


def launcher_signals(facts: Facts) -> Iterator[Finding]:
    """A launcher that was told to stop from outside before anything had failed there or elsewhere."""
    first_failure = min((e.hit.at for e in facts.exits if e.code != CLOSED and e.hit.at is not None), default=None)
    for kind in dict.fromkeys(OUTSIDE.values()):
        hits = [
            hit
            for hit in facts.all("agent-death-signal")
            if OUTSIDE.get(hit.groups["signal"]) == kind
            and facts.logs[hit.source].reason not in OURS
            and (first_failure is None or hit.at is None or hit.at <= first_failure + 0.5)
        ]
        if hits:
            yield Finding(kind, hits, speakers(facts, hits))
    stopped = facts.all("job-stopped-outside")
    if stopped and not facts.exits:
        yield Finding("agent-sigterm", stopped, speakers(facts, stopped))


def imports(facts: Facts) -> Iterator[Finding]:
    """An import that fails on every node that speaks is no difference between nodes but the job's own error."""
    hits = facts.all("import-error")
    failing = {facts.node_of(hit) for hit in hits}
    if hits and len(facts.nodes) > 1 and failing >= set(facts.nodes):
        yield Finding("app-exception", hits, speakers(facts, hits), {"exception": hits[0].text})


def exceptions(facts: Facts) -> Iterator[Finding]:
    """Exceptions of a rank's own code, which no rule explains."""
    own = [t for t in facts.traces if facts.first_attempt(t) and is_own(t) and not facts.recovered(t)]
    if facts.restarted:
        yield from _hidden_by_restart(facts, own)
    if own:
        first = min(own, key=lambda t: (t.at is None, t.at or 0.0))
        together = [t for t in own if t.name == first.name and t.message == first.message]
        yield _exception_finding(facts, "app-exception", first, together)


def is_own(trace: Trace) -> bool:
    return not trace.explained and not trace.chained and trace.name not in NOT_OWN


def _hidden_by_restart(facts: Facts, own: list[Trace]) -> Iterator[Finding]:
    """The exception of attempt 0, when a later attempt failed as well: also one that a rule knows (out of memory)."""
    later = [t for t in facts.traces if not facts.first_attempt(t)]
    oom = facts.all("torch-cuda-oom")
    own = own or [
        t for t in facts.traces if facts.first_attempt(t) and any((h.source, h.line) == (t.source, t.line) for h in oom)
    ]
    if own and later:
        first = min(own, key=lambda t: (t.at is None, t.at or 0.0))
        yield _exception_finding(facts, "app-exception-then-failed-restart", first, [first])


def _exception_finding(facts: Facts, kind: str, first: Trace, traces: list[Trace]) -> Finding:
    who = {Who(facts.node_of(t), t.rank) for t in traces}
    raised = f"{first.name}: {first.message}" if first.message else first.name
    words = {"exception": raised[:240]} | ({"place": first.place} if first.place else {})
    return Finding(kind, [trace_hit(t) for t in traces[:4]], sorted(who, key=str)[:8], words, first.at)


def trace_hit(trace: Trace) -> Hit:
    """The line on which a traceback ends, as evidence."""
    rule = rule_named("app-traceback")
    text = f"{trace.type}: {trace.message}" if trace.message else trace.type
    return Hit(rule, trace.source, trace.line, text, {}, trace.node, trace.rank, None, trace.at, trace.attempt)


def silent(facts: Facts) -> Iterator[Finding]:
    """Peers lost a connection and nobody says why: the one that says nothing left early, or its node is gone."""
    lost = facts.peers_lost()
    store = facts.all("store-lost", "store-connection-error")
    if not lost and not store:
        return
    gone = [n for n in facts.nodes if n not in facts.loud_nodes and not _ended_by_itself(facts, n)]
    if gone and len(gone) < len(facts.nodes):
        hosted = any(facts.node_of(hit) not in gone for hit in store)
        kind = "store-host-lost" if hosted else "node-lost"
        yield Finding(kind, [*_last_lines(facts, gone), *lost[:3], *store[:3]], [Who(node) for node in gone])
    elif lost and (early := _left_early(facts)):
        yield Finding("rank-exited-early", [*_parting(facts, early), *lost[:4]], early)


def _ended_by_itself(facts: Facts, node: str) -> bool:
    logs = [log for log in facts.logs.values() if log.node == node]
    if any(log.ended is not None or log.reason for log in logs) or node in facts.node_status:
        return True
    last = {(log.key, log.last_line) for log in logs}
    parting = facts.all("done", "leaving")
    return any((hit.source, hit.line) in last or facts.node_of(hit) == node for hit in parting)


def _last_lines(facts: Facts, nodes: list[str]) -> list[Hit]:
    rule = rule_named("progress")
    logs = [log for log in facts.logs.values() if log.node in nodes and log.last_line]
    return [Hit(rule, log.key, log.last_line, log.last_text, {}, log.node, None, None, log.last_at) for log in logs]


def _left_early(facts: Facts) -> list[Who]:
    """The ranks that failed in no way while others lost their connection to them, and whose launcher lived on."""
    world = facts.world or (max(facts.rank_node, default=-1) + 1)
    closed = {e.rank for e in facts.exits if e.code == CLOSED}  # alive until then
    quiet = sorted(set(range(world)) - facts.failed_ranks - closed) if world <= 100_000 else []
    parting = {hit.rank for hit in facts.all("leaving", "done") if hit.rank in quiet}
    alive = {facts.node_of(e.hit) for e in facts.exits} | {log.node for log in facts.logs.values() if log.reason}
    chosen = [rank for rank in quiet if rank in parting or facts.rank_node.get(rank, "") in alive]
    return [rank_who(facts, rank) for rank in chosen if not parting or rank in parting][:8]


def _parting(facts: Facts, early: list[Who]) -> list[Hit]:
    ranks = {w.rank for w in early}
    return [hit for hit in facts.all("leaving", "done") if hit.rank in ranks][:2]
