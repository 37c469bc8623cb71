"""The compose place: nodes are containers on Docker Engine, from a rendered compose file.

`docker compose up` makes them; all else goes by label, so that teardown needs no file and touches nobody else's things.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import tarfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import ClassVar

from torchrack.model.errors import Lacking, NameTaken, NotEnough, NotRunning, Remains
from torchrack.model.rack import NETS, Rack
from torchrack.places.base import NodeState, Step
from torchrack.places.compose_file import HOME, READY, UID, USER, compose_yaml, project
from torchrack.places.docker_sdk import APIClient
from torchrack.places.docker_sdk import NotFound as NoSuchPath
from torchrack.places.engine import (
    SubnetLost,
    Thing,
    complaint,
    connect,
    containers,
    networks,
    remove,
    subnets_in_use,
    talking,
)
from torchrack.places.image import engine_check, ensure_cpu_image
from torchrack.places.local import LocalPlace, wait_for, writing
from torchrack.places.subnets import candidates, of_host

RACK, NODE, STATE = "torchrack.rack", "torchrack.node", "torchrack.state"
PROJECT = "com.docker.compose.project"
UP_S, UP_NODE_S = 60, 5  # seconds that `docker compose up` may take, and for each node on top
END_S = 5  # seconds that an interrupted `docker compose up` gets to end by itself, then again after SIGTERM
READY_S = 30  # seconds that a started node gets to furnish itself
DOWN_S = 20  # seconds that remains get to go, after all were told to
TRIES = 8  # pairs of subnets, when other racks keep taking them first
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class Compose(LocalPlace):
    """Containers `torchrack-<rack>-node<i>-1` on two internal networks, labelled with their owner."""

    kind: ClassVar[str] = "compose"

    def __init__(self, name: str, state: Path) -> None:
        super().__init__(name, state)
        # Handed to `docker compose up` alone: held open (a lock, say) until it has ended, even if we are killed first.
        self.inherit_fds: tuple[int, ...] = ()
        self._image = ""
        self._labels = {RACK: name, STATE: str(self.state)}

    @cached_property
    def _api(self) -> APIClient:
        return connect()

    def check(self) -> None:
        engine_check()

    def prepare(self, step: Step) -> None:
        self._image = ensure_cpu_image(step)

    # Up

    def up(self, rack: Rack, step: Step) -> Rack:
        image = self._image or ensure_cpu_image(step)
        self._refuse_taken(rack)
        offers = candidates(rack, [*subnets_in_use(networks(self._api)), *of_host()])
        for _ in range(TRIES):
            chosen = next(offers)
            with suppress(SubnetLost):
                self._make(chosen, image, step)
                return chosen
        raise NotEnough(f"others took {TRIES} pairs of subnets just before this rack could", "try again")

    def _make(self, rack: Rack, image: str, step: Step) -> None:
        """All or nothing: _refuse_taken() saw to it that whatever is ours was made here."""
        try:
            self._compose_up(rack, image, step)
            step("names and shaping")
            self._await_ready(rack)
        except BaseException:
            self.down()
            raise

    def _refuse_taken(self, rack: Rack) -> None:
        """Raise NameTaken if anything there is this rack's, or goes by its names."""
        prefix = project(rack.name)
        names = {f"{prefix}_{net}" for net in NETS} | {f"{prefix}-{node}-1" for node in rack.node_names}
        for thing in (*containers(self._api), *networks(self._api)):
            if thing.labels.get(RACK) == rack.name or thing.labels.get(PROJECT) == prefix or thing.name in names:
                raise self._taken(thing)

    def _taken(self, thing: Thing) -> NameTaken:
        owner = thing.labels.get(STATE)
        if owner == str(self.state):
            return NameTaken(f"rack {self.name} is there already: {thing}", f"make down RACK={self.name}")
        if owner:
            message = f"the name {self.name} is taken: {thing} belongs to the rack kept in {owner}"
            return NameTaken(message, f"RACK=another-name here, or make down RACK={self.name} in that checkout")
        message = f"the name {self.name} is taken: {thing} is not torchrack's"
        return NameTaken(message, f"RACK=another-name, or docker {thing.kind} rm {thing.name}")

    def _compose_up(self, rack: Rack, image: str, step: Step) -> None:
        file, log = self.state / "compose.yaml", self.state / "compose.log"
        with writing(self.state):
            self.state.mkdir(parents=True, exist_ok=True)
            file.write_text(compose_yaml(rack, image, self.state))
            # A file, for a pipe would break when we are killed, and the engine be left in the middle of a request.
            output = log.open("wb")
        # Never --force-recreate: a rack of another checkout that took the name this very moment must not be replaced.
        argv = ["docker", "compose", "--file", str(file), "--env-file", os.devnull, "--project-name"]
        argv += [project(rack.name), "up", "--detach", "--no-recreate"]
        step(f"docker compose up: {rack.nodes} nodes")
        with output:
            code = self._end_of(argv, output.fileno(), UP_S + UP_NODE_S * rack.nodes)
        if code != 0:
            raise complaint(argv, code, log.read_text(errors="replace"))

    def _end_of(self, argv: Sequence[str], output: int, seconds: float) -> int | None:
        """The exit status of a `docker compose` command; None: it did not end within `seconds`."""
        child = None
        try:
            with _interrupts_held_back():  # one in the middle of the birth would lose us the child
                child = subprocess.Popen(
                    argv,
                    env={key: value for key, value in os.environ.items() if not key.startswith("COMPOSE_")},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=self.inherit_fds,
                    start_new_session=True,
                )
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child:
                _end(child)

    def _await_ready(self, rack: Rack) -> None:
        mine = {thing.labels[NODE]: thing for thing in self._containers()}
        for node in rack.node_names:
            if node not in mine or not self._ready(mine[node]):
                raise self._not_up(rack, node)

    def _ready(self, container: Thing) -> bool:
        """Wait until a node says so; False: it has ended, or has not said so in time."""

        def said() -> bool:
            return bool(self._api.logs(container.id, stderr=False).strip() == READY.encode())

        def runs() -> bool:
            return bool(self._api.inspect_container(container.id)["State"]["Running"])

        with talking("docker", "logs", container.name):
            return wait_for(lambda: said() or not runs(), READY_S) and said() and runs()

    def _not_up(self, rack: Rack, node: str) -> Lacking:
        name = f"{project(rack.name)}-{node}-1"
        there = next((thing for thing in containers(self._api) if thing.name == name), None)
        if there is None:
            return NotRunning(f"docker compose up made no {name}", "docker compose version, then try again")
        if there.labels.get(STATE) != str(self.state):
            return self._taken(there)
        said = self._api.logs(there.id, tail=5).decode(errors="replace")
        return NotRunning(f"{node} did not stay up: {there.status}\n{said}".strip(), "make image, then try again")

    # What is there

    def _containers(self) -> list[Thing]:
        return containers(self._api, self._labels)

    def _container(self, node: str) -> Thing:
        found = containers(self._api, {**self._labels, NODE: node})
        if not found:
            raise NotRunning(f"rack {self.name} has no {node}", f"make up RACK={self.name}")
        return found[0]

    def nodes(self) -> tuple[NodeState, ...]:
        mine = sorted(self._containers(), key=lambda thing: int(thing.labels[NODE].removeprefix("node")))
        return tuple(
            NodeState(thing.labels[NODE], "up")
            if thing.state == "running"
            else NodeState(thing.labels[NODE], "broken", thing.status or thing.state)
            for thing in mine
        )

    def home(self, node: str) -> str:
        return str(HOME)

    def python(self, node: str) -> str:
        return "/opt/venv/bin/python"

    def argv(self, node: str, command: Sequence[str], root: bool) -> list[str]:
        container = self._container(node)
        if container.state != "running":
            raise NotRunning(f"{node} is not up: {container.status}", f"make down RACK={self.name}, then make up")
        user = "0" if root else USER
        return ["docker", "exec", "--interactive", "--user", user, "--workdir", str(HOME), container.id, *command]

    def put(self, node: str, files: Mapping[str, bytes]) -> None:
        container = self._container(node)
        with talking("docker", "cp", "-", f"{container.name}:/"):
            self._api.put_archive(container.id, "/", _archive(files))

    def read(self, node: str, path: str) -> bytes:
        # Not by exec: the logs of a node that has died are wanted too.
        container, full = self._container(node), str(HOME / path)
        with talking("docker", "cp", f"{container.name}:{full}", "-"):
            packed = self._packed(container, full)
        if packed is not None:
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                if content := archive.extractfile(archive.getmembers()[0]):
                    return content.read()
        raise FileNotFoundError(f"{node} has no file {full}")

    def _packed(self, container: Thing, path: str) -> bytes | None:
        """A tar that holds the file at `path`, links followed; None: there is nothing."""
        try:
            chunks, stat = self._api.get_archive(container.id, path)
            if stat["linkTarget"]:
                chunks, _ = self._api.get_archive(container.id, stat["linkTarget"])
            return b"".join(chunks)
        except NoSuchPath:
            return None

    # Down

    def down(self) -> None:
        clean, why = 0, dict[Thing, str]()

        def gone() -> bool:
            """True after two looks in a row that found nothing: a `docker compose` killed midway leaves late births."""
            nonlocal clean, why
            why = self._remove_all()
            clean = 0 if why else clean + 1
            return clean == 2

        if not (gone() or wait_for(gone, DOWN_S, pause=0.1)):
            raise Remains([f"{thing} ({reason})" for thing, reason in why.items()], self._how_to_remove(why))

    def _remove_all(self) -> dict[Thing, str]:
        """Ask for all that is ours to be removed; returns it, each with what the engine answered.

        One by one: when several containers leave a network at once, the engine may miscount and never let it go
        (moby/moby#42119; on a busy machine 2 of 47 racks of eight nodes in parallel, none of 70 one by one).
        """
        return {
            thing: remove(self._api, thing)
            for look in (containers, networks)
            for thing in look(self._api, self._labels)
        }

    def _how_to_remove(self, left: Iterable[Thing]) -> str:
        again = f"make down RACK={self.name}"
        stuck = [thing.name for thing in left if thing.kind == "network"]
        if not stuck:
            return f"docker info, then {again}"
        inspect = f"docker network inspect {stuck[0]}"
        return f"remove the containers that `{inspect}` lists, or if none: sudo systemctl restart docker; then {again}"


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of the block; only the main thread can, and need, hold them back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = {number: signal.signal(number, lambda number, _: held.append(number)) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in held:
            signal.raise_signal(late)


def _end(child: subprocess.Popen[bytes]) -> None:
    """See a `docker compose` to its end, by itself if it can: the engine may carry out a request that was cut short."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            child.wait(END_S)
            return
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, number)
    child.wait()


def _archive(files: Mapping[str, bytes]) -> bytes:
    """A tar of `files` from / on, all of it the job's user's; of the folders only those below HOME."""
    content = {HOME / path: data for path, data in files.items()}
    folders = {folder for path in content for folder in path.parents if HOME in folder.parents}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in sorted(folders):
            archive.addfile(_member(folder, 0o755, tarfile.DIRTYPE))
        for path, data in content.items():
            member = _member(path, 0o755 if path.suffix == ".sh" else 0o644, tarfile.REGTYPE)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _member(path: PurePosixPath, mode: int, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(str(path.relative_to("/")))
    member.mode, member.type, member.uid, member.gid = mode, kind, UID, UID
    return member
