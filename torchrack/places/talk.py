"""Words with the programs of node/ at work on a node: blocks go there (worker.py), lines with a literal come back."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrack.model.errors import Lacking, Unreachable
from torchrack.places.base import Process
from torchrack.places.ssh_process import RemoteProcess

NODE = Path(__file__).parents[1] / "node"


def block(content: bytes) -> bytes:
    return b"%08x" % len(content) + content


def words(*given: str) -> bytes:
    """A block of words; a file name need not be UTF-8."""
    return block("\0".join(given).encode(errors="surrogateescape"))


def program(source: str, *args: str) -> tuple[bytes, bytes]:
    """Lines of Python, to be run by worker.py with these arguments."""
    return words("-", *args), block(source.encode())


def named(files: Mapping[str, str]) -> Iterable[str]:
    """PATH SHA256 PATH SHA256 …, as receive.py takes them."""
    return (word for pair in files.items() for word in pair)


def tell(process: Process, blocks: Iterable[bytes]) -> None:
    """Send blocks, each when the one before is on its way. A program that is gone says so through its stream."""
    assert process.stdin
    try:
        for one in blocks:
            process.stdin.write(one)
        process.stdin.flush()
    except OSError:
        return


def lines(process: Process) -> Iterator[dict[str, Any]]:
    """What a program says. A login shell's own words, as ~/.bashrc may print them, are not it."""
    assert process.stdout
    for raw in process.stdout:
        with suppress(ValueError, SyntaxError):
            said = ast.literal_eval(raw.decode())
            if isinstance(said, dict):
                yield said


def hear(process: RemoteProcess) -> dict[str, Any]:
    """The next line. Raises Lacking with its reason, or Unreachable where the host fell silent."""
    try:
        said = next(lines(process), None)
    except TimeoutError:
        silent = f"fell silent for {process.patience:.0f} s"
        raise Unreachable("reachable", silent, "is the machine all right?") from None
    if said is None:
        last = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        raise Unreachable("reachable", f"the connection broke{': ' + last[0] if last else ''}", "is the machine up?")
    if problem := said.get("refused") or said.get("failed"):
        raise Lacking(problem, said.get("fix"))
    return said
