"""Runtimes that tests need: missing, a test is skipped with the reason; if TORCHRACK_REQUIRE names it, it fails."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from functools import cache
from pathlib import Path

import pytest

from torchrack.model.errors import TorchrackError
from torchrack.places.netns_check import PATH
from torchrack.run.lifecycle import LOCAL_PLACES

REQUIRED = {name for name in os.environ.get("TORCHRACK_REQUIRE", "").split(",") if name}
PLACE_OF = {"docker": "compose", "netns": "netns"}
DAEMON_OF = {"ssh": ("sshd", "openssh-server"), "slurm": ("slurmctld", "slurm-wlm")}


@cache
def missing(runtime: str) -> str | None:
    """Why a runtime cannot be used here, or None. Also makes what its nodes need: the image, or torch in this venv."""
    if runtime in DAEMON_OF:
        daemon, package = DAEMON_OF[runtime]
        return None if shutil.which(daemon, path=PATH) else f"no {daemon}: apt-get install {package}"
    place = LOCAL_PLACES[PLACE_OF[runtime]]("probe", Path("/nonexistent/torchrack-probe"))
    try:
        place.check()
        place.prepare(print)
    except TorchrackError as error:
        return str(error)
    return None


def pytest_configure() -> None:
    """torch before tests are collected: in a fresh clone those that import it would be skipped, and found next time."""
    if importlib.util.find_spec("torch") is None and (reason := missing("netns")):
        print(f"no torch, and none is fetched, as netns cannot be used: {reason}")
    importlib.invalidate_caches()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for runtime in (*PLACE_OF, *DAEMON_OF):
        if item.get_closest_marker(runtime) and (reason := missing(runtime)):
            if runtime in REQUIRED:
                pytest.fail(f"TORCHRACK_REQUIRE names {runtime}, but: {reason}", pytrace=False)
            pytest.skip(f"{runtime}: {reason}")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for .torchrack/, so that tests never touch the user's racks."""
    monkeypatch.setenv("TORCHRACK_HOME", str(tmp_path))
    return tmp_path
