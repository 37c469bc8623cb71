"""Take files on a host: compare hashes, receive what differs as a tar, put it in place. Runs there, stdlib only.

    receive.py put HOME       write files below HOME, those that differ
    receive.py compare HOME   say which files are not there with that hash, as {"want"}; nothing is changed
    receive.py deploy HOME    a payload: payload/<digest>, then `current` is switched to it; the last KEEP stay
    receive.py remove HOME    remove HOME

Lines of JSON go both ways; a tar follows the line that tells its size. One exec does all of it, so a host that has the
payload already answers in one round trip. Whoever asks may die at any moment: then nothing has changed here.

deploy:  <- {"digest", "files": {path: sha256}, "who"}     -> {"same"} | {"refused"} | {"want": [path], "was"}
         <- {"bytes": n} and a tar, for each of "tars"     -> {"staged"} | {"failed"}
         <- "commit" (anything else: forget it)            -> {"done"}
         <- "rollback" (the end of stdin: it stays)        -> {"back"}
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import shutil
import sys
import tarfile
import time

TYPE_CHECKING = False  # as typing's own, which takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any, NoReturn

KEEP = 3
STALL = 60.0  # seconds without a byte after which whoever sends is taken for dead, and the lock let go
PATIENCE = 3.0  # seconds; the one before may still be tidying up
CHUNK = 1 << 16
LINKED = ("scripts", "labs")


class Stdin:
    """Lines and counted bytes from descriptor 0."""

    def __init__(self) -> None:
        self.rest = b""
        self.left = 0

    def more(self) -> bytes:
        if not select.select([0], [], [], STALL)[0]:
            raise EOFError(f"nothing came for {STALL:.0f} s")
        return os.read(0, CHUNK)

    def line(self) -> Any:
        """The next line's JSON; None at the end."""
        while b"\n" not in self.rest:
            data = self.more()
            if not data:
                return None
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        return json.loads(line)

    def word(self) -> Any:
        """As line(); a sender that stalls here is one that went."""
        try:
            return self.line()
        except EOFError:
            return None

    def read(self, size: int) -> bytes:
        """For tarfile: at most `size` bytes of the `left` ones that belong to the tar."""
        data = b""
        while len(data) < min(size, self.left):
            if not self.rest:
                self.rest = self.more()
                if not self.rest:
                    raise EOFError("the sender went in the middle of a file")
            take = min(size - len(data), self.left - len(data), len(self.rest))
            data, self.rest = data + self.rest[:take], self.rest[take:]
        self.left -= len(data)
        return data


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def refuse(why: str) -> NoReturn:
    say(refused=why)
    sys.exit(0)


