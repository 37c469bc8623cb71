"""Helpers of the tests that run torchrack for real: a subprocess of the CLI with a state folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TORCHRACK = str(Path(sys.executable).parent / "torchrack")
RUNTIMES = [pytest.param("netns", marks=pytest.mark.netns), pytest.param("compose", marks=pytest.mark.docker)]
Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Cli:
    """The command line as a user has it, on one runtime and one rack, with racks and records under `home`."""

    home: Path
    runtime: str
    rack: str

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"TORCHRACK_HOME": str(self.home)}

    def __call__(self, *args: str, timeout: float = 240, **env: str) -> Done:
        argv = [TORCHRACK, *args]
        return subprocess.run(argv, env=self.env | env, capture_output=True, text=True, timeout=timeout)

    def on_rack(self, *command: str, after: tuple[str, ...] = ()) -> tuple[str, ...]:
        return (*command, "--runtime", self.runtime, "--rack", self.rack, *after)

    def lab(self, number: str, *options: str, **env: str) -> Done:
        return self(*self.on_rack("lab", "run", number), *options, **env)

    def script(self, path: Path, *args: str, options: tuple[str, ...] = ()) -> Done:
        return self(*self.on_rack("run"), *options, str(path), *args)

    def start(self, *args: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([TORCHRACK, *args], env=self.env, stdout=pipe, stderr=pipe, text=True)

    def down(self) -> Done:
        return self("down", "--rack", self.rack)

    def result(self, done: Done) -> dict[str, Any]:
        """The one JSON object on stdout."""
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise AssertionError(f"not one JSON document:\n{done.stdout}\n{done.stderr}") from None


def tagged(text: str) -> list[tuple[int, str]]:
    """Living processes of this machine, containers' included, whose command line or environment holds `text`."""
    found = []
    for pid, shown in processes():
        if text in shown and pid != os.getpid():
            found.append((pid, shown[:200]))
    return found


def processes() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X"):
                continue
            text = (entry / "cmdline").read_bytes() + b"\0" + (entry / "environ").read_bytes()
        except OSError:
            continue
        yield int(entry.name), text.replace(b"\0", b" ").decode(errors="replace")


def wait_until(done: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
