"""The plan for schedulers: the sbatch script is run with stubs (test_slurm.py: by Slurm), the JobSet held against its published schema."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from racks import Cli

from torchrack.model.job import Job
from torchrack.model.rack import Rack
from torchrack.plan.export import jobset, sbatch
from torchrack.plan.plan import Plan
from torchrack.run.preview import preview

WORDS = ("train.py", "--name", "a b; $(touch x) 'q' \"d\"")
# srun as far as the script needs it: one command, or one on each of two nodes.
SRUN = """#!/bin/bash
echo "srun $*" >> "$LOG"
alone=; while [[ $1 == -* ]]; do [[ $1 == --nodes=1 ]] && alone=1; shift; done
if [ -n "$alone" ]; then exec "$@"; fi
for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || exit 1; done
"""
TORCHRUN = """#!/bin/bash
printf '%s|' "$SLURM_NODEID" "$GLOO_SOCKET_IFNAME" "$NCCL_SOCKET_IFNAME" "$OMP_NUM_THREADS" "$@"; echo
"""


@pytest.fixture
def made(home: Path) -> Plan:
    # 127.0.0.0/8 is the data network here: every machine has an address in it.
    return preview(Rack(name="none", nodes=2, fabric_subnet="127.0.0.0/8"), Job(nproc=4, env={"FOO": "x'y $z"}), 8)


def test_the_sbatch_script_starts_one_agent_a_node_as_planned(made: Plan, tmp_path: Path) -> None:
    tools = {"srun": SRUN, "torchrun": TORCHRUN, "scontrol": "#!/bin/sh\nprintf 'n1\\nn2\\n'\n"}
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(sbatch(made, WORDS, name="try", deadline=90, gpus=4))
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}:/usr/sbin",
        "LOG": str(tmp_path / "log"),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "77",
        "SLURM_CPUS_ON_NODE": "16",
    }
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for index, line in enumerate(done.stdout.splitlines()):
        node, gloo, nccl, threads, *argv = line.split("|")[:-1]
        assert (node, gloo, nccl, threads) == (str(index), "lo", "=lo", "4")
        assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-id=77", "--local-addr=127.0.0.1"} <= set(argv)
        assert "--rdzv-endpoint=127.0.0.1:29400" in argv
        assert f"--rdzv-conf=is_host={1 - index},join_timeout={made.join_bound}" in argv
        assert tuple(argv[-3:]) == WORDS
    assert len(done.stdout.splitlines()) == 2 and not (tmp_path / "x").exists()
    assert "--kill-on-bad-exit=1" in (tmp_path / "log").read_text()
    head = script.read_text()
    assert "#SBATCH --time=2\n" in head and "#SBATCH --gpus-per-node=4\n" in head and "#SBATCH --exclusive\n" in head
    assert subprocess.run([Path(sys.executable).with_name("shellcheck"), script], capture_output=True).returncode == 0


def test_a_node_off_the_data_network_says_so(made: Plan, tmp_path: Path) -> None:
    assert "has no address in 127.0.0.0/8" in sbatch(made, WORDS, name="try", deadline=90)


def test_the_jobset_keeps_to_the_published_schema(made: Plan) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    found = jobset(made, WORDS, name="try", deadline=90, image="img:1", gpus=8)
    assert known(models.JobsetV1alpha2JobSet.from_dict(found).to_dict(), found) == []


def known(kept: Any, given: Any, path: str = "") -> list[str]:
    """Paths of what was given and that the schema's model does not know."""
    if isinstance(given, dict):
        lost = [f"{path}.{key}" for key in given if key not in kept]
        return lost + [p for key in given if key in kept for p in known(kept[key], given[key], f"{path}.{key}")]
    if isinstance(given, list):
        pairs = enumerate(zip(kept, given, strict=True))
        return [p for i, (k, g) in pairs for p in known(k, g, f"{path}[{i}]")]
    return []


def test_the_jobset_says_what_the_plan_says(made: Plan) -> None:
    found = jobset(made, WORDS, name="try", deadline=90, image="img:1", gpus=8)
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completionMode"], job["activeDeadlineSeconds"]) == (2, "Indexed", 90)
    container = job["template"]["spec"]["containers"][0]
    assert {"name": "FOO", "value": "x'y $z"} in container["env"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    stub = 'torchrun() { printf \'%s|\' "$@"; }; exec() { "$@"; }; '
    env = {"PATH": os.environ["PATH"], "POD_IP": "10.0.0.9", "JOB_COMPLETION_INDEX": "0"}
    done = subprocess.run(["bash", "-c", stub + container["command"][2]], env=env, capture_output=True, text=True)
    argv = done.stdout.split("|")[:-1]
    assert "--rdzv-endpoint=try-node-0-0.try:29400" in argv and "--local-addr=10.0.0.9" in argv
    assert f"--rdzv-conf=is_host=1,join_timeout={made.join_bound}" in argv and tuple(argv[-3:]) == WORDS


def test_the_command_prints_both(home: Path) -> None:
    cli = Cli(home, "none", "none")
    assert cli("export", "--to", "slurm", "train.py").stdout.startswith("#!/usr/bin/env bash\n")
    assert yaml.safe_load(cli("export", "--to", "k8s", "train.py").stdout)["kind"] == "JobSet"
    wrong = cli("export", "--to", "pbs", "train.py")
    assert (wrong.returncode, "slurm or --to k8s" in wrong.stderr) == (2, True)
