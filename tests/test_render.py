"""Rendered scripts: golden files, bash -n, shellcheck, a run against a stub torchrun, values that arrive unchanged."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_plan import RACK, facts

from torchrack.model.job import NCCL_VALUE_MAX, Job
from torchrack.model.rack import Rack
from torchrack.plan.plan import Plan, plan
from torchrack.plan.render import constant_files, digest, node_files

GOLDEN = Path(__file__).parent / "golden"
JOBS = {
    "c10d": Job(nproc=2),
    "static": Job(mode="static", pin="none"),
    "given": Job(env={"GREETING": 'it\'s $(date); "x"\nsecond line', "NCCL_ALGO": "ring;allreduce:tree"}),
}


def check_golden(name: str, text: str) -> None:
    """Compare with tests/golden/<name>; TORCHRACK_GOLDEN=write rewrites it."""
    path = GOLDEN / name
    if os.environ.get("TORCHRACK_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    want = path.read_text()
    diff = "".join(difflib.unified_diff(want.splitlines(True), text.splitlines(True), name, "rendered"))
    assert not diff, f"\n{diff}"


def made(job: Job, rack: Rack = RACK) -> Plan:
    return plan(rack, facts(rack, swapped=("node1",), cores=2, shared_by=2), job)


@pytest.mark.parametrize("name", JOBS)
def test_golden(name: str) -> None:
    parts = []
    for node, files in node_files(made(JOBS[name])).items():
        parts += [f"==> {node}/{path}\n{content.decode()}" for path, content in sorted(files.items())]
    check_golden(f"scripts-{name}.txt", "\n".join(parts))


def test_golden_constant() -> None:
    files = {k: v for k, v in constant_files().items() if k.endswith(".sh")}
    check_golden("scripts-constant.txt", "\n".join(f"==> {k}\n{v.decode()}" for k, v in files.items()))


def lay_out(folder: Path, job: Job) -> Path:
    """node1's scripts in a folder, with a stub torchrun that tells argv and environment."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (constant_files() | node_files(made(job))["node1"]).items():
        (folder / name).write_bytes(content)
    stub = folder / "torchrun"
    code = "import json, os, sys; print(json.dumps({'argv': sys.argv[1:], 'env': dict(os.environ)}))"
    stub.write_text(f"#!{sys.executable}\n{code}\n")
    stub.chmod(0o755)
    return folder


@pytest.mark.parametrize("name", JOBS)
def test_bash_and_shellcheck_accept_them(name: str, tmp_path: Path) -> None:
    folder = lay_out(tmp_path / "a b'c", JOBS[name])
    scripts = [str(p) for p in folder.glob("*.sh")]
    assert len(scripts) == 3
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
    checker = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([str(checker), "-s", "bash", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def launch(folder: Path, *args: str) -> dict[str, dict[str, str]]:
    env = {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(folder / "launch.sh"), *args], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_stub_torchrun_gets_flags_then_the_runs_own_and_its_conf_file(tmp_path: Path) -> None:
    folder = lay_out(tmp_path / "with space", JOBS["c10d"])
    told = launch(folder, "--rdzv-id=r1", "train.py", "--name", "a b")
    argv: list[str] = told["argv"]  # type: ignore[assignment]
    assert argv[:2] == ["--nnodes=2", "--max-restarts=0"]
    assert argv[-4:] == ["--rdzv-id=r1", "train.py", "--name", "a b"]
    assert told["env"]["NCCL_CONF_FILE"] == str(folder / "nccl.conf")
    assert told["env"]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert not [name for name in told["env"] if name.startswith("NCCL_") and name != "NCCL_CONF_FILE"]


ENV_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=80)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.from_regex(r"T_[A-Z0-9_]{1,8}", fullmatch=True), ENV_TEXT, min_size=1, max_size=4))
def test_any_text_survives_env_sh_into_the_process(values: dict[str, str], tmp_path: Path) -> None:
    told = launch(lay_out(tmp_path / "scripts", Job(env=values)), "x.py")["env"]
    assert {name: told[name] for name in values} == values


def nccl_reads(conf: bytes) -> dict[str, str]:
    """What NCCL makes of the file: lines split at the first '=', '#' only in column 1 (src/misc/param.cc)."""
    lines = [line for line in conf.decode().split("\n") if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


NCCL_TEXT = st.text(st.characters(exclude_characters="\0\n\r", exclude_categories=["Cs"]), min_size=1, max_size=200)


@given(value=NCCL_TEXT.filter(lambda v: v == v.strip() and len(v.encode()) <= NCCL_VALUE_MAX))
def test_what_nccl_conf_carries_arrives_unchanged(value: str) -> None:
    conf = node_files(made(Job(env={"NCCL_X": value})))["node1"]["nccl.conf"]
    assert nccl_reads(conf)["NCCL_X"] == value


def test_changing_one_address_changes_only_node_files() -> None:
    before, after = (
        made(JOBS["c10d"]),
        made(JOBS["c10d"], Rack(nodes=2, mgmt_subnet="10.79.3.0/24", fabric_subnet="10.78.4.0/24")),
    )
    assert digest(constant_files()) == digest(constant_files())
    changed = {
        path
        for node in RACK.node_names
        for path, content in node_files(before)[node].items()
        if content != node_files(after)[node][path]
    }
    assert changed == {"env.sh"}
    for content in constant_files().values():
        assert b"10.78." not in content and b"29400" not in content
