"""The CLI's end of the supervisors: one process a node, their events in one queue, the lease that keeps them alive."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from torchrack.places.base import Place, Process

BEAT = 5.0  # seconds between lease bytes; the supervisor gives up after LEASE of silence
LEASE = 20.0
QUEUE_SIZE = 10_000  # events; a full queue stops the readers, then the pipes, then the ranks: nothing is dropped
ERR_LINES = 20

Event = dict[str, object]


class Supervised:
    """One node's supervisor: its events, its control line, its last words on stderr."""

    def __init__(self, node: str, process: Process, events: queue.Queue[tuple[str, Event]]) -> None:
        self.node, self.process, self._events = node, process, events
        self.errors: list[str] = []
        self._send_lock = threading.Lock()
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._read_events, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def send(self, line: str) -> None:
        """One control line; a supervisor that is gone says so through its event stream instead."""
        with self._send_lock, suppress(OSError, ValueError):
            assert self.process.stdin
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """Let go of the supervisor: the end of its stdin ends the job if one still runs."""
        with self._send_lock, suppress(OSError, ValueError):
            assert self.process.stdin
            self.process.stdin.close()
        try:
            self.process.wait(timeout=6)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read_events(self) -> None:
        assert self.process.stdout
        for raw in self.process.stdout:
            try:
                event = json.loads(raw)
            except ValueError:
                self.errors.append(raw.decode(errors="backslashreplace").rstrip())
                continue
            self._events.put((self.node, event))
        self._events.put((self.node, {"event": "closed"}))

    def _read_errors(self) -> None:
        assert self.process.stderr
        for raw in self.process.stderr:
            self.errors.append(raw.decode(errors="backslashreplace").rstrip())
            del self.errors[:-ERR_LINES]


class Team:
    """The supervisors of all nodes of one run. Use as a context manager: leaving it ends whatever still runs."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.members: dict[str, Supervised] = {}
        self._events: queue.Queue[tuple[str, Event]] = queue.Queue(QUEUE_SIZE)
        self._stop = threading.Event()

    def __enter__(self) -> Team:
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        drain = threading.Thread(target=self._drain, daemon=True)  # a reader that waits on a full queue must get on
        drain.start()
        closers = [threading.Thread(target=member.close) for member in self.members.values()]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()

    def start(self, node: str, spec: Mapping[str, object]) -> None:
        """Start a node's supervisor, once more if need be, and give it its spec; it answers `ready` or `refused`."""
        if node in self.members:
            self.members[node].close()
        argv = [self.place.python(node), "-I", "-S", f"{self.place.home(node)}/scripts/supervisor.py"]
        self.members[node] = Supervised(node, self.place.spawn(node, argv), self._events)
        self.members[node].send(json.dumps(spec))

    def send_all(self, line: str, but: frozenset[str] = frozenset()) -> None:
        for node, member in self.members.items():
            if node not in but:
                member.send(line)

    def events(self, until: float) -> Iterator[tuple[str, Event]]:
        """Events of all nodes as they come, to the monotonic time `until`."""
        while (left := until - time.monotonic()) > 0:
            try:
                yield self._events.get(timeout=min(left, 0.5))
            except queue.Empty:
                yield "", {"event": "tick"}

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            self.send_all("beat")

    def _drain(self) -> None:
        while any(thread.is_alive() for member in self.members.values() for thread in member._threads):
            with suppress(queue.Empty):
                self._events.get(timeout=0.1)
