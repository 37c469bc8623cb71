"""The protocol that every place of nodes implements; one contract suite (tests/test_places_contract.py) runs on all.

A place is named by (rack name, state folder) alone, so that teardown works from a fresh process, after a crash, and
after the rack file changed. What belongs to a rack carries its name and state folder; only that is ever removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, Literal, Protocol, Self, TypeVar

from torchrack.model.errors import TorchrackError
from torchrack.model.health import Report
from torchrack.model.rack import NodeFacts, Rack

T = TypeVar("T")
Step = Callable[[str], None]
"""Called with one line of progress, e.g. "holder up" or "building image: step 4/9"."""


@dataclass(frozen=True)
class Output:
    """What a finished command on a node printed."""

    code: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True)
class NodeState:
    node: str
    state: Literal["up", "down", "broken"]
    detail: str = ""


class Process(Protocol):
    """A command on a node, with the part of subprocess.Popen that is used: on this machine it is one."""

    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    @property
    def stderr(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises subprocess.TimeoutExpired."""

    def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
        """As Popen's; raises subprocess.TimeoutExpired, with what was read until then."""

    def kill(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Place(Protocol):
    """Where nodes live. Paths given to put/read are relative to `home(node)` unless absolute."""

    kind: ClassVar[str]
    name: str
    state: Path
    inherit_fds: tuple[int, ...]
    """Descriptors of the rack's lock, for a child that makes things: it then holds the lock if the CLI is killed."""

    def check(self) -> None:
        """Raise a Lacking error unless this place can be used: present, running, permitted, recent enough."""

    def prepare(self, step: Step) -> None:
        """Make what nodes are made of (compose: the cpu image; netns: torch in this venv); skips what is there."""

    def up(self, rack: Rack, step: Step) -> Rack:
        """Bring all nodes up and return the rack with the subnets that were taken.

        All or nothing: on an error, everything this call made is removed again. Each node then has its hostname, two
        NICs, sized /dev/shm, shaped mgmt NIC, /etc/hosts with every node's mgmt address, and nsswitch `hosts: files`.
        """

    def nodes(self) -> tuple[NodeState, ...]:
        """The nodes that exist now, whoever started them and even after a crash; empty: none."""

    def facts(self) -> tuple[NodeFacts, ...]: ...

    def report(self, node: str) -> Report:
        """Facts and health of one node, in one command that changes nothing."""

    def each(self, act: Callable[[str], T]) -> dict[str, T | TorchrackError]:
        """`act` on every node at once; an error of ours is that node's answer, so that one hides no other."""

    def work(self, node: str, source: str) -> Process:
        """Start some lines of Python that need the standard library alone; on hosts also before a deploy."""

    def worked(self, node: str, process: Process) -> None:
        """Such lines are done, and what they had to say was read: let go of their process, or keep it for the next."""

    def home(self, node: str) -> str:
        """Absolute path, on the node, of the folder that put() fills and jobs may write to."""

    def python(self, node: str) -> str:
        """Absolute path, on the node, of the Python that has torch; torchrun lies beside it."""

    def put(self, node: str, files: Mapping[str, bytes]) -> None:
        """Write files (relative path to content), making folders; *.sh become executable, all readable by the job."""

    def read(self, node: str, path: str) -> bytes:
        """A file's content; raises FileNotFoundError."""

    def spawn(self, node: str, argv: Sequence[str], *, root: bool = False) -> Process:
        """Start a command on the node with pipes for its three streams, as the job's user or as the node's uid 0.

        A place where nobody is uid 0 (ssh) raises NotPermitted for `root`.

        The environment is the node's own (PATH, HOME, LANG): the caller's variables never leak in. If the caller dies,
        the command's stdin reaches its end.
        """

    def run(
        self, node: str, argv: Sequence[str], *, root: bool = False, stdin: bytes = b"", timeout: float = 30
    ) -> Output:
        """Run a command to its end; raises TimedOut past `timeout` seconds. A non-zero exit is returned, not raised."""

    def down(self) -> None:
        """Remove every node, network and process of this rack, however little is left of it; raises Remains.

        Idempotent: a rack that is not there is a success.
        """
