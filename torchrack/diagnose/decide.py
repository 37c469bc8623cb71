"""From findings to one answer: causes over symptoms, the first failure over the last, and nothing from noise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torchrack.diagnose import (
    derive_autopsy,
    derive_collective,
    derive_network,
    derive_ranks,
    derive_rdma,
    derive_rendezvous,
    derive_timeout,
)
from torchrack.diagnose.answer import Diagnosis, Evidence, Other
from torchrack.diagnose.collect import collect
from torchrack.diagnose.facts import Facts, Hit
from torchrack.diagnose.findings import EVIDENCE_SHOWN, Finding, Who, direct
from torchrack.diagnose.rules import kinds
from torchrack.diagnose.sources import Source, open_sources

DERIVATIONS = (
    derive_ranks,
    derive_network,
    derive_rdma,
    derive_collective,
    derive_rendezvous,
    derive_timeout,
    derive_autopsy,
)
MACHINE, SETUP, PERFORMANCE = 13, 39, 80  # depths: of the machine; of coming together and later; of mere slowness
OTHERS_SHOWN = 24
MORE_LOGS = (
    "Add the logs of all ranks and nodes (torchrun --log-dir DIR -r 3), and run with NCCL_DEBUG=INFO "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL."
)


def diagnose(sources: Iterable[Source]) -> Diagnosis:
    """The one verdict that the logs of all ranks and nodes of a job allow."""
    facts = collect(sources)
    found = findings(facts)
    return fault(facts, found) if found else no_fault(facts)


def diagnose_folder(path: Path) -> Diagnosis:
    """As diagnose(), for a folder (recursively), a single file, or "-" for stdin. Raises NotFound."""
    return diagnose(open_sources(path))


def findings(facts: Facts) -> list[Finding]:
    """All findings, the nearest to the root first."""
    by_kind: dict[str, Finding] = {}
    for finding in direct(facts):
        by_kind[finding.kind] = finding
    for module in DERIVATIONS:
        for finding in module.findings(facts):
            by_kind[finding.kind] = finding if finding.kind not in by_kind else merged(by_kind[finding.kind], finding)
    found = [f for f in by_kind.values() if not overcome(facts, f)]
    if ended_well(facts):
        found = [f for f in found if f.depth <= MACHINE or f.depth >= PERFORMANCE]
    return sorted(found, key=lambda f: (f.depth, f.at is None, f.at or 0.0))


def overcome(facts: Facts, finding: Finding) -> bool:
    """A set-up that failed at first (a retry, a late peer) and then worked wherever it was reported."""
    return SETUP <= finding.depth < PERFORMANCE and bool(finding.hits) and all(facts.recovered(h) for h in finding.hits)


def merged(first: Finding, second: Finding) -> Finding:
    """The derived finding knows more; what only the direct one shows is kept as evidence."""
    lines = {(h.source, h.line) for h in second.hits}
    hits = [*second.hits, *(h for h in first.hits if (h.source, h.line) not in lines)]
    return Finding(second.kind, hits, second.who or first.who, first.words | second.words, second.at)


def ended_well(facts: Facts) -> bool:
    """Every launcher that tells its status ended with 0, or every node says that it is done and none raised.

    An agent whose trailer says 0 has made good what its ranks suffered before: it started them again.
    """
    agents = [log.ended for log in facts.logs.values() if log.agent]
    if len(agents) >= max(1, facts.nodes_wanted) and all(ended == 0 for ended in agents):
        return True
    statuses = [log.ended for log in facts.logs.values() if log.ended is not None] + list(facts.node_status.values())
    statuses += [int(h.groups["code"]) for h in facts.all("task-exit")]
    if statuses:
        return not any(statuses) and not any(e.code for e in facts.exits)
    if facts.exits or any(not facts.recovered(t) for t in facts.traces) or any(True for _ in facts.by_role("failure")):
        return False
    done = {facts.node_of(h) for h in facts.all("done")}
    return bool(done) and done >= set(facts.nodes)


def fault(facts: Facts, found: Sequence[Finding]) -> Diagnosis:
    best = found[0]
    return Diagnosis(
        verdict="fault",
        kind=best.kind,
        layer=best.entry.layer,
        culprits=tuple(best.who),
        evidence=tuple(evidence(facts, hit) for hit in distinct(best.hits)[:EVIDENCE_SHOWN]),
        why=best.say(best.entry.why),
        fix=best.say(best.entry.fix),
        lab=best.entry.lab,
        others=tuple(others(facts, best, found[1:])),
        lines=facts.lines,
    )


def no_fault(facts: Facts) -> Diagnosis:
    """Healthy needs a reason: work that went on or ended well, or harmless messages only."""
    trouble = [hit for hit in trouble_left(facts) if not facts.recovered(hit)]
    failed = bool(trouble) or any(log.ended for log in facts.logs.values())
    signs = [hit for role in ("sign", "noise") for hit in facts.by_role(role)]
    if ended_well(facts) or (not failed and (signs or facts.node_status)):
        entry = kinds()["no-fault"]
        shown = tuple(evidence(facts, h) for h in distinct(signs)[:EVIDENCE_SHOWN])
        return Diagnosis("healthy", entry.why[0], "no-fault", entry.layer, (), shown, entry.fix[0], lines=facts.lines)
    shown = tuple(evidence(facts, h) for h in distinct(trouble)[:EVIDENCE_SHOWN])
    return Diagnosis("unknown", _unknown(facts, failed), None, None, (), shown, MORE_LOGS, lines=facts.lines)


def _unknown(facts: Facts, failed: bool) -> str:
    if not failed:
        return "Nothing here is recognised as a job's log."
    peers = {facts.node_at(hit.get("address")) for hit in facts.peers_lost() if hit.get("address")}
    absent = sorted(peer for peer in peers if peer and peer not in facts.nodes)
    if absent:
        return f"Ranks lost their connection to {absent[0]}; why stands in that node's log, which is not here."
    return "Something failed, but nothing in these logs names a cause."


def trouble_left(facts: Facts) -> list[Hit]:
    """What went wrong without a known cause."""
    exits = [e.hit for e in facts.exits if e.code]
    exits += [h for h in facts.all("task-exit") if h.groups["code"] != "0"]
    traces = [derive_ranks.trace_hit(t) for t in facts.traces if not facts.recovered(t)]
    return [*facts.by_role("failure"), *exits, *traces, *facts.by_role("symptom"), *facts.by_role("unexplained")]


def others(facts: Facts, best: Finding, rest: Sequence[Finding]) -> list[Other]:
    """Weaker findings, then symptoms; each once for each rank."""
    used = {(h.source, h.line) for h in best.hits}
    found = [Other(f.kind, f.who[0] if f.who else Who(), evidence(facts, f.hits[0]), best.kind) for f in rest if f.hits]
    seen: set[tuple[str, Who]] = set()
    for hit in facts.by_role("symptom"):
        who = Who(facts.node_of(hit), hit.rank)
        if (hit.source, hit.line) not in used and (hit.rule.id, who) not in seen:
            seen.add((hit.rule.id, who))
            found.append(Other(hit.rule.id, who, evidence(facts, hit), best.kind))
    return found[:OTHERS_SHOWN]


def distinct(hits: Iterable[Hit]) -> list[Hit]:
    """Each line once; of lines with the same text the first, then the repetitions."""
    by_line = {(h.source, h.line): h for h in hits}
    texts: dict[str, Hit] = {}
    again = [h for h in by_line.values() if texts.setdefault(h.text, h) is not h]
    return [*texts.values(), *again]


def evidence(facts: Facts, hit: Hit) -> Evidence:
    log = facts.logs.get(hit.source)
    return Evidence(log.name if log else hit.source, hit.line, hit.text)
