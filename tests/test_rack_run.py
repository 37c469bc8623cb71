"""The main job for real, on every runtime: labs, users' scripts, wires, records, what the prompt shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from racks import RUNTIMES, Cli

from torchrack.run.folder import RackFolder
from torchrack.run.lifecycle import LOCAL_PLACES

pytestmark = pytest.mark.slow
PAYLOAD = 5 * 16 * (1 << 20)  # lab 01: five all-reduces of 16 MiB; on a ring each rank sends 2(n-1)/n of it


@pytest.fixture(scope="module", params=RUNTIMES)
def cli(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    cli = Cli(tmp_path_factory.mktemp("home"), request.param, "runs")
    yield cli
    assert cli.down().returncode == 0


def sent(result: dict, net: str, node: str | None = None) -> int:
    return sum(row["tx_bytes"] for row in result["wires"] if row["net"] == net and node in (None, row["node"]))


def test_lab_01_as_a_person_sees_it(cli: Cli) -> None:
    done = cli.lab("01", "--nodes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^node[01]/0 +rank [01] of 2: \[3\.0, 3\.0\]$", done.stdout, re.MULTILINE)) == 2
    for phase in ("runtime", "rack", "plan", "scripts", "joined", "run", "record"):
        assert re.search(rf"^✓ {phase} ", done.stderr, re.MULTILINE), phase
    assert "← pinned" in done.stdout
    assert "waiting at most" in done.stderr
    assert re.search(r"✓ lab 01 passed in [\d.]+ s", done.stderr) and "Next: make break LAB=01" in done.stderr


def test_json_is_one_object_and_nothing_else_on_stdout(cli: Cli) -> None:
    result = cli.result(cli.lab("01", "--nodes", "2", "--json"))
    assert result["verdict"] == "passed" and result["kind"] is None and result["runtime"] == cli.runtime
    assert [row["rank"] for row in result["ranks"]] == [0, 1]
    assert {"rank", "node", "local_rank", "exit", "signal", "log"} == set(result["ranks"][0])
    assert {"node", "nic", "net", "tx_bytes", "rx_bytes"} == set(result["wires"][0])
    record = Path(result["record"])
    for name in (
        "plan.json",
        "wires.json",
        "result.json",
        "scripts/node0/env.sh",
        "logs/node1/0.log",
        "logs/node1/agent.log",
    ):
        assert (record / name).is_file(), name
    assert json.loads((record / "result.json").read_text()) == result
    # pinned: the payload went over fabric, and next to nothing over mgmt
    assert result["pinned_share"] > 0.99
    for node in ("node0", "node1"):
        assert sent(result, "mgmt", node) <= 64_000
        assert sent(result, "fabric", node) == pytest.approx(PAYLOAD, rel=0.05)


def test_the_same_command_unpinned_rides_mgmt(cli: Cli) -> None:
    result = cli.result(cli.lab("01", "--nodes", "2", "--pin", "none", "--json"))
    assert result["verdict"] == "passed" and result["pinned_share"] is None
    mgmt, fabric = sent(result, "mgmt"), sent(result, "fabric")
    assert mgmt / (mgmt + fabric) >= 0.95
    assert mgmt == pytest.approx(2 * PAYLOAD, rel=0.05)


def test_four_nodes_of_two_ranks(cli: Cli) -> None:
    done = cli.lab("01", "--nodes", "4", "--nproc", "2", "--json")
    assert "taken down and made anew: nodes 2 → 4" in done.stderr
    result = cli.result(done)
    assert result["verdict"] == "passed"
    places = [(row["rank"], row["node"], row["local_rank"]) for row in result["ranks"]]
    assert places == [(2 * n + i, f"node{n}", i) for n in range(4) for i in range(2)]
    # the ring's neighbours cross nodes once a node: 2(8-1)/8 of the payload
    assert sent(result, "fabric", "node0") == pytest.approx(PAYLOAD * 2 * 7 / 8, rel=0.05)
    assert sent(result, "lo", "node0") == pytest.approx(PAYLOAD * 2 * 7 / 8, rel=0.05)


SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from helper import GREETING
dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(1) * rank
dist.all_reduce(x)
with open(os.path.join(os.environ["OUT"], "told.json"), "w") as f:
    json.dump({"rank": rank, "sum": x.item(), "args": sys.argv[1:], "env": os.environ.get("GREETING"), "cwd": os.listdir(".")}, f)
open("beside.txt", "a").write("x")
open(sys.argv[-2], "w").write(str(rank))
print(GREETING, "from", rank)
dist.destroy_process_group()
"""


