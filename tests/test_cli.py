"""The prompt itself: exit codes, streams, and bad input that ends with the fix. No rack is brought up here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchrack.model.errors import Lacking
from torchrack.run.folder import RackFolder
from torchrack.run.lifecycle import choose

TORCHRACK = str(Path(sys.executable).parent / "torchrack")
ROOT = Path(__file__).parent.parent


def torchrack(home: Path, *args: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TORCHRACK_HOME": str(home), "PATH": path or os.environ["PATH"]}
    return subprocess.run([TORCHRACK, *args], env=env, capture_output=True, text=True, timeout=60)


BAD = {
    "unknown lab": (["lab", "run", "77"], 2, "no lab '77'", "one of: 01-"),
    "unknown variant": (["lab", "break", "05", "nosuch"], 2, "no broken side 'nosuch'", "one of: skip"),
    "no nodes": (["lab", "run", "01", "--nodes", "0"], 2, "nodes: ", "1 to 32"),
    "nodes by name": (["lab", "run", "01", "--nodes", "abc"], 2, "nodes: ", "1 to 32"),
    "too many nodes": (["lab", "run", "01", "--nodes", "33"], 2, "nodes: ", "1 to 32"),
    "too many ranks": (["lab", "run", "01", "--nproc", "9"], 2, "nproc: ", "1 to 8"),
    "unknown runtime": (["lab", "run", "01", "--runtime", "podman"], 2, "runtime: ", "auto, compose or netns"),
    "bad rack name": (["up", "--rack", "../x"], 2, "name: ", "lower-case"),
    "bad shm": (["up", "--shm", "lots"], 2, "shm: ", "1g"),
    "bad pin": (["lab", "run", "01", "--pin", "eth0"], 2, "pin: ", "fabric, mgmt or none"),
    "no script": (["run", "nosuch.py"], 2, "no script nosuch.py", "SCRIPT="),
    "no rack file": (["up", "--file", "nosuch.yaml"], 2, "no file nosuch.yaml", "fix: "),
    "exec without a rack": (["exec", "node0", "true"], 2, "no rack named lab is up", "make up"),
    "logs without a run": (["logs"], 2, "has no run", "make lab-cpu"),
    "grade of nothing": (["lab", "grade"], 2, "--all", "torchrack lab grade"),
    "nic without a rack": (["nic"], 2, "no rack named lab is up", "make up"),
    "bad hosts": (["launch", "--hosts", "a,b:x", "--lab", "01"], 2, "HOSTS item 2 'b:x'", "HOSTS='user@a"),
    "no hosts": (["deploy"], 2, "no hosts are given", "HOSTS=inventory.yml"),
    "no inventory": (["preflight", "--hosts", "nosuch.yml"], 2, "no inventory nosuch.yml", "HOSTS="),
    "stop of nothing": (["stop"], 2, "no hosts are given", "HOSTS="),
    "diagnose of nothing": (["diagnose", "nosuch"], 2, "nosuch", "fix: "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error_that_ends_with_the_fix(name: str, tmp_path: Path) -> None:
    args, code, said, fix = BAD[name]
    done = torchrack(tmp_path, *args)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("error: ") and said in done.stderr
    assert fix in done.stderr.strip().splitlines()[-1] and "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not [p for p in tmp_path.rglob("*") if p.is_file()], "nothing is left behind"


def test_a_rack_file_tells_all_of_its_errors(tmp_path: Path) -> None:
    file = tmp_path / "rack.yaml"
    file.write_text("nodes: 0\nshm: tiny\nruntme: netns\n")
    done = torchrack(tmp_path, "up", "--file", str(file))
    assert done.returncode == 2
    assert all(f"{file}:{key}: " in done.stderr for key in ("nodes", "shm", "runtme"))


def test_without_docker_and_namespaces_both_reasons_are_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))  # no docker, and a check that looks for its tools only there
    monkeypatch.setattr("torchrack.places.netns_check.check.__defaults__", (str(home), Path("/proc")))
    with pytest.raises(Lacking) as caught:
        choose("lab", "auto", RackFolder("lab"))
    assert "compose: Docker is not installed" in str(caught.value) and "netns: netns needs `unshare`" in str(
        caught.value
    )
    assert caught.value.exit_code == 4


def test_down_of_nothing_is_a_success_and_status_is_empty_data(tmp_path: Path) -> None:
    assert torchrack(tmp_path, "down").returncode == 0
    done = torchrack(tmp_path, "status", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, [])


def test_render_shows_explains_and_writes_without_running_anything(tmp_path: Path) -> None:
    shown = torchrack(tmp_path, "render", "--nodes", "2")
    assert "export GLOO_SOCKET_IFNAME='fabric'" in shown.stdout
    explained = torchrack(tmp_path, "render", "--nodes", "2", "--explain").stdout
    assert "NCCL_SOCKET_IFNAME" in explained and "prevents" in explained
    out = tmp_path / "out"
    assert torchrack(tmp_path, "render", "--nodes", "3", "--out", str(out)).returncode == 0
    assert len({(out / f"node{i}" / "launch.sh").read_bytes() for i in range(3)}) == 1
    assert json.loads(torchrack(tmp_path, "render", "--json").stdout)["endpoint"].endswith(":29400")


def test_lab_list_shows_every_lab(tmp_path: Path) -> None:
    rows = json.loads(torchrack(tmp_path, "lab", "list", "--json").stdout)
    assert [row["lab"] for row in rows][:2] == ["01", "02"]


def test_lookup_knows_a_line_and_says_when_it_does_not(tmp_path: Path) -> None:
    assert torchrack(tmp_path, "lookup", "RuntimeError: Address already in use").returncode == 0
    assert torchrack(tmp_path, "lookup", "the cat sat on the mat").returncode == 3


def test_diagnose_exits_by_its_verdict(tmp_path: Path) -> None:
    healthy = tmp_path / "h"
    healthy.mkdir()
    (healthy / "log.txt").write_text("step 1 loss 0.5\nstep 2 loss 0.4\ntraining finished\n")
    assert torchrack(tmp_path, "diagnose", str(healthy)).returncode in (0, 3)
    broken = tmp_path / "b"
    broken.mkdir()
    (broken / "log.txt").write_text("Traceback (most recent call last):\nValueError: no\n")
    done = torchrack(tmp_path, "diagnose", str(broken), "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["verdict"] == "fault"


@pytest.mark.parametrize(
    ("target", "said"), [("run", "SCRIPT="), ("exec", "CMD="), ("diagnose", "LOGS="), ("lookup", "LINE=")]
)
def test_make_without_its_variable_says_which(target: str, said: str) -> None:
    done = subprocess.run(["make", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr


def test_make_takes_every_variable_that_its_help_names() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"\b([A-Z_]{2,})=", shown))
    assert {"NODES", "SECRET", "CHECK", "TO", "GPUS"} <= named
    done = subprocess.run(["make", "help", *(f"{name}=1" for name in named)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_make_refuses_a_variable_that_it_does_not_know() -> None:
    done = subprocess.run(["make", "labs", "NODS=4"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown: NODS" in done.stderr and "fix: one of" in done.stderr and " NODES " in done.stderr
