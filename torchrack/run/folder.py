"""Where a rack keeps its state and its run records: .torchrack/<rack>/ in the checkout, and the lock that guards it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from torchrack.model.errors import NotEnough, NotPermitted, RackBusy
from torchrack.model.rack import Model, NodeFacts, Rack
from torchrack.plan.render import PACKAGE

LOCK_WAIT = 3.0  # seconds; a child that a killed CLI left behind gets this long to end


def checkout() -> Path:
    """The folder that holds labs/ and templates/."""
    return PACKAGE.parent


def state_root() -> Path:
    """The folder that .torchrack/ lies in: the checkout, or TORCHRACK_HOME."""
    return Path(os.environ.get("TORCHRACK_HOME") or checkout()).resolve()


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn a full disk or a folder that cannot be written into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotEnough(
                f"the disk is full: {what}", "free some space (make clean removes old run records)"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise NotPermitted(
                f"may not write {what}: {error.strerror}", "chown the folder, or set TORCHRACK_HOME"
            ) from error
        raise


class RackRecord(Model):
    """rack.json: what was asked for, and, once it is up, what was made and what its nodes told."""

    runtime: Literal["compose", "netns", "ssh"]
    asked: Rack
    rack: Rack | None = None
    facts: tuple[NodeFacts, ...] = ()


class RackFolder:
    """.torchrack/<rack>/: rack.json (what it is), place/ (the place's own state), lock, and a folder a run."""

    def __init__(self, name: str, root: Path | None = None) -> None:
        self.name = name
        self.path = (root or state_root()) / ".torchrack" / name
        self.place = self.path / "place"
        self.lock_path = self.path / "lock"
        self._rack = self.path / "rack.json"

    @staticmethod
    def all(root: Path | None = None) -> list[RackFolder]:
        """Every rack of this checkout that has a folder."""
        base = (root or state_root()) / ".torchrack"
        folders = sorted(p for p in base.glob("*") if (p / "lock").exists())
        return [RackFolder(p.name, root) for p in folders]

    def make(self) -> None:
        with disk_errors(str(self.path)):
            self.place.mkdir(parents=True, exist_ok=True)

    def read_rack(self) -> RackRecord | None:
        """What was last brought up here, or None. A torn or older file counts as None: the place itself still knows."""
        try:
            return RackRecord.model_validate_json(self._rack.read_text())
        except (FileNotFoundError, ValueError):
            return None

    def write_rack(self, record: RackRecord) -> None:
        write_json(self._rack, record.model_dump())

    def forget_rack(self) -> None:
        self._rack.unlink(missing_ok=True)

    def new_run(self) -> Path:
        """A fresh folder for one run; its name is the run id, e.g. 20261129-164501-3fa2."""
        run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        folder = self.path / run_id
        with disk_errors(str(folder)):
            folder.mkdir()
        return folder

    def runs(self) -> list[Path]:
        """Run folders, oldest first."""
        return sorted(p for p in self.path.glob("2*-*-*") if p.is_dir())

    @contextmanager
    def lock(self, doing: str, wait: float = LOCK_WAIT) -> Iterator[int]:
        """Hold the rack for one command; yields the descriptor, which a child may inherit to hold it longer.

        Raises RackBusy after `wait` seconds, naming who holds it. The kernel drops the lock with its last holder, so a
        killed CLI leaves none behind.
        """
        self.make()
        with disk_errors(str(self.lock_path)):
            fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._acquire(fd, wait)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()} {doing}".encode(), 0)
            yield fd
        finally:
            os.close(fd)

    def _acquire(self, fd: int, wait: float) -> None:
        end = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise self._busy() from None
            time.sleep(0.05)

    def holder(self) -> tuple[int, str] | None:
        """(pid, what it does) of the live process that holds the lock, or None."""
        try:
            with self.lock_path.open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return None
                except BlockingIOError:
                    pid, _, doing = lock.read().partition(" ")
                    return int(pid or 0), doing
        except FileNotFoundError:
            return None

    def orphaned(self) -> bool:
        """Whether the lock is held by a child of a CLI that is gone: it will end by itself, so waiting helps."""
        holder = self.holder()
        return holder is not None and not Path(f"/proc/{holder[0]}").exists()

    def _busy(self) -> RackBusy:
        pid, doing = self.holder() or (0, "something")
        return RackBusy(
            f"rack {self.name} is busy: process {pid} is at '{doing}'",
            f"wait for it, stop it with Ctrl-C there (or kill {pid}), or use another rack: RACK=other",
        )


def write_json(path: Path, data: object) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    with disk_errors(str(path)):
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(path)
