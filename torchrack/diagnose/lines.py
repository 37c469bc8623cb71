"""One line of a log: what its prefixes tell (node, rank, process, time) and the text that is left.

Prefixes of torchrun, glog, OpenMPI, Slurm, docker compose, pdsh, Ray, NCCL, syslog and dmesg are peeled off, in any
order.
"""

from __future__ import annotations

import calendar
import re
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_DAY = 86_400.0

_HOST = r"[A-Za-z0-9][\w.-]{0,62}"
_CLOCK = r"(?P<clock>\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)"
_NOT_NODES = (
    r"(?!(?:python|step|epoch|iter|rank|cuda|gpu|cpu|layer|batch|round|loss|lib|eth|ib|torch|nccl|test|line|v)[-\d.]*:)"
)
_PREFIXES = tuple(
    re.compile(p)
    for p in (
        r"\[rank ?(?P<rank>\d{1,6})\]: ?",
        r"\[default(?P<local_rank>\d{1,3})\]: ?",
        rf"\[[IWEF](?P<mmdd>\d{{3,4}}) {_CLOCK}\d* [^\]\s]{{1,80}}\] ?",
        r"\[[IWEF] [\w./-]{1,80}:\d+\] ?",
        rf"[IWEF](?P<mmdd>\d{{4}}) {_CLOCK}\d* +(?P<pid>\d+) [^\]\s]{{1,160}}\] ?",
        r"\[\d+,(?P<rank>\d{1,6})\](?:<std(?:out|err|diag)>)?: ?",
        r"(?P<node>[A-Za-z][\w.-]{0,60}\d[\w.-]{0,20})\s+\| ?",
        r"\((?:[\w.:-]{1,40} ){0,3}pid=(?P<pid>\d+)(?:, ip=(?P<ip>[\w.:]+))?\) ?",
        r"\(raylet(?:, ip=(?P<ip>[\w.:]+))?\) ?",
        r"\[(?P<rank>\d{1,6})\] (?=\S+:\d+:\d+ \[)",
        rf"[A-Z][a-z]{{2}} (?P<month>[A-Z][a-z]{{2}}) +(?P<day>\d{{1,2}}) {_CLOCK} \d{{4}}(?=\[)",
        rf"(?P<node>{_HOST}):(?P<pid>\d+):(?P<tid>\d+) \[-?\d+\] (?=\S)",
        r"\[\w{1,40}\.(?:py|cpp|cc):\d+\] ?",
        rf"\[(?P<node>{_HOST}):(?P<pid>\d{{1,8}})\](?: \[\d+\])? ?",
        rf"\[?(?P<date>\d{{4}}-\d\d-\d\d)[ T_]{_CLOCK}\d*(?:Z|[+-]\d\d:?\d\d)?\]?[ :]? ?(?:std(?:out|err) [FP] )?",
        rf"(?:INFO|WARNING|ERROR) (?P<mm_dd>\d\d-\d\d) {_CLOCK} ?",
        rf"(?P<month>[A-Z][a-z]{{2}}) +(?P<day>\d{{1,2}}) {_CLOCK} (?P<node>{_HOST}) ",
        rf"\[[A-Z][a-z]{{2}} (?P<month>[A-Z][a-z]{{2}}) +(?P<day>\d{{1,2}}) {_CLOCK} \d{{4}}\] ?",
        r"\[ *\d{1,9}\.\d{6}\] ",
        rf"pdsh@{_HOST}: ",
        rf"{_NOT_NODES}(?P<node>[a-z][a-z0-9.-]{{0,40}}\d[a-z0-9.-]{{0,20}}): (?=\S| +\d)",
        r"(?P<rank>\d{1,5}): (?=\S)",
    )
)
_MONTHS = {name: number for number, name in enumerate(calendar.month_abbr) if name}
_INNER_RANK = re.compile(
    r"\[(?:PG [^\]]{0,80}? )?Rank (?P<a>\d{1,6})\]|\bon rank:? (?P<b>\d{1,6})\b"
    r"|^\[rank[ :]?(?P<c>\d{1,6})\]|^rank (?P<d>\d{1,6}) of \d"
)
_INNER_TIME = re.compile(rf"(?P<date>\d{{4}}-\d\d-\d\d)[ T_]{_CLOCK}")
_COMPOSE_NAME = re.compile(r"(?:.*[-_])?(?P<service>[A-Za-z][A-Za-z0-9]*)[-_]\d+$")


