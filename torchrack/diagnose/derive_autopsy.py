"""Findings from an autopsy: where each rank stood shortly before the deadline, from lines that the run's record holds.

# torchrack autopsy rank=3 state=S call=all_reduce place=train.py:41 line=dist.all_reduce(loss)

`call` is the outermost function of torch.distributed that the rank is in, `data-loader`, or none; `state` as in
/proc/PID/stat (T: stopped). Where the rank's flight recorder was asked, ` flight=all_reduce:41:doing` (or done) follows
`call`: its last collective and that one's number in the group.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torchrack.diagnose.facts import Facts, Hit, Log, Stand
from torchrack.diagnose.findings import CULPRITS_NAMED, Finding, listed, rank_who
from torchrack.diagnose.rules import rule_named

STOPPED = "tT"
OUTSIDE = {"none", "data-loader"}
_LINE = re.compile(
    r"# torchrack autopsy rank=(\d{1,7}) state=(\w) call=(\S{1,80})"
    r"(?: flight=\S{1,80}?:(\d{1,15}):(doing|done))? place=(\S{1,200}) line=(.*)"
)


def read_autopsy(facts: Facts, log: Log, text: str, number: int) -> None:
    if match := _LINE.match(text):
        rank, state, call, seq, done, place, line = match.groups()
        hit = Hit(rule_named("closing-workers"), log.key, number, text, {}, log.node, int(rank))
        number_of = int(seq) if seq else None
        facts.stands[int(rank)] = Stand(state, call, place, line.strip()[:100], hit, number_of, done == "done")


def findings(facts: Facts) -> Iterator[Finding]:
    stands = dict(sorted(facts.stands.items()))
    if len(stands) < 2:
        return
    stopped = [rank for rank, stand in stands.items() if stand.state in STOPPED]
    outside = [rank for rank, stand in stands.items() if stand.call in OUTSIDE]
    if stopped or 0 < len(outside) < len(stands):
        yield _finding(facts, "rank-stuck-outside-collective", stopped or outside)
    elif not outside:
        yield from _all_inside(facts, stands)


def _all_inside(facts: Facts, stands: dict[int, Stand]) -> Iterator[Finding]:
    calls = Counter(stand.call for stand in stands.values())
    places = Counter((stand.call, stand.place) for stand in stands.values())
    if len(calls) > 1:
        usual = next(s.call for s in stands.values() if calls[s.call] == max(calls.values()))
        yield _finding(facts, "collective-mismatch", [r for r, s in stands.items() if s.call != usual])
    elif len(seqs := {stand.seq for stand in stands.values()}) > 1 and None not in seqs:
        ahead = max(stand.seq or 0 for stand in stands.values())
        yield _finding(facts, "collective-desync", [r for r, s in stands.items() if s.seq != ahead])
    elif len(places) > 1:
        most = max(places.values())
        here = next((s.call, s.place) for s in stands.values() if places[s.call, s.place] == most)
        yield _finding(facts, "collective-desync", [r for r, s in stands.items() if (s.call, s.place) != here])


def _finding(facts: Facts, kind: str, ranks: list[int]) -> Finding:
    stands, who = facts.stands, [rank_who(facts, rank) for rank in ranks]
    others = [rank for rank in stands if rank not in ranks]
    told = "; ".join(f"{listed([w])} {_where(stands[r])}" for w, r in list(zip(who, ranks, strict=True))[:4])
    wait = Counter(f"{_call(stands[rank])} ({stands[rank].place})" for rank in others).most_common(1)
    waits = (
        f"; {'the others wait' if len(others) > 1 else listed([rank_who(facts, others[0])]) + ' waits'} in {wait[0][0]}"
    )
    hits = [stands[rank].hit for rank in (*ranks[:3], *others[:2])]
    return Finding(kind, hits, who[:CULPRITS_NAMED], {"autopsy": f"{told}{waits if others else ''}."})


def _where(stand: Stand) -> str:
    if stand.state in STOPPED:
        return f"is stopped (state {stand.state}: SIGSTOP, or a debugger)"
    where = f"{stand.place}: {stand.line}" if stand.line else stand.place
    if stand.call == "data-loader":
        return f"waits for its data loader ({where})"
    if stand.call in OUTSIDE:
        return f"is at {where}" + (f", after {stand.seq} collectives" if stand.seq and stand.done else "")
    return f"is in {_call(stand)} ({where})"


def _call(stand: Stand) -> str:
    """all_reduce, and its number in the group where that is known and it is this one."""
    return stand.call if stand.seq is None or stand.done else f"{stand.call} {stand.seq}"
