"""An ordinary user, in a clone of their own, with the system's Python: one command, no root, no Docker."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USER = "nobody"
PYTHON = "/usr/bin/python3"
pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user"),
]


@pytest.fixture
def clone() -> Iterator[Path]:
    """A clone that belongs to the user, where they may write; /tmp itself is theirs to enter."""
    there = Path("/tmp") / f"torchrack-user-{os.getpid()}"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(there)], check=True)
    user = pwd.getpwnam(USER)
    subprocess.run(["chown", "-R", f"{user.pw_uid}:{user.pw_gid}", str(there)], check=True)
    yield there
    as_user(there, "make", "down", "ALL=1")
    shutil.rmtree(there)


def as_user(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("CERT_FILE")}
    env = kept | {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(folder), "LANG": "C.UTF-8"}
    command = ["setpriv", f"--reuid={USER}", "--regid=nogroup", "--clear-groups", *argv]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)


def test_lab_cpu_as_an_ordinary_user(clone: Path) -> None:
    done = as_user(clone, "make", "lab-cpu", "NODES=2", "RUNTIME=netns", f"PYTHON={PYTHON}")
    version = subprocess.run([PYTHON, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True)
    if version.stdout.split() != ["3", "11"] and done.returncode:
        # The CPU build may exist for another Python only: then the message says which to take.
        assert "fix: " in done.stderr and "PYTHON=" in done.stderr, done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("[3.0, 3.0]") >= 2
    assert "netns" in done.stderr
    rank0 = next((clone / ".torchrack" / "lab").glob("2*/logs/node0/0.log"))
    assert rank0.stat().st_uid == pwd.getpwnam(USER).pw_uid
    assert sys.executable not in done.stderr
