"""The labs without a rack: healthy sides under bare torchrun on loopback, and other world sizes.

Importing torch costs 2.5 s of CPU a process. So only what must be torchrun is; the rest runs in forks of this process,
which has imported torch once, with the environment that torchrun would give them. Broken sides are graded on racks
(tests/test_grade.py).
"""

from __future__ import annotations

import ast
import faulthandler
import multiprocessing
import os
import re
import runpy
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from torchrack.teach.catalogue import LabFolder, labs

torch = pytest.importorskip("torch")
LABS = labs()
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
GRACE = 3  # seconds that the other ranks get to end, once one has failed
LIMIT = 240
each_lab = pytest.mark.parametrize("lab", LABS, ids=[lab.number for lab in LABS])


@dataclass(frozen=True)
class Ended:
    codes: list[int]
    logs: list[str]

    def shows(self, pattern: str) -> list[bool]:
        return [re.search(pattern, log, re.MULTILINE) is not None for log in self.logs]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def own_port(lab: LabFolder) -> list[str]:
    return ["--port", str(free_port())] if lab.number == "02" else []


def loopback(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | more


def become_rank(script: str, args: list[str], env: dict[str, str], log: Path) -> None:
    """What a forked child does: be one rank, as `python script args` in that environment."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(env)
    faulthandler.disable()  # pytest's would print this rank's abort into the test report
    warnings.resetwarnings()  # pytest has turned them into errors
    torch.distributed.set_debug_level_from_env()  # done at import, which in a fork lies before env; so is the next
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.argv, sys.path[0:0] = [script, *args], [str(Path(script).parent)]
    runpy.run_path(script, run_name="__main__")


def fork(lab: LabFolder, args: list[str], world: int, tmp: Path) -> Ended:
    """Run a lab as `world` forks of this process; the rest is ended GRACE seconds after the first failure."""
    script, port, args = str(lab.path / "lab.py"), str(free_port()), args + own_port(lab)
    ranks, files = [], [tmp / f"{rank}.log" for rank in range(world)]
    for number, log in enumerate(files):
        told = {"RANK": number, "LOCAL_RANK": number, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        given = {name: str(value) for name, value in told.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        job = (script, args, loopback(**given), log)
        ranks.append(multiprocessing.get_context("fork").Process(target=become_rank, args=job))
        ranks[-1].start()
    end = time.monotonic() + LIMIT
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < end:
        if any(rank.exitcode for rank in ranks):
            end = min(end, time.monotonic() + GRACE)
        for rank in ranks:
            rank.join(0.02)
    for rank in ranks:
        rank.kill()
        rank.join()
    return Ended([rank.exitcode or 0 for rank in ranks], [log.read_text() for log in files])


def torchrun(lab: LabFolder, flags: list[str], tmp: Path) -> Ended:
    """Run a lab's healthy side under one bare torchrun agent."""
    argv = [TORCHRUN, *flags, "--redirects=3", f"--log-dir={tmp}", str(lab.path / "lab.py"), *own_port(lab)]
    done = subprocess.run(argv, cwd=tmp, env=loopback(), capture_output=True, text=True, timeout=LIMIT)
    logs = [log.read_text() for log in sorted(tmp.glob("*/attempt_0/*/stdout.log"))]
    return Ended([done.returncode], logs or [done.stderr])


def assert_healthy(lab: LabFolder, ended: Ended) -> None:
    assert not any(ended.codes), ended
    for check in lab.lab.checks:
        if check.every_rank:
            assert all(ended.shows(check.every_rank)), (check, ended.logs)
        if check.any_rank:
            assert any(ended.shows(check.any_rank)), (check, ended.logs)


@pytest.mark.slow
@each_lab
def test_healthy_side_passes_under_bare_torchrun(lab: LabFolder, tmp_path: Path) -> None:
    ended = torchrun(lab, ["--standalone", "--nproc-per-node=2"], tmp_path)
    assert_healthy(lab, ended)
    assert len(ended.logs) == 2


@pytest.mark.slow
@each_lab
def test_another_world_size_takes_the_same_script(lab: LabFolder, tmp_path: Path) -> None:
    world = 3 if lab.lab.worlds.takes(3) else 6
    ended = fork(lab, [], world, tmp_path)
    assert ended.codes == [0] * world, ended.logs
    assert all(ended.shows("^golden ok: ")), ended.logs


@pytest.mark.slow
def test_launch_ways_that_need_no_agent(tmp_path: Path) -> None:
    """By hand is what fork() does; spawn starts its ranks itself. (torchrun's two ways are tested above and below.)"""
    lab = next(lab for lab in LABS if lab.number == "06")
    by_hand = fork(lab, [], 2, tmp_path)
    assert all(by_hand.shows("^golden ok: .* by hand$")), by_hand.logs
    argv = [sys.executable, str(lab.path / "lab.py"), "--spawn", "2"]
    spawned = subprocess.run(argv, env=loopback(), capture_output=True, text=True, timeout=LIMIT)
    assert spawned.returncode == 0, spawned.stderr
    # Not by line: both write to one pipe, and unbuffered Python writes a line's end apart from the line.
    assert len(re.findall(r"golden ok: rank \d of 2 = .*? by spawn", spawned.stdout)) == 2


@pytest.mark.slow
def test_two_agents_meet_on_loopback(tmp_path: Path) -> None:
    """README 06, way 4: the same line twice, and the nodes number themselves."""
    lab = next(lab for lab in LABS if lab.number == "06")
    meet = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=two"]
    argv = [TORCHRUN, *meet, "--local-addr=127.0.0.1", str(lab.path / "lab.py")]
    agents = [subprocess.Popen(argv, env=loopback(), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [agent.communicate(timeout=LIMIT)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert {m for out in outputs for m in re.findall(r"node (\d) x 1 \+ 0", out)} == {"0", "1"}


def imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


@each_lab
def test_golden_is_a_single_process_and_the_lab_is_plain(lab: LabFolder) -> None:
    golden, script = imports(lab.path / "golden.py"), imports(lab.path / "lab.py")
    assert not any(name.startswith("torch.") for name in golden)
    assert "golden" in script
    assert not any(name.startswith("torchrack") for name in golden | script)
    assert len((lab.path / "lab.py").read_text().splitlines()) <= 160


@each_lab
def test_readme_names_every_broken_side_and_no_other(lab: LabFolder) -> None:
    text = (lab.path / "README.md").read_text()
    told = set(re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE)) | set(re.findall(r"`([a-z]+-detail)`", text))
    assert {name for name in told if name in lab.lab.variants} == set(lab.lab.variants)
    assert set(re.findall(r"VARIANT=([a-z-]+)", text)) <= set(lab.lab.variants)
