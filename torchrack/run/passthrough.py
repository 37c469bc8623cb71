"""Join our three streams with those of a command on a node."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import IO, BinaryIO

from torchrack.places.base import Process

CHUNK = 1 << 16


def passthrough(process: Process) -> int:
    """Copy streams until the command ends; returns its exit status. Ctrl-C ends the command by closing its stdin."""
    assert process.stdin and process.stdout and process.stderr
    threading.Thread(target=_feed, args=(process.stdin,), daemon=True).start()
    readers = [
        threading.Thread(target=_copy, args=(process.stdout, sys.stdout.buffer)),
        threading.Thread(target=_copy, args=(process.stderr, sys.stderr.buffer)),
    ]
    for reader in readers:
        reader.start()
    try:
        for reader in readers:
            reader.join()
    except KeyboardInterrupt:
        process.kill()
    return process.wait()


def _feed(stdin: IO[bytes]) -> None:
    # os.read, not sys.stdin.read: what was typed goes out at once, and the interpreter may exit while this one waits.
    with suppress(OSError, ValueError):
        while data := os.read(0, CHUNK):
            stdin.write(data)
            stdin.flush()
        stdin.close()


def _copy(source: IO[bytes], sink: BinaryIO) -> None:
    # read1: whatever is there, at once; all of our processes' streams are buffered readers.
    while data := source.read1(CHUNK):  # type: ignore[attr-defined]
        sink.write(data)
        sink.flush()
