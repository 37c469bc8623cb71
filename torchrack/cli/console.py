"""Where progress goes: phases with their times on stderr, ranks' lines on stdout (stderr under --json)."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console as Rich
from rich.status import Status
from rich.text import Text

from torchrack.run.phases import Progress

PHASE_WIDTH = 8


class PlainConsole:
    """One plain line a phase, printed when it is over: for logs, pipes and CI."""

    def __init__(self, lines_to: TextIO) -> None:
        self.lines_to = lines_to
        self.last = ""

    def begin(self, phase: str) -> None:
        pass

    def stop(self) -> None:
        pass

    def update(self, text: str) -> None:
        self.note(f"  · {text}")

    def end(self, phase: str, text: str, seconds: float, ok: bool) -> None:
        self.note(f"{'✓' if ok else '✗'} {phase:<{PHASE_WIDTH}} {text:<60} {seconds:.1f} s")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        self.note(f"! {text}")

    def line(self, prefix: str, text: str) -> None:
        print(f"{prefix:<10} {text}", file=self.lines_to, flush=True)


class LiveConsole:
    """A terminal: the running phase turns, finished ones stay. Colour never carries meaning alone."""

    def __init__(self) -> None:
        self.rich = Rich(stderr=True, highlight=False)
        self.phase = ""
        self.status: Status | None = None

    def begin(self, phase: str) -> None:
        self.stop()
        self.phase = phase
        self.status = self.rich.status(Text(phase))
        self.status.start()

    def update(self, text: str) -> None:
        if self.status:
            self.status.update(Text(f"{self.phase:<{PHASE_WIDTH}} {text}"))

    def end(self, phase: str, text: str, seconds: float, ok: bool) -> None:
        self.stop()
        mark = ("✓", "green") if ok else ("✗", "red")
        line = Text.assemble(mark, f" {phase:<{PHASE_WIDTH}} {text:<60} ", (f"{seconds:.1f} s", "dim"))
        self.rich.print(line, soft_wrap=True)

    def note(self, text: str) -> None:
        self.rich.print(Text(text), soft_wrap=True)

    def warn(self, text: str) -> None:
        self.rich.print(Text.assemble(("! ", "yellow"), text))

    def line(self, prefix: str, text: str) -> None:
        said = Text.from_ansi(text)  # a rank's own colours stay, what else it sends to a terminal does not
        if prefix.endswith("/agent"):
            said.stylize("dim")
        self.rich.print(Text.assemble((f"{prefix:<10} ", "cyan"), said), soft_wrap=True)

    def stop(self) -> None:
        if self.status:
            self.status.stop()
            self.status = None


def progress(json: bool = False) -> Progress:
    """Progress on a live console if both streams are a terminal, else on a plain one."""
    if sys.stdout.isatty() and sys.stderr.isatty() and not json:
        return Progress(LiveConsole())
    return Progress(PlainConsole(sys.stderr if json else sys.stdout))
