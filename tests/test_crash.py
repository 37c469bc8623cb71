"""kill -9 of the CLI in every phase of up and run: `down` then leaves nothing, and the next run needs no cleaning."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from racks import RUNTIMES, Cli, tagged

from torchrack.run.folder import RackFolder
from torchrack.run.lifecycle import LOCAL_PLACES
from torchrack.run.phases import CRASH_AT, Phase

ROUNDS = int(os.environ.get("TORCHRACK_CRASH_ROUNDS", "1"))
LOG = Path(__file__).parent.parent / "benchmarks" / "crash.log"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=RUNTIMES)
def cli(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    cli = Cli(tmp_path_factory.mktemp("crash"), request.param, "crash")
    yield cli
    cli.down()


def left_behind(cli: Cli) -> list[str]:
    """Nodes by the place's own account, and any process that names the state folder or carries a tag from it."""
    nodes = LOCAL_PLACES[cli.runtime](cli.rack, RackFolder(cli.rack, cli.home).place).nodes()
    return [state.node for state in nodes] + [f"{pid} {text}" for pid, text in tagged(str(cli.home))]


@pytest.mark.parametrize("phase", list(Phase))
def test_down_after_a_kill_leaves_nothing(phase: Phase, cli: Cli) -> None:
    for _ in range(ROUNDS):
        delay = random.choice([0.0, 0.02, 0.1, 0.3]) if ROUNDS > 1 else 0.0
        at = f"{phase.value}:{delay}" if delay else phase.value
        crashed = cli.lab("01", "--nodes", "2", **{CRASH_AT: at})
        ends = (-9, 0) if delay else (-9,)  # a short phase may be over before a late kill
        assert crashed.returncode in ends, crashed.stderr
        start = time.monotonic()
        down = cli.down()
        assert down.returncode == 0, down.stderr
        assert left_behind(cli) == []
        took = time.monotonic() - start
        note(f"{cli.runtime:<8} kill -9 at {at:<14} exit {crashed.returncode:>3}  down {took:.1f} s, nothing left")


@pytest.mark.parametrize("phase", [Phase.RACK, Phase.RUN])
def test_next_run_needs_no_cleaning(phase: Phase, cli: Cli) -> None:
    assert cli.lab("01", "--nodes", "2", **{CRASH_AT: phase.value}).returncode == -9
    after = cli.lab("01", "--nodes", "2")
    assert after.returncode == 0, after.stdout + after.stderr
    note(f"{cli.runtime:<8} kill -9 at {phase.value:<14} next lab-cpu passed without cleaning")


def note(line: str) -> None:
    if ROUNDS > 1:
        with LOG.open("a") as log:
            print(line, file=log)
