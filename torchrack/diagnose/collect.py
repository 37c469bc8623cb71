"""Reads sources once, line by line, into Facts. Memory is bounded by what is kept, never by the size of the logs."""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

from torchrack.diagnose.facts import Exit, Facts, Hit, Log
from torchrack.diagnose.lines import Line, clean, parse, relay, service_name, time_of
from torchrack.diagnose.metadata import read_metadata
from torchrack.diagnose.naming import attempt_in_path, name_nodes, node_in_path
from torchrack.diagnose.rules import Pattern, Rule, compile_rules, patterns
from torchrack.diagnose.shapes import Shapes, Sorted, last_of_each_shape, lines_and_shapes, shape_of
from torchrack.diagnose.sources import LINE_LIMIT, Source
from torchrack.diagnose.tracebacks import Trace, TracebackReader

HITS_KEPT = 20_000  # of one rule: 1,024 ranks with twenty different texts each
TEXT_KEPT = 600
PER_RANK = {
    "cause": 3,
    "failure": 48,
    "symptom": 2,
    "fact": 48,
    "noise": 1,
    "unexplained": 3,
}  # hits of a rule kept a rank and source
TELLS_NO_ERROR = ("fact", "sign")  # a line may hold a fact and still report an error that no rule knows
TAIL = 60
LOOKED_AT = 200  # so many first lines are looked at whatever they say: they tell ranks, hosts and the start
DULL = 200  # lines of one shape in a row that told nothing new; later ones are passed over
SHAPES_COUNTED = 10_000
RELAYED = 4096  # nodes told apart in one file


