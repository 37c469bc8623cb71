"""Take files on a host: compare hashes, receive what differs, put it in place. Runs there, standard library only.

    receive.py put HOME       write files below HOME, those that differ
    receive.py compare HOME   say which files are not there with that hash, as {"want"}, and {"run"}: the one alive
    receive.py deploy HOME    a payload: payload/<digest>, then `current` is switched to it; the last KEEP stay
    receive.py remove HOME    remove HOME

Blocks come, as in worker.py: of words with NUL between them, or a wanted file's content, compressed, in the
order of "want". Lines go back, each a Python literal. One exec does all of it, so a host that has the payload already
answers in one round trip. Whoever asks may die at any moment: then nothing has changed here.

deploy:  <- DIGEST WHO PATH SHA256 PATH SHA256 …     -> {"same"} | {"refused"} | {"want": [path], "was"}
         <- a file, for each that is wanted          -> {"staged"} | {"failed"}
         <- "commit" (anything else: forget it)      -> {"done"}
         <- "rollback" (the end of stdin: it stays)  -> {"back"}

json, tarfile, shutil and hashlib are not imported: that took longer than all the rest.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import time
import zlib

TYPE_CHECKING = False  # as typing's own, which takes longer to import than all the rest
if TYPE_CHECKING:
    from typing import Any, NoReturn

KEEP = 3
STALL = 60.0  # seconds without a byte after which whoever sends is taken for dead, and the lock let go
PATIENCE = 3.0  # seconds; the one before may still be tidying up
LINKED = ("scripts", "labs")


def new_sha256() -> Any:
    """Python's own, where it has a name; hashlib would load all of OpenSSL first."""
    for name in ("_sha2", "_sha256"):
        try:
            return __import__(name).sha256
        except ImportError:
            continue
    import hashlib

    return hashlib.sha256


SHA256 = new_sha256()


class Stdin:
    """Blocks from descriptor 0, which stay apart from what the next program will read. EOFError: the sender is gone."""

    def exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not select.select([0], [], [], STALL)[0]:
                raise EOFError(f"nothing came for {STALL:.0f} s")
            more = os.read(0, size - len(data))
            if not more:
                raise EOFError("the sender went")
            data += more
        return bytes(data)

    def block(self) -> bytes:
        return self.exactly(int(self.exactly(8), 16))

    def words(self) -> list[str]:
        return os.fsdecode(self.block()).split("\0")

    def word(self) -> str:
        """A single one; "" from a sender that is gone."""
        try:
            return self.words()[0]
        except EOFError:
            return ""


def say(**fields: object) -> None:
    sys.stdout.write(f"{fields!a}\n")
    sys.stdout.flush()


def refuse(why: str) -> NoReturn:
    say(refused=why)
    sys.exit(0)


def sha256(path: str) -> str:
    try:
        with open(path, "rb", 0) as file:
            return str(SHA256(file.read()).hexdigest())
    except OSError:
        return ""


def hashes(words: list[str]) -> dict[str, str]:
    """PATH SHA256 PATH SHA256 …, by path; no words at all come as an empty one."""
    return dict(zip(words[::2], words[1::2]))  # noqa: B905  zip's strict is not known before Python 3.10


def unlike(folder: str, files: dict[str, str]) -> list[str]:
    """The files that are not in `folder` as they shall be."""
    return [path for path, hashed in files.items() if sha256(os.path.join(folder, path)) != hashed]


def remove(path: str) -> None:
    """A whole folder, if it is there. What remains of it is looked for by whoever needs it gone."""
    if os.path.isdir(path):
        import shutil

        shutil.rmtree(path, ignore_errors=True)


def write(path: str, content: bytes, name: str = "") -> None:
    """`name`: what the file will be called, if not as now."""
    with open(path, "wb", 0) as file:
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]
    os.chmod(path, 0o755 if (name or path).endswith(".sh") else 0o644)


