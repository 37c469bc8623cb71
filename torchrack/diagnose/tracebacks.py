"""Python tracebacks, also interleaved ones: who raised what, in which collective, at which line of the user's code."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchrack.diagnose.lines import Line

_FRAME = re.compile(r' {1,6}File "(?P<path>[^"]{1,400})", line (?P<line>\d+)(?:, in (?P<function>.{1,120}))?')
_RAISED = re.compile(
    r"(?P<type>(?:[A-Za-z_]\w{0,60}\.){0,12}[A-Z]\w{0,60}"
    r"(?:Error|Exception|Interrupt|Exit|Iteration|Failure|Failed|Timeout|Expired|Denied|NotFound|Closed|Empty))"
    r"(?:: ?(?P<message>.*))?$"
)
_NOT_MINE = re.compile(r"(?:site|dist)-packages/|/lib/python[\d.]+/|^<frozen|/bin/torchrun$|/torch/")
_IGNORED = ("Exception ignored in", "--- Logging error ---")  # Python reports these and goes on
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_OPS = {
    *("all_reduce", "broadcast", "reduce", "scatter", "gather", "barrier", "monitored_barrier", "send", "recv"),
    *("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all"),
    *("all_to_all_single", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("batch_isend_irecv", "new_group", "init_process_group"),
}
OPEN_LIMIT = 64  # tracebacks being read at once from one source; a real log has one a rank


@dataclass(slots=True)
class Trace:
    """`op`: the c10d function it was in; `place`: the last frame of the user's code; `chained`: another came first."""

    source: str
    first: int
    rank: int | None
    node: str | None
    chained: bool = False
    line: int = 0
    type: str = ""
    message: str = ""
    op: str | None = None
    place: str | None = None
    at: float | None = None
    attempt: int = 0
    explained: bool = False

    @property
    def name(self) -> str:
        return self.type.rsplit(".", 1)[-1]

    def frame(self, match: re.Match[str]) -> None:
        path, function = match["path"], match["function"] or ""
        if path.endswith("distributed_c10d.py") and self.op is None and function in _OPS:
            self.op = function
        if not _NOT_MINE.search(path):
            self.place = f"{path.rsplit('/', 1)[-1]}:{match['line']}"


class TracebackReader:
    """Reads the tracebacks of one source; `open` holds those that have begun and not ended."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.open: dict[tuple[int | None, str | None], Trace] = {}
        self._chained: set[tuple[int | None, str | None]] = set()
        self._ignored: set[tuple[int | None, str | None]] = set()
        self.spawned: int | None = None  # the process whose error mp.spawn is about to print

    def feed(self, line: Line, number: int) -> Trace | None:
        """Take a parsed line; returns the traceback that it ends, if any."""
        key = (line.rank, line.pid or line.node)
        text = line.text
        if "Traceback (most recent call last)" in text:
            if key in self._ignored:
                self._ignored.discard(key)
            elif len(self.open) < OPEN_LIMIT:
                rank = line.rank if line.rank is not None else self.spawned
                self.open[key] = Trace(self._source, number, rank, line.node, key in self._chained)
            self._chained.discard(key)
        elif text.startswith(_CHAINED):
            self._chained.add(key)
        elif text.startswith(_IGNORED):
            self._ignored.add(key)
        elif trace := self.open.get(key):
            return self._continue(key, trace, text, number)
        return None

    def _continue(self, key: tuple[int | None, str | None], trace: Trace, text: str, number: int) -> Trace | None:
        if frame := _FRAME.match(text):
            trace.frame(frame)
        elif text and not text[0].isspace() and (raised := _RAISED.match(text)):
            del self.open[key]
            trace.line, trace.type, trace.message = number, raised["type"], (raised["message"] or "")[:300]
            return trace
        elif number - trace.first > 2000:  # whatever it was, it was no traceback
            del self.open[key]
        return None