@dataclass(slots=True)
class Line:
    """`at` is in seconds since the start of an unnamed year, so that stamps with and without a year compare."""

    text: str
    node: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    pid: str | None = None
    ip: str | None = None
    at: float | None = None


def clean(raw: str) -> str:
    """The line without its end, colours and carriage returns (of a progress bar, the last state is kept)."""
    text = raw.rstrip("\r\n")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return text.rsplit("\r", 1)[-1] if "\r" in text else text


def parse(text: str) -> Line:
    """Peel the prefixes off a cleaned line; a rank inside the text counts when no prefix names one."""
    line = Line(text)
    for _ in range(6):
        match = next((m for p in _PREFIXES if (m := p.match(line.text))), None)
        if match is None or not match.end():
            break
        _take(line, match)
        line.text = line.text[match.end() :]
    if line.rank is None and (inner := _INNER_RANK.search(line.text, 0, 400)):
        line.rank = int(inner[inner.lastgroup or 0])
    if line.at is None and (stamp := _INNER_TIME.search(line.text, 0, 200)):
        line.at = _seconds(stamp.groupdict())
    return line


def _take(line: Line, match: re.Match[str]) -> None:
    got = match.groupdict()
    if got.get("node") and line.node is None:
        line.node = service_name(got["node"])
    if got.get("rank") and line.rank is None:
        line.rank = int(got["rank"])
    if got.get("local_rank") and line.local_rank is None:
        line.local_rank = int(got["local_rank"])
    line.pid = line.pid or got.get("pid")
    line.ip = line.ip or got.get("ip")
    if line.at is None:
        line.at = _seconds(got)


_RELAYS = (
    re.compile(r"(?P<node>[A-Za-z][\w.-]{0,60}\d[\w.-]{0,20})\s+\| ?"),
    re.compile(rf"{_NOT_NODES}(?P<node>[a-z][a-z0-9.-]{{0,40}}\d[a-z0-9.-]{{0,20}}): ?"),
)


def relay(head: list[str]) -> re.Pattern[str] | None:
    """The prefix by which one file relays several nodes (docker compose, pdsh), judged by the file's first lines."""
    lines = [text for raw in head if (text := clean(raw)).strip() and not text.startswith("#")]
    for pattern in _RELAYS:
        names = [m["node"] for text in lines if (m := pattern.match(text))]
        if len(set(names)) > 1 and len(names) > len(lines) / 2:
            return pattern
    return None


def service_name(name: str) -> str:
    """The service of a compose container name: lab-node0-1 and node0_1 are both node0; other names stay."""
    match = _COMPOSE_NAME.match(name)
    return match["service"] if match and re.search(r"\d$", match["service"]) else name


def _seconds(got: dict[str, str | None]) -> float | None:
    clock = got.get("clock")
    if not clock:
        return None
    if mmdd := got.get("mmdd"):
        month, day = int(mmdd[:-2]), int(mmdd[-2:])
    elif date := got.get("date") or got.get("mm_dd"):
        month, day = (int(x) for x in date.split("-")[-2:])
    elif got.get("month"):
        month, day = _MONTHS.get(str(got["month"]), 1), int(str(got["day"]))
    else:
        month, day = 1, 1
    hours, minutes, seconds = clock.replace(",", ".").split(":")
    return (month * 31 + day) * _DAY + int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def time_of(text: str) -> float | None:
    """The time stamp of a line, if it has one."""
    return parse(clean(text)).at
