"""What all places share that can start a command on a node: commands run to their end, and facts."""

from __future__ import annotations

import ast
import shlex
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torchrack.model.errors import CommandFailed, TimedOut, TorchrackError
from torchrack.model.health import Report
from torchrack.model.rack import NodeFacts
from torchrack.places.base import NodeState, Output, Process

FACTS_SCRIPT = Path(__file__).parents[1] / "node" / "facts.py"
T = TypeVar("T")
THREADS = 64
LATE = 2.0  # seconds that a command's client gets to end once `timeout` has killed the command


class SpawnPlace(ABC):
    """A place by its state folder; subclasses say how a command is started on a node."""

    kind: ClassVar[str]
    inherit_fds: tuple[int, ...] = ()
    late: ClassVar[float] = LATE

    def __init__(self, name: str, state: Path) -> None:
        self.name, self.state = name, state.resolve()

    @abstractmethod
    def nodes(self) -> tuple[NodeState, ...]: ...

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(state.node for state in self.nodes())

    @abstractmethod
    def home(self, node: str) -> str: ...

    @abstractmethod
    def python(self, node: str) -> str: ...

    @abstractmethod
    def spawn(self, node: str, argv: Sequence[str], *, root: bool = False) -> Process: ...

    def run(
        self, node: str, argv: Sequence[str], *, root: bool = False, stdin: bytes = b"", timeout: float = 30
    ) -> Output:
        # `timeout` runs on the node: killing the client from here would leave the command alive in there.
        began = time.monotonic()
        process = self.spawn(node, ["timeout", "--signal=KILL", f"{timeout:g}", *argv], root=root)
        try:
            stdout, stderr = process.communicate(stdin, timeout + self.late)
        except subprocess.TimeoutExpired as expired:
            raise self._timed_out(node, argv, timeout, (expired.stdout or b"") + (expired.stderr or b"")) from None
        finally:
            _release(process)
        code = process.wait()
        if code in (-9, 137) and time.monotonic() - began >= timeout:
            raise self._timed_out(node, argv, timeout, stdout + stderr)
        return Output(code, stdout, stderr)

    def work(self, node: str, source: str) -> Process:
        return self.spawn(node, [self.python(node), "-I", "-S", "-c", source])

    def worked(self, node: str, process: Process) -> None:
        with process:  # closes its streams, last of all
            assert process.stdin
            try:
                process.stdin.close()
                process.wait(self.late)
            except (OSError, subprocess.TimeoutExpired):
                process.kill()

    def each(self, act: Callable[[str], T]) -> dict[str, T | TorchrackError]:
        """`act` on every node at once; an error of ours is that node's answer, so that one host hides no other."""

        def safely(node: str) -> T | TorchrackError:
            try:
                return act(node)
            except TorchrackError as error:
                return error

        with ThreadPoolExecutor(min(THREADS, len(self.node_names) or 1)) as pool:
            try:
                return dict(zip(self.node_names, pool.map(safely, self.node_names), strict=True))
            except BaseException:
                self.close()  # leaving the block waits for all: a Ctrl-C would wait for gigabytes on their way
                raise

    def close(self) -> None:  # noqa: B027  most places have none
        """Hang up on the nodes, where commands go through a connection."""

    def report(self, node: str) -> Report:
        """Facts and health; nothing is changed."""
        asked = time.time()
        command = [self.python(node), "-I", "-S", "-", "--health", self.home(node), self.name, node]
        output = self.run(node, command, stdin=FACTS_SCRIPT.read_bytes(), timeout=60)
        if output.code:
            raise not_reported(node, output.code, (output.stdout + output.stderr).decode(errors="replace"))
        return reported(node, node, ast.literal_eval(output.stdout.decode()), asked)

    def facts(self) -> tuple[NodeFacts, ...]:
        with ThreadPoolExecutor(max_workers=8) as pool:
            nodes = [state.node for state in self.nodes() if state.state == "up"]
            return tuple(pool.map(self._facts, nodes, [len(nodes)] * len(nodes)))

    def _facts(self, node: str, shared_by: int) -> NodeFacts:
        command = [self.python(node), "-I", "-S", "-"]
        output = self.run(node, command, stdin=FACTS_SCRIPT.read_bytes())
        if output.code:
            text = (output.stdout + output.stderr).decode(errors="replace")
            raise CommandFailed(
                [f"{node}:", *command], output.code, text, f"make down RACK={self.name}, then try again"
            )
        return NodeFacts(node=node, shared_by=shared_by, **ast.literal_eval(output.stdout.decode()))

    def _timed_out(self, node: str, argv: Sequence[str], seconds: float, seen: bytes) -> TimedOut:
        tail = "".join(f"\n  | {line}" for line in seen.decode(errors="replace").splitlines()[-5:])
        message = f"{node}: {shlex.join(argv)} did not end within {seconds:g} s and was killed{tail}"
        return TimedOut(message, f"make status RACK={self.name} shows whether {node} still answers")


def reported(node: str, host: str, said: Mapping[str, Any], asked: float) -> Report:
    """What facts.py said, with the times between which it was on its way."""
    health = said["health"] | {"asked": asked, "answered": time.time(), "host": host}
    return Report.model_validate({**said, "node": node, "health": health})


def not_reported(node: str, code: int, text: str) -> CommandFailed:
    return CommandFailed([f"{node}:", "python3"], code, text, "torchrack_python in the inventory names one that works")


def _release(process: Process) -> None:
    """End the client and close its pipes, without waiting for whoever else may hold them."""
    if process.poll() is None:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            stream.close()
