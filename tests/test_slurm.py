"""The exported sbatch script in a real Slurm: slurmctld and two slurmd on a netns rack, as an ordinary user.

node0's home, which every node sees, stands for the cluster's shared file system.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pytest
from racks import Cli, tagged

from torchrack.model.rack import Rack
from torchrack.places.local import wait_for
from torchrack.places.netns import Netns

pytestmark = [pytest.mark.slurm, pytest.mark.netns, pytest.mark.slow]

# Without munge: auth/none takes everyone for who they say they are. /tmp is each node's own.
CONF = """
ClusterName=rack
SlurmctldHost=node0
SlurmUser=job
SlurmdUser=job
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SlurmdParameters=config_overrides
StateSaveLocation=/tmp
SlurmdSpoolDir=/tmp
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
NodeName=node[0-1] CPUs=4
PartitionName=all Nodes=ALL Default=YES
"""
RUNNING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}
WORDS = ["--name", "a b; $(touch x) 'q' \"d\" \\", ""]
PAYLOAD = 16 << 20

TRAINING = f"""
import json, os, socket, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.full(({PAYLOAD // 4},), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
dist.barrier()
lines = [line.split() for line in open("/proc/net/dev")]
said = {{
    "rank": dist.get_rank(),
    "sum": tensor.unique().tolist(),
    "host": socket.gethostname(),
    "argv": sys.argv[1:],
    "nic": os.environ["GLOO_SOCKET_IFNAME"],
    "threads": os.environ["OMP_NUM_THREADS"],
    "sent": {{line[0][:-1]: int(line[9]) for line in lines[2:]}},
}}
sys.stdout.write(json.dumps(said) + "\\n")  # one write, for two ranks share the pipe
dist.destroy_process_group()
"""

FAILING = """
import time
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    raise RuntimeError(f"had enough at {time.time()}")
print("rank 0 stays", flush=True)
time.sleep(600)
"""


@dataclass
class Slurm:
    place: Netns
    cli: Cli
    daemons: list[int] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return Path(self.place.home("node0"))

    @property
    def conf(self) -> str:
        return f"SLURM_CONF={self.home}/slurm.conf"

    def __call__(self, *argv: str, node: str = "node0") -> str:
        done = self.place.run(node, ["env", self.conf, *argv], timeout=20)
        assert done.code == 0, f"{shlex.join(argv)}: {done.stderr.decode()}"
        return done.stdout.decode()

    def start(self) -> None:
        self.place.put("node0", {"slurm.conf": CONF.format(home=self.home).encode()})
        version = tuple(map(int, re.findall(r"\d+", self("slurmd", "-V"))[:2]))
        # cgroup/v1 is loaded and never used, and the one plugin of Debian 12's 22.05 that wants no mounted cgroup.
        plugin = b"disabled" if version >= (24, 5) else b"cgroup/v1"
        self.place.put("node0", {"cgroup.conf": b"CgroupPlugin=" + plugin + b"\n"})
        # Each makes itself a daemon, which ends with its node.
        self("slurmctld")
        self("slurmd")
        self("slurmd", node="node1")
        idle = ["idle", "idle"]
        assert wait_for(lambda: self("sinfo", "-hNo", "%t").split() == idle, 20, pause=0.2), self.logs()
        self.daemons = self.processes()

    def job(self, script: str, *options: str) -> tuple[dict[str, str], str]:
        """Export, submit and wait until nothing is left of it: what Slurm has to say of the job, and the job's log."""
        (self.home / "train.py").write_text(script)
        exported = self.cli("export", "--to", "slurm", "--nodes", "2", *options, "train.py")
        assert exported.returncode == 0, exported.stderr
        (self.home / "job.sbatch").write_text(exported.stdout)
        number = self("sbatch", "--parsable", "job.sbatch").strip()

        def facts() -> dict[str, str]:
            words = self("scontrol", "show", "job", "--oneliner", number).split()
            return dict(word.split("=", 1) for word in words if "=" in word)

        assert wait_for(lambda: facts()["JobState"] not in RUNNING, 120, pause=0.5), self.logs()
        assert wait_for(lambda: self.processes() == self.daemons, 10, pause=0.2), tagged(self.conf)
        return facts(), (self.home / f"torchrack-{number}.log").read_text()

    def processes(self) -> list[int]:
        """The daemons, and all that came from them on any node."""
        return sorted(pid for pid, _ in tagged(self.conf))

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in self.home.glob("*.log"))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    place = Netns(f"slurm-{os.getpid()}", folder / "rack")
    made = Slurm(place, Cli(folder, "netns", place.name))
    try:
        place.up(Rack(name=place.name, nodes=2, shm=1 << 28, nic_names="differ"), lambda line: None)
        made.start()
        yield made
    finally:
        place.down()
    assert made.processes() == [] and not place.state.exists()


def test_the_exported_job_trains_over_the_fabric(slurm: Slurm) -> None:
    facts, log = slurm.job(TRAINING, "--nproc", "2", "--args", shlex.join(WORDS))
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), log
    ranks = [json.loads(line.partition(": ")[2]) for line in log.splitlines() if '"rank"' in line]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1, 2, 3], log
    for rank in ranks:
        # The second node's NICs have other names.
        host, fabric, mgmt = [("node0", "fabric", "mgmt"), ("node1", "ens4", "ens3")][rank["rank"] // 2]
        assert (rank["host"], rank["nic"], rank["sum"], rank["argv"]) == (host, fabric, [10.0], WORDS)
        assert rank["threads"] == "2", "a node's four cores divided by its two ranks"
        assert rank["sent"][fabric] > PAYLOAD / 2 and rank["sent"][mgmt] < PAYLOAD / 10, rank["sent"]
    assert not (slurm.home / "x").exists()


def test_a_rank_that_fails_ends_the_job_on_both_nodes(slurm: Slurm) -> None:
    facts, log = slurm.job(FAILING)
    assert facts["JobState"] == "FAILED" and facts["ExitCode"] != "0:0", log
    failed = re.search(r"RuntimeError: had enough at ([\d.]+)", log)
    assert failed and "rank 0 stays" in log, log
    assert datetime.fromisoformat(facts["EndTime"]).timestamp() - float(failed[1]) < 30, facts