def sha256(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def members(stdin: Stdin, tars: int) -> Iterator[tuple[str, bytes]]:
    for _ in range(tars):
        told = stdin.line()
        if told is None:
            raise EOFError("the sender went")
        stdin.left = told["bytes"]
        with tarfile.open(fileobj=stdin, mode="r|*") as tar:  # type: ignore[call-overload]
            for member in tar:
                file = tar.extractfile(member)
                if file:
                    yield member.name, file.read()
        while stdin.left:
            stdin.read(CHUNK)


def write(path: str, content: bytes) -> None:
    """All of it or nothing, under its name."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(part, "wb") as file:
            file.write(content)
        os.chmod(part, 0o755 if path.endswith(".sh") else 0o644)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def put(home: str, stdin: Stdin) -> None:
    asked = stdin.line()
    want = [path for path, hashed in asked["files"].items() if sha256(os.path.join(home, path)) != hashed]
    for path in want:
        full = os.path.join(home, path)
        if full.startswith(home + "/") and os.path.realpath(os.path.dirname(full)) != os.path.dirname(full):
            refuse(f"{full} is not what was deployed")  # below a link into payload/, which only deploy may change
    say(want=want)
    for path, content in members(stdin, len(want) and 1):
        write(os.path.join(home, path), content)
    say(done=len(want))


def compare(home: str, stdin: Stdin) -> None:
    files = stdin.line()["files"]
    say(want=[path for path, hashed in files.items() if sha256(f"{home}/current/{path}") != hashed])


def alive(home: str) -> str:
    """A run of this rack that still has processes here, or ""."""
    for pid in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if pid.isdigit():
                with open(f"/proc/{pid}/environ", "rb") as file:
                    items = file.read().split(b"\0")
                run = next((item[14:].decode() for item in items if item.startswith(b"TORCHRACK_RUN=")), "")
                if run and f"TORCHRACK_AT={home}".encode() in items:
                    return run
    return ""


def lock(home: str, who: str) -> None:
    """Make the folder and its lock, which is held to our end; the kernel lets go of it, whatever happens."""
    until = time.monotonic() + PATIENCE
    while True:
        os.makedirs(f"{home}/payload", mode=0o700, exist_ok=True)
        file = os.open(f"{home}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(f"{home}/lock") and os.path.samestat(os.fstat(file), os.stat(f"{home}/lock")):
                break  # else whoever held it has removed the folder again
        except BlockingIOError:
            if time.monotonic() > until:
                holder = os.pread(file, 500, 0).decode(errors="replace").strip()
                refuse(f"another deployer is at work: {holder}")
        os.close(file)
        time.sleep(0.05)
    os.ftruncate(file, 0)
    os.pwrite(file, f"{who}, since {time.strftime('%H:%M:%S')}".encode(), 0)


def complete(folder: str, files: dict[str, str]) -> bool:
    return all(sha256(f"{folder}/{path}") == hashed for path, hashed in files.items())


def switch(home: str, digest: str | None) -> None:
    if digest is None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{home}/current")
        return
    link(f"payload/{digest}", f"{home}/current")
    for name in LINKED:
        path = f"{home}/{name}"
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)  # what a run without a deploy had put there
        link(f"current/{name}", path)


def link(target: str, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}.new")
    os.symlink(target, f"{path}.new")
    os.replace(f"{path}.new", path)


def prune(home: str, current: str) -> None:
    payloads = [name for name in os.listdir(f"{home}/payload") if name != current]
    payloads.sort(key=lambda name: os.stat(f"{home}/payload/{name}").st_mtime, reverse=True)
    for name in payloads[KEEP - 1 :]:
        shutil.rmtree(f"{home}/payload/{name}", ignore_errors=True)


def stage(stdin: Stdin, folder: str, old: str, want: list[str], files: dict[str, str], tars: int) -> None:
    part = f"{folder}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        for path in files.keys() - set(want):
            os.makedirs(os.path.dirname(f"{part}/{path}"), exist_ok=True)
            shutil.copy2(f"{old}/{path}", f"{part}/{path}")
        for path, content in members(stdin, tars):
            if path in files:
                write(f"{part}/{path}", content)
        wrong = [path for path, hashed in files.items() if sha256(f"{part}/{path}") != hashed]
        if wrong:
            raise OSError(f"{wrong[0]} arrived with another hash")
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def deploy(home: str, stdin: Stdin) -> None:
    asked = stdin.line()
    if asked is None:
        return  # whoever asks went before a word was said
    lock(home, asked["who"])
    fresh = sorted(os.listdir(home)) == ["lock", "payload"] and not os.listdir(f"{home}/payload")
    try:
        switched(home, stdin, asked)
    finally:
        if fresh and not os.path.islink(f"{home}/current"):
            shutil.rmtree(home, ignore_errors=True)


def switched(home: str, stdin: Stdin, asked: dict[str, Any]) -> None:
    """The words of deploy, while the lock is held."""
    digest, files = asked["digest"], asked["files"]
    folder = f"{home}/payload/{digest}"
    was = os.path.basename(os.readlink(f"{home}/current")) if os.path.islink(f"{home}/current") else None
    there = complete(folder, files)
    if there and was == digest:
        say(same=digest)
        return
    for left in (name for name in os.listdir(f"{home}/payload") if name.endswith(".part")):
        shutil.rmtree(f"{home}/payload/{left}", ignore_errors=True)  # of a deployer that was killed
    if run := alive(home):
        refuse(f"run {run} is alive here")
    old = f"{home}/payload/{was}"
    want = [] if there else [p for p, hashed in files.items() if sha256(f"{old}/{p}") != hashed]
    say(want=want, was=was)
    if not there:
        stage(stdin, folder, old, want, files, asked["tars"] if want else 0)
    say(staged=digest)
    if stdin.word() != "commit":
        if not there:
            shutil.rmtree(folder, ignore_errors=True)
        return
    switch(home, digest)
    os.utime(folder)
    say(done=digest, was=was)
    if stdin.word() == "rollback":
        switch(home, was)
        say(back=was)
    else:
        prune(home, digest)


def main(mode: str, home: str, rest: Iterable[str] = ()) -> None:
    os.umask(0o077 if mode == "deploy" else 0o022)
    try:
        if mode == "remove":
            shutil.rmtree(home)
            say(done=home)
        else:
            {"put": put, "compare": compare, "deploy": deploy}[mode](home, Stdin())
    except FileNotFoundError as error:
        say(failed=str(error), missing=True)
    except (OSError, EOFError, tarfile.TarError) as error:
        say(failed=str(error))


main(*sys.argv[1:3])
