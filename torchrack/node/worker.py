"""Run the programs that come on stdin, one after another. Runs on rented machines, standard library only.

    <- ARGS SOURCE    two blocks: the program's arguments with NUL between them, and its text

A block is its size as eight hexadecimal digits, and so many bytes. To start a Python takes longer than most of these
programs, so one that is there runs them all. What a program reads and writes is its own affair; what ends one, an error
or sys.exit, ends all, as does the end of stdin.
"""

from __future__ import annotations

import os
import sys


def exactly(size: int) -> bytes:
    """Not a byte more: what follows is the program's."""
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            sys.exit()
        data += more
    return data


def block() -> bytes:
    return exactly(int(exactly(8), 16))


while True:
    sys.argv = os.fsdecode(block()).split("\0")
    exec(block(), {"__name__": "__main__"})
    sys.stdout.flush()
