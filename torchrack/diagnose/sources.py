"""Where lines come from: folders, files, stdin, or any iterable. Never read whole, but in blocks of lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from torchrack.model.errors import NotFound

BLOCK = 1 << 18  # bytes; the lines of one block are in memory at a time
LINE_LIMIT = 8192  # bytes: the longest line that means something (a DETAIL fingerprint of many tensors) is about 4 kB
LINES_A_BLOCK = 2000
NOT_LOGS = {
    *(".json", ".yaml", ".yml", ".conf", ".md", ".html", ".png"),
    *(".py", ".sh", ".so", ".pt", ".pth", ".npy", ".gz", ".zip", ".tar"),
}
NOT_LOG_NAMES = {"hosts", "nsswitch"}


@dataclass(frozen=True)
class Source:
    """One log: its name (a relative path, which often tells the node) and its lines, or the file they stand in."""

    name: str
    lines: Iterable[str] = ()
    path: Path | None = None

    def blocks(self) -> Iterator[bytes]:
        """The text as UTF-8 in blocks of whole lines, CRLF as LF. A file that cannot be read has none."""
        if self.path is None:
            yield from _joined(self.lines)
            return
        try:
            if str(self.path) == "-":
                yield from _cut(sys.stdin.buffer)
            else:
                with self.path.open("rb") as file:
                    yield from _cut(file)
        except OSError:
            return


def open_sources(path: Path) -> Iterator[Source]:
    """The logs under `path`: a file, a folder (recursively), or "-" for stdin. Raises NotFound.

    Of a torchrack run record only its logs are read, not what the job itself wrote.
    """
    if str(path) == "-":
        yield Source("stdin", path=path)
    elif path.is_file():
        yield Source(path.name, path=path)
    elif path.is_dir():
        logs = path / "logs" if (path / "plan.json").is_file() and (path / "logs").is_dir() else path
        for file in sorted(logs.rglob("*")):
            if file.is_file() and _may_be_log(file):
                yield Source(file.relative_to(path).as_posix(), path=file)
    else:
        raise NotFound(f"{path}: no such file or folder", "torchrack diagnose FOLDER-WITH-LOGS")


def _may_be_log(file: Path) -> bool:
    return file.suffix not in NOT_LOGS and file.name not in NOT_LOG_NAMES and not file.name.startswith(".")


def _cut(stream: IO[bytes]) -> Iterator[bytes]:
    """Blocks cut after their last newline; a line without an end is given up once it is longer than LINE_LIMIT."""
    rest = b""
    overlong = False
    while piece := stream.read(BLOCK):
        if overlong:  # the rest of a line whose beginning was handed on
            _, newline, piece = piece.partition(b"\n")
            overlong = not newline
            if overlong:
                continue
        head, newline, tail = (rest + piece).rpartition(b"\n")
        if newline:
            yield _unix(head)
        rest, overlong = (tail, False) if len(tail) <= LINE_LIMIT else (b"", True)
        if overlong:
            yield _unix(tail[:LINE_LIMIT])
    if rest:
        yield _unix(rest)


def _unix(block: bytes) -> bytes:
    return block.replace(b"\r\n", b"\n").removesuffix(b"\r")


def _joined(lines: Iterable[str]) -> Iterator[bytes]:
    iterator = iter(lines)
    while some := list(islice(iterator, LINES_A_BLOCK)):
        text = "\n".join(line.rstrip("\r\n")[:LINE_LIMIT].replace("\n", " ") for line in some)
        yield text.encode("utf-8", "replace")
