"""Rented machines behind ssh: nothing is brought up there, and nothing of ours is outside one folder a node.

HOST:<folder>/<rack>/<node>/ holds the payload (constant and node files), `current`, `runs/` and the lock. The node's
name is part of it because home folders are often one network file system for all hosts.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import Field

from torchrack.model.errors import (
    CommandFailed,
    NotEnough,
    NotFound,
    NotPermitted,
    NotRunning,
    RackBusy,
    Remains,
    TorchrackError,
    Unreachable,
)
from torchrack.model.health import Report
from torchrack.model.hosts import Host
from torchrack.model.rack import Model, NodeFacts, Rack
from torchrack.places.base import NodeState, Output, Process, Step
from torchrack.places.local import writing
from torchrack.places.spawned import SpawnPlace, not_reported, reported
from torchrack.places.ssh_connect import Trust, connect
from torchrack.places.ssh_process import RemoteProcess
from torchrack.places.talk import NODE, block, lines, named, program, tell, words
from torchrack.plan.networks import placed
from torchrack.plan.render import sha256

if TYPE_CHECKING:
    from fabric import Connection

T = TypeVar("T")
WORKER = (NODE / "worker.py").read_text()
FACTS = (NODE / "facts.py").read_text()
RECEIVE = (NODE / "receive.py").read_text()
STOP = (NODE / "stop.py").read_bytes()
ASK_S = 60.0
# The first Python there is: the host's own choice alone if it has one, else the kit's, else the system's. The kit's in
# an image counts only while Docker has that image: else no deploy could put it right.
FIND_PYTHON = """
p=$1 f=$2; shift 2
case $p in "~/"*) p=$HOME/${p#"~/"};; esac
case $f in "~/"*) f=$HOME/${f#"~/"};; esac
b=$f/python/bin
if [ -z "$p" ] && [ -x "$b/python" ] && { ! [ -e "$b/usable" ] || "$b/usable"; }; then exec "$b/python" -I "$@"; fi
q=${p:-python3}
command -v "$q" >/dev/null 2>&1 && exec "$q" -I "$@"
echo "no ${p:-python3} there" >&2; exit 127
"""


class There(Model):
    """What a host said of itself when the rack was made on it; absolute paths."""

    home: str
    python: str


class State(Model):
    """hosts.json: node0 is the first host. Empty `there`: nothing was made yet."""

    hosts: tuple[Host, ...]
    there: dict[str, There] = Field(default_factory=dict)
    known_hosts: Path | None = None


class Ssh(SpawnPlace):
    kind: ClassVar[str] = "ssh"
    late: ClassVar[float] = 8.0

    def __init__(self, name: str, state: Path, hosts: Sequence[Host] = (), trust: Trust | None = None) -> None:
        super().__init__(name, state)
        recorded = self._read_state()
        self.recorded = recorded.hosts  # those that something was made on, if any
        self.hosts = tuple(hosts) or recorded.hosts
        self.trust = trust or Trust(known_hosts=recorded.known_hosts)
        self._there = dict(recorded.there) if self.hosts == recorded.hosts else {}
        self._connections: dict[str, Connection] = {}
        self._idle: dict[str, RemoteProcess] = {}  # workers that wait for a program
        self._locks = {node: threading.Lock() for node in self.node_names}

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"node{i}" for i in range(len(self.hosts)))

    def host(self, node: str) -> Host:
        if node not in self.node_names:
            raise NotFound(f"rack {self.name} has no {node}", f"make status RACK={self.name} lists its nodes")
        return self.hosts[self.node_names.index(node)]

    # Life

    def check(self) -> None:
        """Nothing is needed on this machine but Fabric, which came with torchrack."""

    def prepare(self, step: Step) -> None:
        """What nodes are made of is on the hosts."""

    def up(self, rack: Rack, step: Step) -> Rack:
        """Learn where the hosts keep things and make each node's folder; the rack gets the subnets they share."""
        if self._there and any(state.state == "up" for state in self.nodes()):
            raise RackBusy(f"rack {self.name} is on its hosts already", f"make down RACK={self.name}")
        reports = {node: _must(answer) for node, answer in self.each(self.report).items()}
        made, _ = placed(rack, self.hosts, tuple(reports.values()))
        self.settle(reports)
        step(f"{len(self.hosts)} hosts")
        return made

    def settle(self, reports: Mapping[str, Report]) -> None:
        """Make each node's folder where its report says; it may be there. On an error, none that is new stays."""
        before = self._there
        self.learn(reports)
        made = self.each(lambda node: self.shell(node, 'umask 077; mkdir -p -- "$1"', self.home(node)))
        for node, answer in made.items():
            if isinstance(answer, TorchrackError) or answer[0]:
                self.each(lambda node: self.shell(node, 'rmdir -- "$1"', self.home(node)))
                self._there = before
                raise answer if isinstance(answer, TorchrackError) else _not_made(node, answer[1])
        self.remember()

    def learn(self, reports: Mapping[str, Report]) -> None:
        """Where each node's folder is or would be; nothing is made, nothing remembered."""
        self._there = {
            node: There(home=f"{said.health.folder}/{self.name}/{node}", python=said.health.python)
            for node, said in reports.items()
        }

    def know(self) -> None:
        """Learn where things are, if no deploy from here has told."""
        if not self._there:
            self.learn({node: _must(answer) for node, answer in self.each(self.report).items()})

    @property
    def there(self) -> bool:
        """Whether it is known where things are on these hosts."""
        return bool(self._there)

    def facts(self) -> tuple[NodeFacts, ...]:
        reports = tuple(_must(answer) for answer in self.each(self.report).values())
        return placed(Rack(name=self.name, nodes=len(reports)), self.hosts, reports)[1]

    def nodes(self) -> tuple[NodeState, ...]:
        if not self._there:
            return ()
        answers = self.each(lambda node: self.shell(node, 'test -d "$1"', self.home(node))[0])
        return tuple(
            NodeState(node, "broken", answer.message) if isinstance(answer, TorchrackError) else NodeState(node, "up")
            for node, answer in answers.items()
            if answer != 1
        )

    def down(self) -> None:
        """End this rack's runs and remove its folders; Remains names the hosts that could not be asked."""
        if not self._there:
            return
        answers = self.each(self._remove)
        left = [f"{node} ({answer.message})" for node, answer in answers.items() if isinstance(answer, TorchrackError)]
        if left:
            gone = f"if such a machine is gone for good: rm {self._file}"
            raise Remains(left, f"make down RACK={self.name}; {gone}")
        self._there = {}
        self._file.unlink(missing_ok=True)
        self.close()

    def _remove(self, node: str) -> None:
        self.end_runs(node)
        with self.receiver(node, "remove") as process:
            said = self._heard(node, process)
        if "failed" in said and not said.get("missing"):
            raise Remains([f"{node}:{self.home(node)}"], said["failed"])
        # Empty folders above are ours too, if nobody else has put something there.
        self.shell(node, 'cd / && rmdir "$1" "$(dirname "$1")" 2>/dev/null', str(Path(self.home(node)).parent))

    def end_runs(self, node: str) -> list[str]:
        """End all that this rack runs on the node, whoever started it; returns the runs' ids. Raises Remains."""
        with self._command(node, self.python(node), "-I", "-", self.home(node)) as process:
            output = _answer(process, STOP)
        if output.code:
            text = (output.stdout + output.stderr).decode(errors="replace")
            raise CommandFailed([f"{node}:", "stop"], output.code, text)
        said = json.loads(output.stdout)
        if said["left"]:
            raise Remains([f"{node}: process {pid}" for pid in said["left"]], f"make stop RACK={self.name}")
        return list(said["ended"])

    # Where things are

    def home(self, node: str) -> str:
        return self._known(node).home

    def python(self, node: str) -> str:
        return self._known(node).python

    def _known(self, node: str) -> There:
        self.host(node)
        if node not in self._there:
            raise NotRunning(f"nothing is deployed on {node} of rack {self.name}", "make deploy HOSTS=…")
        return self._there[node]

    # Commands

    def spawn(self, node: str, argv: Sequence[str], *, root: bool = False) -> Process:
        if root:
            why = f"{node}: on a rented machine torchrack is nobody's root"
            raise NotPermitted(why, "make provision HOSTS=… does what needs it")
        there = self._known(node)
        # The tag by which stop and down find all that was started here, also after a crash of ours.
        clean = ["LANG=C.UTF-8", f"TORCHRACK_AT={there.home}", *argv]
        path = f'PATH={shlex.quote(str(Path(there.python).parent))}:"$PATH"'
        command = f"cd {shlex.quote(there.home)} && exec env {path} {shlex.join(clean)}"
        return RemoteProcess(self._transport(node), command)

    def shell(self, node: str, script: str, *args: str) -> tuple[int, str]:
        """A few words of sh with arguments, also before anything is deployed; returns status and stderr."""
        with self._command(node, "sh", "-c", script, "sh", *args) as process:
            output = _answer(process)
            return output.code, output.stderr.decode(errors="replace").strip()

    def work(self, node: str, source: str, *args: str, anew: bool = False) -> RemoteProcess:
        """In the worker that waits on the host, if any, else in a new one; `anew`: in a new one."""
        idle = self._idle.pop(node, None)
        if idle and (anew or idle.poll() is not None):
            idle.kill()
            idle = None
        if not idle:
            host = self.host(node)
            find = ("sh", "-c", FIND_PYTHON, "sh", host.python or "", host.folder, "-S", "-c", WORKER)
            idle = self._command(node, *find)
        tell(idle, program(source, *args))
        return idle

    def worked(self, node: str, process: Process) -> None:
        assert isinstance(process, RemoteProcess)
        self._idle[node] = process

    def system_python(self, node: str, source: str, *args: str) -> RemoteProcess:
        """The same by the host's own Python, never by one that the kit brought."""
        return self._command(node, "python3", "-I", "-S", "-c", source, *args)

    def _command(self, node: str, *argv: str) -> RemoteProcess:
        return RemoteProcess(self._transport(node), f"exec {shlex.join(argv)}")

    def report(self, node: str) -> Report:
        host = self.host(node)
        self._transport(node)  # connecting is not part of what the clock is compared with
        asked = time.time()
        process = self.work(node, FACTS, "--health", host.folder, self.name, node, anew=True)
        try:
            said = self._next(process)
            if said is None:
                raise not_reported(node, *process.end())
        except BaseException:
            process.kill()
            raise
        found = reported(node, str(host), said, asked)
        self.worked(node, process)
        return found

    def _next(self, process: RemoteProcess) -> dict[str, Any] | None:
        """The next line of a program, whatever it says; None: there is none."""
        process.bound(ASK_S)
        try:
            return next(lines(process), None)
        except TimeoutError:
            raise _silent() from None

    def _transport(self, node: str) -> Any:
        with self._locks[node] if node in self._locks else threading.Lock():
            connection = self._connections.get(node)
            if connection is None or not connection.is_connected:
                connection = connect(self.host(node), self.trust)
                self._connections[node] = connection
            return connection.transport

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # Files

    def put(self, node: str, files: Mapping[str, bytes]) -> None:
        with self.receiver(node, "put") as process:
            tell(process, [words(*named(sha256(files)))])
            said = self._heard(node, process)
            tell(process, (block(zlib.compress(files[path], 1)) for path in said.get("want", ())))
            said = self._heard(node, process) if "want" in said else said
        if "No space left" in said.get("failed", ""):
            raise NotEnough(f"{node}: {said['failed']}", f"free some there: df -h {self.home(node)}")
        if "done" not in said:
            raise NotPermitted(f"{node}: {said.get('refused') or said.get('failed')}", "make deploy HOSTS=…")

    def read(self, node: str, path: str) -> bytes:
        full = f"{self.home(node)}/{path}" if not path.startswith("/") else path
        output = self.run(node, ["sh", "-c", 'test -f "$1" || exit 44; exec cat -- "$1"', "sh", full], timeout=300)
        if output.code == 44:
            raise FileNotFoundError(f"{node} has no file {full}")
        if output.code:
            raise CommandFailed([f"{node}:", "cat", full], output.code, output.stderr.decode(errors="replace"))
        return output.stdout

    def receiver(self, node: str, mode: str) -> RemoteProcess:
        """receive.py at work on the node, to talk with."""
        return self.work(node, RECEIVE, mode, self.home(node))

    def _heard(self, node: str, process: RemoteProcess) -> dict[str, Any]:
        """The next line, whatever it says."""
        said = self._next(process)
        if said is None:
            raise CommandFailed([f"{node}:", "receive.py"], *process.end(), "the same command again")
        return said

    # State

    @property
    def _file(self) -> Path:
        return self.state / "hosts.json"

    def _read_state(self) -> State:
        try:
            return State.model_validate_json(self._file.read_text())
        except (FileNotFoundError, ValueError):
            return State(hosts=())

    def remember(self) -> None:
        with writing(self.state):
            self.state.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_suffix(".new")
            state = State(hosts=self.hosts, there=self._there, known_hosts=self.trust.known_hosts)
            draft.write_text(state.model_dump_json(indent=1))
            draft.replace(self._file)


def _answer(process: RemoteProcess, stdin: bytes = b"") -> Output:
    try:
        stdout, stderr = process.communicate(stdin, ASK_S)
        return Output(process.wait(), stdout, stderr)
    except subprocess.TimeoutExpired:
        raise _silent() from None


def _silent() -> Unreachable:
    return Unreachable(
        "reachable", f"no answer within {ASK_S:.0f} s", "is it up, and does its Python start? one that swaps looks so"
    )


def _must(answer: T | TorchrackError) -> T:
    if isinstance(answer, TorchrackError):
        raise answer
    return answer


def _not_made(node: str, said: str) -> Unreachable:
    return Unreachable(
        "folder", f"{node}: cannot make a folder: {said}", "torchrack_folder in the inventory names another"
    )
