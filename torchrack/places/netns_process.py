"""The processes that hold a rack of namespaces: found in /proc by command line, killed without mistaking a PID."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torchrack.model.errors import NotPermitted

HOLDER = Path(__file__).with_name("netns_holder.py")
PROC = Path("/proc")


class Process(NamedTuple):
    """A holder or an anchor; (pid, start, pidns) cannot be another process, not even after a reboot.

    `start` is in clock ticks since boot, `pidns` the inode of its PID namespace.
    """

    role: str
    pid: int
    start: int
    pidns: int


def _started(pid: int) -> int | None:
    """When `pid` started; None: it is gone, or a zombie."""
    try:
        words = (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if words[0] in "ZX" else int(words[19])


def alive(process: Process) -> bool:
    return _started(process.pid) == process.start


def same(process: Process) -> bool:
    """Whether the recorded process is still that very one, on this boot too."""
    return _identify(process.pid, process.role) == process


def _identify(pid: int, role: str) -> Process | None:
    start = _started(pid)
    try:
        pidns = (PROC / f"{pid}/ns/pid").stat().st_ino
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if start is None else Process(role, pid, start, pidns)


def _roles(name: str, state: Path) -> Iterator[tuple[int, str]]:
    """Each PID whose command line ends in `.../netns_holder.py ROLE name state`."""
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = (folder / "cmdline").read_bytes().removesuffix(b"\0").split(b"\0")[-4:]
            if len(words) == 4 and words[0].endswith(f"/{HOLDER.name}".encode()):
                _, role, rack, where = map(os.fsdecode, words)
                if (rack, where) == (name, str(state)):
                    yield int(folder.name), role


def _owner(pid: int) -> int | None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in (PROC / f"{pid}/status").read_text().splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[2])
    return None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def find(name: str, state: Path) -> list[Process]:
    """Every process that holds this rack; raises NotPermitted where one is another user's."""
    found = []
    for pid, role in _roles(name, state):
        owner = _owner(pid)
        if owner is not None and owner != os.geteuid():
            user = _user(owner)
            raise NotPermitted(f"rack {name} is {user}'s (process {pid})", f"as {user}: make down RACK={name}")
        if process := _identify(pid, role):
            found.append(process)
    return found


def kill(process: Process) -> None:
    """SIGKILL, unless the PID belongs to another process by now."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            if alive(process):  # checked after the handle was taken: the signal can go to no one else
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
