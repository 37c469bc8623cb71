"""However a run ends, its ranks are gone within 5 s: one that ignores SIGTERM, and one that double-forks away."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from racks import RUNTIMES, Cli, tagged, wait_until

pytestmark = pytest.mark.slow
GONE_WITHIN = 5.0
STUBBORN = """
import os, signal, sys, time
mark = sys.argv[1]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(900)", mark], {})
    os._exit(0)
open(os.path.join(os.environ["OUT"], "x"), "w").close()
print("started", flush=True)
if len(sys.argv) > 2 and os.environ["RANK"] == "1":
    time.sleep(3)
    os._exit(5)
time.sleep(900)
"""


@pytest.fixture(scope="module", params=RUNTIMES)
def cli(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    cli = Cli(tmp_path_factory.mktemp("home"), request.param, "ends")
    assert cli(*cli.on_rack("up"), "--nodes", "2").returncode == 0
    yield cli
    assert cli.down().returncode == 0


@pytest.fixture
def mark(tmp_path: Path) -> str:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    return f"stubborn-{os.getpid()}-{time.monotonic_ns()}"


def running(mark: str) -> list[tuple[int, str]]:
    """The script's ranks and daemons, wherever they are; not the CLI, its clients or supervisors."""
    return [
        (pid, text)
        for pid, text in tagged(mark)
        if "stubborn.py" not in text.split(mark)[0] or " -u " in text or is_rank(text)
    ]


def is_rank(text: str) -> bool:
    return text.startswith("python ")


def begin(cli: Cli, tmp_path: Path, mark: str, *options: str, args: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    process = cli.start(*cli.on_rack("run"), *options, str(tmp_path / "stubborn.py"), mark, *args)
    wanted = 4  # two ranks and a daemon of each
    assert wait_until(lambda: len(running(mark)) >= wanted or process.poll() is not None, 60), running(mark)
    assert process.poll() is None, process.communicate()
    return process


def gone(mark: str, since: float) -> None:
    assert wait_until(lambda: not running(mark), GONE_WITHIN - (time.monotonic() - since)), running(mark)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_a_signal_to_the_cli(how: signal.Signals, cli: Cli, tmp_path: Path, mark: str) -> None:
    process = begin(cli, tmp_path, mark)
    start = time.monotonic()
    process.send_signal(how)
    gone(mark, start)
    _, errors = process.communicate(timeout=30)
    if how is signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode == 1 and "interrupted" in errors


def test_the_deadline(cli: Cli, tmp_path: Path, mark: str) -> None:
    process = begin(cli, tmp_path, mark, "--deadline", "25")
    _, errors = process.communicate(timeout=60)
    assert not running(mark)
    assert process.returncode == 1 and "timed out" in errors


def test_a_failed_agent_ends_the_other_nodes(cli: Cli, tmp_path: Path, mark: str) -> None:
    process = begin(cli, tmp_path, mark, args=("fail",))
    _, errors = process.communicate(timeout=60)
    assert not running(mark)
    assert process.returncode == 1 and "failed" in errors


def test_one_run_at_a_time(cli: Cli, tmp_path: Path, mark: str) -> None:
    process = begin(cli, tmp_path, mark)
    second = cli.script(tmp_path / "stubborn.py", mark)
    assert second.returncode == 4 and "is busy: process" in second.stderr and "fix: " in second.stderr
    refused = cli.down()
    assert refused.returncode == 4 and running(mark), "a rack with an active run is not pulled away"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
