"""Commands of the host whose progress is worth watching."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence

from torchrack.model.errors import CommandFailed, NotInstalled
from torchrack.places.base import Step

KEPT_LINES = 200


def stream(argv: Sequence[str], step: Step, hint: str, env: Mapping[str, str] | None = None) -> str:
    """Run a command to its end, each line of its output as a step; returns the end of what it printed.

    `env` is added to our own environment. Raises CommandFailed with `hint`.
    """
    kept: deque[str] = deque(maxlen=KEPT_LINES)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **(env or {})},
        )
    except FileNotFoundError as error:
        raise NotInstalled(f"no command {argv[0]}", hint) from error
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                kept.append(line)
                step(line.strip())
        except BaseException:
            process.terminate()  # leaving the block waits for its end
            raise
    if process.returncode:
        raise CommandFailed(argv, process.returncode, "".join(kept), hint)
    return "".join(kept)


def answer(argv: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """What a short command said; past `timeout` seconds it is killed (status 124), and 127 is one that cannot start."""
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"no answer within {timeout:g} s")
    except OSError as error:  # not there, not executable, or no exec format of this machine's
        return subprocess.CompletedProcess(argv, 127, "", str(error))