def replace(path: str, content: bytes) -> None:
    """All of it or nothing, under its name."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part = f"{path}.{os.getpid()}.part"
    try:
        write(part, content, path)
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):
            os.unlink(part)
        raise


def put(home: str, stdin: Stdin) -> None:
    want = unlike(home, hashes(stdin.words()))
    for path in want:
        full = os.path.join(home, path)
        if full.startswith(home + "/") and os.path.realpath(os.path.dirname(full)) != os.path.dirname(full):
            refuse(f"{full} is not what was deployed")  # below a link into payload/, which only deploy may change
    say(want=want)
    for path in want:
        replace(os.path.join(home, path), zlib.decompress(stdin.block()))
    say(done=len(want))


def compare(home: str, stdin: Stdin) -> None:
    say(want=unlike(f"{home}/current", hashes(stdin.words())), run=alive(home))


def alive(home: str) -> str:
    """A run of this rack that still has processes here, or ""."""
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                with open(f"/proc/{pid}/environ", "rb", 0) as file:
                    items = file.read().split(b"\0")
            except OSError:
                continue
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


def switch(home: str, digest: str | None) -> None:
    if digest is None:
        if os.path.islink(f"{home}/current"):
            os.unlink(f"{home}/current")
        return
    link(f"payload/{digest}", f"{home}/current")
    for name in LINKED:
        path = f"{home}/{name}"
        if not os.path.islink(path):
            remove(path)  # what a run without a deploy had put there
        link(f"current/{name}", path)


def link(target: str, path: str) -> None:
    if os.path.lexists(f"{path}.new"):
        os.unlink(f"{path}.new")
    os.symlink(target, f"{path}.new")
    os.replace(f"{path}.new", path)


def prune(home: str, current: str) -> None:
    payloads = [name for name in os.listdir(f"{home}/payload") if name != current]
    payloads.sort(key=lambda name: os.stat(f"{home}/payload/{name}").st_mtime, reverse=True)
    for name in payloads[KEEP - 1 :]:
        remove(f"{home}/payload/{name}")


def stage(stdin: Stdin, folder: str, old: str, want: list[str], files: dict[str, str]) -> None:
    part = f"{folder}.part"
    remove(part)
    try:
        for parent in {os.path.dirname(f"{part}/{path}") for path in files}:
            os.makedirs(parent, exist_ok=True)
        for path in files.keys() - set(want):
            with open(f"{old}/{path}", "rb", 0) as file:
                write(f"{part}/{path}", file.read())
        for path in want:
            write(f"{part}/{path}", zlib.decompress(stdin.block()))
        if wrong := unlike(part, files):
            raise OSError(f"{wrong[0]} arrived with another hash")
        remove(folder)
        os.rename(part, folder)
    except BaseException:
        remove(part)
        raise


def deploy(home: str, stdin: Stdin) -> None:
    digest, who, *words = stdin.words()
    lock(home, who)
    fresh = sorted(os.listdir(home)) == ["lock", "payload"] and not os.listdir(f"{home}/payload")
    try:
        switched(home, stdin, digest, hashes(words), fresh)
    finally:
        if fresh and not os.path.islink(f"{home}/current"):
            remove(home)


def switched(home: str, stdin: Stdin, digest: str, files: dict[str, str], fresh: bool) -> None:
    """The words of deploy, while the lock is held."""
    folder = f"{home}/payload/{digest}"
    was = os.path.basename(os.readlink(f"{home}/current")) if os.path.islink(f"{home}/current") else None
    there = not unlike(folder, files)
    if there and was == digest:
        say(same=digest)
        return
    for left in (name for name in os.listdir(f"{home}/payload") if name.endswith(".part")):
        remove(f"{home}/payload/{left}")  # of a deployer that was killed
    if not fresh and (run := alive(home)):
        refuse(f"run {run} is alive here")
    old = f"{home}/payload/{was}"
    want = [] if there else unlike(old, files)
    say(want=want, was=was)
    if not there:
        stage(stdin, folder, old, want, files)
    say(staged=digest)
    if stdin.word() != "commit":
        if not there:
            remove(folder)
        return
    switch(home, digest)
    os.utime(folder)
    say(done=digest, was=was)
    if stdin.word() == "rollback":
        switch(home, was)
        say(back=was)
    else:
        prune(home, digest)


def main(mode: str, home: str) -> None:
    os.umask(0o077 if mode == "deploy" else 0o022)
    try:
        if mode == "remove":
            import shutil

            shutil.rmtree(home)
            say(done=home)
        else:
            {"put": put, "compare": compare, "deploy": deploy}[mode](home, Stdin())
    except FileNotFoundError as error:
        say(failed=str(error), missing=True)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        say(failed=str(error))


main(*sys.argv[1:])