class SourceReader:
    """Reads one source, or what one node says in a source that relays several, into the facts."""

    def __init__(self, facts: Facts, shapes: Shapes, name: str, node: str | None = None) -> None:
        self.facts, self.shapes = facts, shapes
        self.key = f"{name}@{node}" if node else name
        self.log = facts.logs.setdefault(self.key, Log(self.key, name, node=node or node_in_path(name)))
        self.tracebacks = TracebackReader(self.key)
        self.tail: deque[tuple[int, str]] = deque(maxlen=TAIL)
        self.counts: dict[tuple[str, int | None, str | None], int] = {}
        self.said: set[int] = set()  # facts kept already: the same words of the same rank tell nothing new
        self.signs: dict[tuple[str, int | None, str | None], Hit] = {}
        self.latest: tuple[str, int, tuple[Pattern, ...]] | None = None
        self.unstamped: list[Hit | Trace] = []
        self.failed: dict[str | None, int] = {}
        self.attempt = attempt_in_path(name)
        self.summary: dict[str, str] = {}
        self.kept = 0
        self.dull: dict[bytes, int] = {}

    def read(self, blocks: Iterable[bytes]) -> None:
        known, sort, tracebacks = self.shapes.known, self.shapes.sort, self.tracebacks.open
        number = 0
        for block in blocks:
            if number > LOOKED_AT and not tracebacks and (skimmed := self._skim(block, number)):
                number += skimmed
                continue
            texts, shapes = lines_and_shapes(block)
            for text, shape in zip(texts, shapes, strict=True):
                number += 1
                found = known.get(shape) or sort(shape)
                if found.look or tracebacks or number <= LOOKED_AT:
                    self._look(text, shape, number, found)
            first = number - len(texts) + 1
            self.tail.extend(list(enumerate(texts, first))[-TAIL:])
        self.log.lines = number
        self.finish()

    def _skim(self, block: bytes, number: int) -> int:
        """The lines of a block that has nothing to be looked at but the last sign of work; 0: read it line by line.

        Most blocks of a long log are such, and no line of them has to become a Python object of its own for that.
        """
        lines = block.split(b"\n")
        if b"\x1b" in block or b"\r" in block or max(map(len, lines)) > LINE_LIMIT:
            return 0
        last = last_of_each_shape(block)
        found = {at: self.shapes.known.get(shape) for shape, at in last.items()}
        if not all(each and (each.last or not each.look) for each in found.values()):
            return 0
        if signs := [at for at, each in found.items() if each and each.look]:
            at = max(signs)
            each = found[at]
            self.latest = (lines[at].decode("utf-8", "replace"), number + at + 1, each.patterns if each else ())
        ends = [line.decode("utf-8", "replace") for line in lines[-TAIL:]]
        self.tail.extend(enumerate(ends, number + len(lines) - len(ends) + 1))
        return len(lines)

    def line(self, text: str, number: int) -> None:
        """Take one cleaned line of a source that relays several nodes."""
        self.log.lines += 1
        self.tail.append((number, text))
        shape = shape_of(text)
        found = self.shapes.known.get(shape) or self.shapes.sort(shape)
        if found.look or self.tracebacks.open or self.log.lines <= LOOKED_AT:
            self._look(text, shape, number, found)

    def _look(self, text: str, shape: bytes, number: int, found: Sorted) -> None:
        """Take the line, unless lines of its shape have long told nothing new."""
        if self.tracebacks.open or not found.look or number <= LOOKED_AT:
            self._take(text, number, found.patterns)
        elif found.last:
            self.latest = (text, number, found.patterns)
        elif (times := self.dull.get(shape, 0)) < DULL:
            news = self._take(text, number, found.patterns)
            if news or len(self.dull) < SHAPES_COUNTED:
                self.dull[shape] = 0 if news else times + 1

    def _take(self, text: str, number: int, found: tuple[Pattern, ...]) -> bool:
        """Look at a line closely; true if it told anything new."""
        known = self.kept
        if text.startswith("#"):
            read_metadata(self.facts, self.log, text, number)
        line = parse(text)
        self._note_speaker(line)
        matched = self._match(line, number, found, text)
        if trace := self.tracebacks.feed(line, number):
            trace.attempt, trace.at = self.attempt, line.at
            trace.explained = any(rule.role not in ("sign", "noise") for rule in matched.values())
            if trace.at is None:
                self.unstamped.append(trace)
            if len(self.facts.traces) < HITS_KEPT:
                self.facts.traces.append(trace)
        return self.kept > known or bool(self.tracebacks.open)

    def _note_speaker(self, line: Line) -> None:
        if line.node:
            self.log.hosts[line.node] += 1
        if line.at is not None:
            self._stamp(line.at)
        if line.rank is None and self.log.rank is not None and not self.log.agent:
            line.rank = self.log.rank
        node = self.log.node or line.node
        if line.rank is not None and node:
            self.facts.rank_node.setdefault(line.rank, node)

    def _stamp(self, at: float) -> None:
        """Give lines without a stamp that of the next with one, unless there the clock went back (files joined)."""
        log = self.log
        log.first_at = at if log.first_at is None else log.first_at
        for waiting in self.unstamped:
            waiting.at = at if log.last_at is None or at >= log.last_at - 1 else log.last_at
        self.unstamped.clear()
        log.last_at = at

    def _match(self, line: Line, number: int, found: tuple[Pattern, ...], whole: str) -> dict[str, Rule]:
        matched: dict[str, Rule] = {}
        quoted = bool(self.tracebacks.open) and line.text.startswith("    ")
        for pattern in found:
            rule = pattern.rule
            if (quoted and not rule.code) or rule.id in matched:
                continue
            last = rule.role == "unexplained"
            if last and (self.tracebacks.open or any(r.role not in TELLS_NO_ERROR for r in matched.values())):
                break
            if match := pattern.regex.search(whole if last else line.text):
                matched[rule.id] = rule
                self._hit(rule, match, line, number)
                if rule.role == "noise":
                    break
        return matched

    def _hit(self, rule: Rule, match: re.Match[str], line: Line, number: int) -> None:
        groups = {name: value.strip() for name, value in match.groupdict().items() if value}
        rank = int(groups["rank"]) if groups.get("rank", "").isdecimal() else line.rank
        node = groups.get("node") or line.node
        text = line.text.strip()[:TEXT_KEPT]
        hit = Hit(rule, self.key, number, text, groups, node, rank, line.pid, line.at, self.attempt)
        self._structure(hit)
        if self._worth_keeping(hit):
            self.facts.hits[rule.id].append(hit)
            self.kept += 1
            if hit.at is None:
                self.unstamped.append(hit)

    def _worth_keeping(self, hit: Hit) -> bool:
        rule, key = hit.rule, (hit.rule.id, hit.rank, hit.node)
        if rule.role == "sign" and not rule.keep_all:
            self.signs[key] = hit  # of signs the last one counts
            return False
        if rule.role in ("fact", "failure") and hit.groups:
            said = hash((key, hit.attempt, *hit.groups.values()))
            if said in self.said:
                return False
            self.said.add(said)
        self.counts[key] = count = self.counts.get(key, 0) + 1
        return count <= PER_RANK.get(rule.role, 48) and len(self.facts.hits[rule.id]) < HITS_KEPT

    def _structure(self, hit: Hit) -> None:
        """What a launcher tells in several lines: its restarts and how each rank ended."""
        match hit.rule.id:
            case "worker-failed":
                self.failed[hit.pid] = self.failed.get(hit.pid, 0) + 1
                self._exit(hit, None)
                self.attempt = max(self.attempt, *self.failed.values())
            case "summary-host" | "summary-rank":
                self.summary |= hit.groups
            case "summary-exit":
                hit.node = hit.node or self.summary.get("host")
                rank = self.summary.get("rank")
                hit.attempt = max(0, self.attempt - 1)
                hit.at = hit.at or self.log.last_at
                self._exit(hit, int(rank) if rank else None)
            case "spawn-exit":
                self._exit(hit, None)
            case "spawn-error":
                self.tracebacks.spawned = hit.rank

    def _exit(self, hit: Hit, rank: int | None) -> None:
        local = hit.get("local_rank") or self.summary.get("local_rank")
        if rank is not None:
            hit.rank = rank
            if node := self.log.node or hit.node:
                self.facts.rank_node.setdefault(rank, node)
        code = hit.get("code") or -getattr(signal, hit.groups["signal"], 0)
        if len(self.facts.exits) < HITS_KEPT:
            self.facts.exits.append(Exit(hit, int(code), rank, int(local) if local else None))

    def finish(self) -> None:
        """Settle what only the end of the source tells."""
        if self.latest:
            self._take(*self.latest)
        stamps = (time_of(text) for _, text in reversed(self.tail))
        self.log.last_at = next((at for at in stamps if at is not None), self.log.last_at)
        for number, text in reversed(self.tail):
            if text.strip() and not text.startswith("#"):
                self.log.last_line, self.log.last_text = number, text[:TEXT_KEPT]
                break
        for waiting in self.unstamped:
            waiting.at = self.log.last_at
        for (rule, _, _), hit in self.signs.items():
            self.facts.hits[rule].append(hit)


