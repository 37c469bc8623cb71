"""What the places on this machine share: commands behind an argv prefix, name files, shaping, bounded waits."""

from __future__ import annotations

import errno
import subprocess
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchrack.model.errors import NotEnough, NotPermitted
from torchrack.model.rack import NetName, Rack
from torchrack.places.base import Process
from torchrack.places.spawned import SpawnPlace
from torchrack.plan import render

NSSWITCH = "passwd: files\ngroup: files\nhosts: files\n"
SHAPE_LATENCY = "100ms"
OTHER_MAKE: Mapping[NetName, str] = {"mgmt": "ens3", "fabric": "ens4"}


class LocalPlace(SpawnPlace):
    """A place whose nodes are entered by putting an argv in front of a command."""

    @abstractmethod
    def argv(self, node: str, command: Sequence[str], root: bool) -> list[str]:
        """The command line that runs `command` on `node` in the node's own environment; raises NotRunning."""

    def spawn(self, node: str, argv: Sequence[str], *, root: bool = False) -> Process:
        # A session of its own: Ctrl-C at the terminal is the caller's to handle, and must not hit the clients first.
        pipe = subprocess.PIPE
        command = self.argv(node, argv, root)
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)


def wait_for(done: Callable[[], bool], seconds: float, pause: float = 0.01) -> bool:
    """Poll until `done()` or for at most `seconds`; returns what `done()` said last."""
    until = time.monotonic() + seconds
    while not (ended := done()) and time.monotonic() < until:
        time.sleep(pause)
    return ended


def hosts_file(rack: Rack) -> str:
    """The /etc/hosts of every node: each node's name, its own too, is its mgmt address and nothing else."""
    return render.hosts_file((rack.address(node, "mgmt"), node) for node in rack.node_names).decode()


def other_names(rack: Rack, node: str) -> Mapping[NetName, str]:
    """What the NICs of `node` are renamed to: on a rack whose names differ, every second node is of another make."""
    differs = rack.nic_names == "differ" and rack.node_names.index(node) % 2
    return OTHER_MAKE if differs else {}


def shape_argv(nic: str, mbit: int) -> list[str]:
    """The command that shapes what `nic` sends to `mbit` Mbit/s; the kernel splits segments larger than the burst."""
    burst = max(64 << 10, mbit * 1_000_000 // 8 // 250)  # bytes: at least what one tick of a 250 Hz kernel lets out
    shape = ["rate", f"{mbit}mbit", "burst", f"{burst}b", "latency", SHAPE_LATENCY]
    return ["tc", "qdisc", "replace", "dev", nic, "root", "tbf", *shape]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn the errors of a full or forbidden disk into ours."""
    try:
        yield
    except OSError as error:
        path = error.filename or folder
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotEnough(f"no space left for {path}", f"free some disk space: df -h {folder}") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = f"make it yours: sudo chown -R $(id -un) {folder}"
            raise NotPermitted(f"may not write {path}: {error.strerror}", hint) from error
        raise