def test_a_users_script_with_its_folder_arguments_environment_and_outputs(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("GREETING = 'höl [1;31m'\n")
    (tmp_path / "data.txt").write_text("x")
    args = ["--name", "a b", 'it\'s; $(date) "q"', "", "{OUT}/mine.txt", "--json"]
    greeting = "two\nlines 'and' \"quotes\" $HOME"
    options = ("--nodes", "2", "--nproc", "2", "--json", "--env", f"GREETING={greeting}")
    result = cli.result(cli.script(tmp_path / "train.py", *args, options=options))
    assert result["verdict"] == "passed"
    for rank in range(4):
        told = json.loads((Path(result["record"]) / "out" / f"rank{rank}" / "told.json").read_text())
        assert told["args"][:-2] == args[:-2] and told["args"][-1] == "--json"
        assert (Path(result["record"]) / "out" / f"rank{rank}" / "mine.txt").read_text() == str(rank)
        assert told["env"] == greeting and told["sum"] == 6.0
        assert {"train.py", "helper.py", "data.txt"} <= set(told["cwd"])
    assert (Path(result["record"]) / "out/node1/beside.txt").read_text() == "xx"
    assert not (Path(result["record"]) / "out/node1/data.txt").exists(), "what was sent is not brought home"
    log = (Path(result["record"]) / "logs/node1/1.log").read_text()
    assert "höl [1;31m from 3\n" in log


def test_missing_imports_are_named_before_anything_starts(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch, nosuchpackage, otherone.sub\n")
    done = cli.script(tmp_path / "train.py", options=("--nodes", "2"))
    assert done.returncode == 4
    assert "nosuchpackage, otherone" in done.stderr and "fix: " in done.stderr


def test_a_failing_rank_is_told_with_its_exit_and_the_others_end(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time, sys\nprint('here', flush=True)\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)\n"
    )
    result = cli.result(cli.script(tmp_path / "train.py", options=("--nodes", "2", "--json")))
    assert result["verdict"] == "failed" and result["seconds"] < 60
    assert result["ranks"][1]["exit"] == 7
    assert result["ranks"][0]["exit"] in (None, 1)


def test_constant_files_are_equal_on_every_node_as_read_back(cli: Cli) -> None:
    assert cli.lab("01", "--nodes", "2", "--json").returncode == 0
    place = LOCAL_PLACES[cli.runtime](cli.rack, RackFolder(cli.rack, cli.home).place)
    for path in ("scripts/launch.sh", "scripts/rank.sh", "scripts/supervisor.py", "labs/01-one-world/lab.py"):
        contents = {place.read(node, path) for node in ("node0", "node1")}
        assert len(contents) == 1, path
        here = Path("labs/01-one-world/lab.py").read_bytes() if path.startswith("labs/") else None
        assert here is None or contents == {here}
        seen = CONSTANT.setdefault(path, contents)
        assert seen == contents, f"{path} differs between runtimes"


CONSTANT: dict[str, set[bytes]] = {}


def test_status_exec_logs_and_nic(cli: Cli) -> None:
    rows = json.loads(cli("status", "--rack", cli.rack, "--json").stdout)
    assert [(row["node"], row["state"]) for row in rows] == [("node0", "up"), ("node1", "up")]
    done = cli("exec", "--rack", cli.rack, "node1", "sh", "-c", "hostname; id -u; exit 3")
    assert (done.returncode, done.stdout.split()[0]) == (3, "node1")
    assert done.stdout.split()[1] != "0", "jobs and exec are not root"
    assert cli("exec", "--rack", cli.rack, "--root", "node1", "id", "-u").stdout.strip() == "0"
    assert cli("exec", "--rack", cli.rack, "node9", "true").returncode == 2
    assert "node0/0    rank 0 of 2: [3.0, 3.0]" in cli("logs", "--rack", cli.rack).stdout
    choices = json.loads(cli("nic", "--rack", cli.rack, "--json").stdout)
    gloo = {(row["node"], row["setting"]): row["net"] for row in choices if row["library"] == "gloo"}
    assert gloo["node1", "unpinned"] == "mgmt" and gloo["node1", "planned"] == "fabric"
    told = {(row["node"], row["setting"]): row["net"] for row in choices if row["library"] == "torchrun"}
    assert told["node0", "planned"] == "fabric"


def test_a_small_dev_shm_is_what_the_node_sees(cli: Cli) -> None:
    done = cli(*cli.on_rack("up"), "--nodes", "1", "--shm", "64m", "--json")
    assert [row["shm"] for row in cli.result(done)] == [64 << 20]
    assert cli.down().returncode == 0
    assert json.loads(cli("status", "--rack", cli.rack, "--json").stdout) == []
    assert cli.down().returncode == 0, "down of what is not there is a success"


def test_eight_nodes(cli: Cli) -> None:
    result = cli.result(cli.lab("01", "--nodes", "8", "--json"))
    assert result["verdict"] == "passed" and len(result["ranks"]) == 8
    assert cli.down().returncode == 0