def read_source(facts: Facts, shapes: Shapes, source: Source) -> None:
    """Read one source; one in which several nodes speak is read as one log for each."""
    blocks = source.blocks()
    first = next(blocks, b"")
    head = first[:65536].decode("utf-8", "replace").split("\n")[:LOOKED_AT]
    if prefix := relay(head):
        read_relayed(facts, shapes, source.name, chain([first], blocks), prefix)
    else:
        SourceReader(facts, shapes, source.name).read(chain([first], blocks) if first else ())


def read_relayed(facts: Facts, shapes: Shapes, name: str, blocks: Iterable[bytes], prefix: re.Pattern[str]) -> None:
    """Each node's lines go to a reader of its own; they keep their numbers in the file."""
    readers: dict[str | None, SourceReader] = {}
    for number, text in enumerate(_texts(blocks), 1):
        match = prefix.match(text)
        node = service_name(match["node"]) if match else None
        if node not in readers and len(readers) >= RELAYED:
            node = None
        if node not in readers:
            readers[node] = SourceReader(facts, shapes, name, node)
        readers[node].line(text[match.end() :] if match and node else text, number)
    for reader in readers.values():
        reader.finish()


def _texts(blocks: Iterable[bytes]) -> Iterator[str]:
    for block in blocks:
        yield from map(clean, block.decode("utf-8", "replace").split("\n"))


def collect(sources: Iterable[Source], chosen: tuple[Rule, ...] | None = None) -> Facts:
    """Read all sources, with all rules unless some are chosen, and settle who is who."""
    facts, shapes = Facts(), Shapes(patterns() if chosen is None else compile_rules(chosen))
    for source in sources:
        read_source(facts, shapes, source)
    name_nodes(facts)
    _settle(facts)
    return facts


def _settle(facts: Facts) -> None:
    for name in ("world-size", "nccl-rank", "store-barrier", "clients-missing"):
        for hit in facts.hits.get(name, ()):
            if (world := hit.get("world")) and len(world) < 8 and int(world) > 1:
                facts.worlds[int(world)] += 1
    failures: dict[tuple[str, str | None], list[Hit]] = {}
    for hit in facts.hits.get("worker-failed", []):
        failures.setdefault((hit.source, hit.pid), []).append(hit)
    again = any(len(hits) > 1 for hits in failures.values())
    facts.restarted = again or bool(facts.hits.get("will-restart")) or any(attempt_in_path(k) for k in facts.logs)
    stamps = [hit.at for hits in failures.values() for hit in hits if hit.at is not None]
    facts.restart_at = min(stamps, default=None)
