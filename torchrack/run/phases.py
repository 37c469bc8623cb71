"""The phases of up and run, in order, and how progress is told. The crash tests kill the CLI in each of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol

CRASH_AT = "TORCHRACK_CRASH_AT"  # "joined" or "joined:0.3": kill -9 ourselves that many seconds into the phase (tests)


class Phase(StrEnum):
    CHECK = "runtime"
    PREPARE = "prepare"
    RACK = "rack"
    PLAN = "plan"
    SCRIPTS = "scripts"
    READY = "ready"
    JOINED = "joined"
    RUN = "run"
    COLLECT = "collect"
    RECORD = "record"
    GOLDEN = "golden"


class HostPhase(StrEnum):
    """What comes before a run on rented machines."""

    HOSTS = "hosts"
    CHECKS = "checks"
    NETWORK = "network"
    TORCH = "torch"
    PUSH = "push"
    STOP = "stop"
    GATHER = "gather"


class Console(Protocol):
    """Where progress goes; the CLI's prints on a terminal or plainly, tests' keeps it."""

    def begin(self, phase: str) -> None: ...
    def stop(self) -> None: ...
    def update(self, text: str) -> None: ...
    def end(self, phase: str, text: str, seconds: float, ok: bool) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def line(self, prefix: str, text: str) -> None: ...


class Said(list[str]):
    """What a phase has to say at its end; `ok` False marks one that ended without what it was for."""

    ok = True


class Progress:
    """Tells the phases to a console; one object per command."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def phase(self, phase: Phase | HostPhase) -> Iterator[Said]:
        """Time one phase; what the body appends to the list is said at its end. Nothing is said if it raises."""
        said = Said()
        start = time.monotonic()
        self.console.begin(phase.value)
        _maybe_crash(phase)
        try:
            yield said
        except BaseException:
            self.console.stop()  # nothing turns beside an error message
            raise
        self.console.end(phase.value, "  ".join(said), time.monotonic() - start, said.ok)


def _maybe_crash(phase: Phase | HostPhase) -> None:
    at, _, delay = os.environ.get(CRASH_AT, "").partition(":")
    if at == phase.value:
        timer = threading.Timer(float(delay or 0), os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        if not delay:
            timer.join()
