"""HOSTS=… end to end against real sshd: preflight, deploy, launch, stop, and what the hosts hold at each point."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from racks import Cli, Done, tagged, wait_until
from sshd import Machines, machines

from torchrack.model.job import Job
from torchrack.model.rack import Rack
from torchrack.plan.plan import plan
from torchrack.plan.render import constant_files, node_files, sha256
from torchrack.run.deploy import deployed, rented
from torchrack.run.folder import RackFolder
from torchrack.run.preview import preview

pytestmark = [pytest.mark.ssh, pytest.mark.netns, pytest.mark.slow]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(f"rented-{os.getpid()}", 2, tmp_path_factory.mktemp("there")) as made:
        yield made


class Remote(Cli):
    """The CLI with HOSTS, as make passes them."""

    def named(self, there: Machines) -> list[str]:
        file = there.inventory(self.home / "hosts.yml")
        return ["--hosts", str(file), "--known-hosts", str(there.known_hosts)]

    def on(self, there: Machines, command: str, *more: str) -> Done:
        return self(command, *self.named(there), *more)


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Remote:
    return Remote(tmp_path_factory.mktemp("home"), "ssh", "remote")


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, cli: Remote) -> None:
    monkeypatch.setenv("TORCHRACK_HOME", str(cli.home))


def files_of(there: Machines) -> list[str]:
    return [str(path) for machine in there.all for path in machine.folder.rglob("*")]


def payload(there: Machines, index: int) -> str:
    current = there.all[index].folder / "remote" / f"node{index}" / "current"
    return current.readlink().name


def sessions(there: Machines) -> int:
    return sum((there.keys / f"{machine.node}.log").read_text().count("Starting session:") for machine in there.all)


def test_preflight_of_healthy_hosts_passes_and_changes_nothing(there: Machines, cli: Remote) -> None:
    done = cli.on(there, "preflight", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["state"] for row in rows} == {"ok"}
    checks = {row["check"] for row in rows if row["node"] == "node1"}
    assert {"reachable", "clock", "torch", "/dev/shm", "data NIC", "data network", "earlier runs"} <= checks
    assert files_of(there) == []
    assert not (cli.home / ".torchrack").exists()


def test_a_deep_preflight_really_imports_torch(there: Machines, cli: Remote) -> None:
    done = cli.on(there, "preflight", "--deep", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    imported = [row for row in json.loads(done.stdout) if row["check"] == "import torch"]
    assert [(row["node"], row["state"]) for row in imported] == [("node0", "ok"), ("node1", "ok")]
    assert all(row["value"].startswith("2.") and row["value"].endswith("GPUs") for row in imported)


def test_a_plan_tells_everything_and_changes_nothing(there: Machines, cli: Remote) -> None:
    done = cli.on(there, "deploy", "--plan")
    assert done.returncode == 0, done.stderr
    for told in (
        "fabric 10.78.0.10",
        "fabric 10.78.0.11",
        "29400 on node0",
        "scripts/launch.sh",
        "nothing was changed",
    ):
        assert told in done.stdout + done.stderr, told
    assert files_of(there) == []


def test_launch_before_deploy_says_what_is_missing(there: Machines, cli: Remote) -> None:
    done = cli.on(there, "launch", "--lab", "01")
    assert (done.returncode, "make deploy HOSTS=" in done.stderr) == (2, True), done.stderr
    other = cli.on(there, "launch", "--rack", "misspelt", "--lab", "01")
    assert other.returncode == 2 and not (cli.home / ".torchrack/misspelt").exists()


def test_deploy_puts_the_same_scripts_there_as_a_local_rack_has(there: Machines, cli: Remote) -> None:
    asked = sessions(there)
    done = cli.on(there, "deploy")
    assert done.returncode == 0, done.stderr
    assert sessions(there) - asked == len(there.all), "facts, files and the switch: one session a host"
    live = deployed(rented(str(cli.home / "hosts.yml"), None, "known", there.known_hosts))
    local = preview(Rack(name="no-such-rack"), Job(), cores=os.cpu_count() or 1)
    same_facts = [fact.model_copy(update={"shared_by": 2}) for fact in live.facts]
    assert node_files(plan(live.rack, same_facts, Job())) == node_files(local), "a function of the plan alone"
    for node, files in node_files(plan(live.rack, live.facts, Job())).items():
        wanted = sha256(constant_files() | files)
        have = {name: live.place.read(node, f"scripts/{name}") for name in wanted}
        assert sha256(have) == wanted
    assert live.place.read("node1", "labs/01-one-world/lab.py").startswith(b'"""')


def test_an_unchanged_deploy_sends_nothing_and_is_one_round_trip(there: Machines, cli: Remote) -> None:
    before, asked = [payload(there, i) for i in range(2)], sessions(there)
    done = cli.on(there, "deploy", "--json")
    assert sessions(there) - asked == len(there.all)
    pushed = json.loads(done.stdout)["pushed"]
    assert [(one["same"], one["sent"]) for one in pushed.values()] == [(True, 0)] * 2
    assert [payload(there, i) for i in range(2)] == before


def test_a_file_that_was_changed_there_is_put_right(there: Machines, cli: Remote) -> None:
    path = there.all[1].folder / "remote" / "node1" / "current" / "scripts" / "launch.sh"
    path.write_bytes(path.read_bytes() + b"# mine\n")
    done = cli.on(there, "deploy", "--json")
    assert {node: (one["same"], one["sent"]) for node, one in json.loads(done.stdout)["pushed"].items()} == {
        "node0": (True, 0),
        "node1": (False, 1),
    }
    assert b"# mine" not in path.read_bytes()


def test_another_job_sends_only_what_differs_and_the_last_three_stay(there: Machines, cli: Remote) -> None:
    first = payload(there, 0)
    for port in ("29401", "29402", "29403"):
        done = cli.on(there, "deploy", "--json", "--port", port)
        assert {one["sent"] for one in json.loads(done.stdout)["pushed"].values()} == {1}, "env.sh alone has the port"
    payloads = there.all[0].folder / "remote/node0/payload"
    assert wait_until(lambda: len([*payloads.iterdir()]) == 3, 10), "hosts tidy up when the deployer has gone"
    assert payload(there, 0) in {path.name for path in payloads.iterdir()} and not (payloads / first).exists()


def test_launch_of_a_lab_passes_and_leaves_nothing_running(there: Machines, cli: Remote) -> None:
    done = cli.on(there, "launch", "--lab", "01", "--json")
    assert done.returncode == 0, done.stderr
    result = cli.result(done)
    assert (result["verdict"], result["runtime"], result["pinned_share"]) == ("passed", "ssh", 1.0)
    assert "golden ok: rank 1" in (Path(result["record"]) / "logs/node1/0.log").read_text()
    assert "this job's node files" in done.stderr, "the deploy before was for another port"
    assert tagged(f"TORCHRACK_RUN={result['run']}") == []
    stopped = cli.on(there, "stop", "--json")
    assert (stopped.returncode, json.loads(stopped.stdout)) == (0, {"node0": [], "node1": []})


def test_status_exec_and_logs_know_the_hosts(there: Machines, cli: Remote) -> None:
    rows = json.loads(cli("status", "--rack", "remote", "--json").stdout)
    assert [(row["node"], row["state"], row["address"]) for row in rows] == [
        ("node0", "up", "10.78.0.10"),
        ("node1", "up", "10.78.0.11"),
    ]
    assert cli("exec", "--rack", "remote", "node1", "hostname").stdout == "node1\n"
    assert "node1/0    rank 1 of 2: [3.0, 3.0]" in cli("logs", "--rack", "remote").stdout


def test_losses_are_those_of_the_local_rack(there: Machines, cli: Remote, tmp_path: Path) -> None:
    def losses(result: dict[str, Any]) -> list[str]:
        lines = (Path(result["record"]) / "logs/node0/0.log").read_text().splitlines()
        return [line for line in lines if "loss" in line]

    far = cli.on(there, "launch", "--lab", "08", "--json")
    assert far.returncode == 0, far.stderr
    local = Cli(tmp_path, "netns", f"near-{os.getpid()}")
    try:
        near = local.lab("08", "--nodes", "2", "--json")
    finally:
        local.down()
    assert near.returncode == 0, near.stderr
    wanted = losses(cli.result(near))
    assert len(wanted) > 1 and losses(cli.result(far)) == wanted


def test_a_run_that_is_left_to_itself_is_collected_later(there: Machines, cli: Remote, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import os, time; import torch.distributed as d; d.init_process_group('gloo'); time.sleep(15); d.barrier()\n"
        "open(os.environ['OUT'] + '/said', 'w').write(os.environ['RANK']); print('rank', d.get_rank(), 'done'); d.destroy_process_group()\n"
    )
    done = cli.on(there, "launch", "--detach", "--deadline", "120", str(script))
    assert done.returncode == 0 and "goes on without us" in done.stdout, done.stderr
    run = done.stdout.split()[1]
    assert len(tagged(f"TORCHRACK_RUN={run}")) >= 2, "nobody of ours is connected, and it runs"
    first = json.loads(cli.on(there, "collect", "--json").stdout)
    stood = Path(first["folder"]) / "node1"
    assert first["runs"] == {run: None} and "supervisor.py" in (stood / "processes.txt").read_text()
    assert {"sockets.txt", "kernel.txt", "stacks.txt", "ras.txt"} <= {path.name for path in stood.iterdir()}
    assert wait_until(lambda: not tagged(f"TORCHRACK_RUN={run}"), 90)
    last = cli.on(there, "collect", "--json")
    result = json.loads(last.stdout)["runs"][run]
    assert (last.returncode, result["verdict"], result["pinned_share"]) == (0, "passed", 1.0), result
    record = cli.home / ".torchrack/remote" / run
    assert "rank 1 done" in (record / "logs/node1/0.log").read_text()
    assert (record / "out/rank1/said").read_text() == "1"
    again = cli.on(there, "collect", "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["runs"] == {}, again.stderr


def test_secrets_and_awkward_words_arrive_and_no_record_has_the_secret(
    there: Machines, cli: Remote, tmp_path: Path
) -> None:
    script = tmp_path / "odd.py"
    script.write_text(
        "import json, os, sys\nprint(json.dumps(sys.argv[1:]), os.environ['TOKEN'])\n"
        "assert os.environ['TOKEN'] == 'x'.join(['hush', 'hush'])\n"
    )
    words = ["a b", "$(touch /tmp/torchrack-injected)", "; exit 3 #", "'\"", "é"]
    done = cli("launch", *cli.named(there), "--secret", "TOKEN", "--json", str(script), *words, TOKEN="hushxhush")
    assert done.returncode == 0, done.stderr
    record = Path(cli.result(done)["record"])
    assert f"{json.dumps(words)} <TOKEN>" in (record / "logs/node1/0.log").read_text()
    assert "hushxhush" not in done.stdout + done.stderr
    kept = [path for path in (*record.rglob("*"), *(m.folder for m in there.all)) if path.is_file()]
    assert kept and not [path for path in kept if b"hushxhush" in path.read_bytes()]
    assert not Path("/tmp/torchrack-injected").exists()
    unset = cli("launch", *cli.named(there), "--secret", "NO_SUCH_TOKEN", str(script))
    assert (unset.returncode, "NO_SUCH_TOKEN: not set here" in unset.stderr) == (2, True)


def test_a_detached_run_is_stopped_by_name(there: Machines, cli: Remote, tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text("import time; time.sleep(300)\n")
    done = cli.on(there, "launch", "--detach", str(script))
    run = done.stdout.split()[1]
    second = cli.on(there, "launch", str(script))
    assert second.returncode == 4 and f"run {run} is still alive" in second.stderr, second.stderr
    assert "make collect" in second.stderr and "make down" not in second.stderr, "down would lose what it has written"
    again = cli.on(there, "launch", "--detach", str(script))
    assert again.returncode == 4 and len(tagged(f"TORCHRACK_RUN={run}")) >= 2, "the one that is refused ends no other"
    for i, machine in enumerate(there.all):
        kept = [path.name for path in (machine.folder / f"remote/node{i}/runs").iterdir()]
        assert kept == [run], "what was refused leaves nothing there, nor here"
    assert run in cli("status", "--rack", "remote").stdout
    stopped = cli.on(there, "stop", "--json")
    assert json.loads(stopped.stdout) == {"node0": [run], "node1": [run]}
    assert tagged(f"TORCHRACK_RUN={run}") == []
    result = json.loads(cli.on(there, "collect", "--json").stdout)["runs"][run]
    assert result["verdict"] == "interrupted" and "make stop" in result["why"]


def test_a_run_that_nobody_collected_is_not_lost_in_silence(there: Machines, cli: Remote, tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text("import time\nprint('hello from a detached rank', flush=True)\ntime.sleep(300)\n")
    run = cli.on(there, "launch", "--detach", str(script)).stdout.split()[1]
    assert f"run {run} was left to itself: make collect RACK=remote" in cli("status").stderr
    logs = cli("logs", "--rack", "remote")
    assert (logs.returncode, "make collect HOSTS=…" in logs.stderr) == (2, True), logs.stderr
    assert wait_until(lambda: "hello from a detached rank" in cli.on(there, "collect").stdout, 30), "as it stands now"
    down = cli("down", "--rack", "remote")
    assert (down.returncode, run in down.stderr, "DISCARD=1" in down.stderr) == (4, True, True), down.stderr
    assert len(tagged(f"TORCHRACK_RUN={run}")) >= 2, "it goes on"
    assert cli("down", "--rack", "remote", "--discard").returncode == 0 and tagged(f"TORCHRACK_RUN={run}") == []
    assert cli("down", "--rack", "remote").returncode == 0, "there is nothing left to lose"
    assert cli.on(there, "deploy").returncode == 0
    told = cli.on(there, "collect", "--json")
    assert run in told.stderr and "no longer on" in told.stderr and json.loads(told.stdout)["runs"] == {}
    assert run not in cli.on(there, "collect", "--json").stderr, "said once"


def test_a_file_that_was_changed_on_a_host_is_not_started(there: Machines, cli: Remote) -> None:
    assert cli.on(there, "deploy").returncode == 0
    script = there.all[1].folder / "remote/node1/scripts/launch.sh"
    good = script.read_bytes()
    script.write_bytes(good + b"# mine\n")
    done = cli.on(there, "launch", "--lab", "01")
    assert (done.returncode, "scripts/launch.sh on node1" in done.stderr) == (4, True), done.stderr
    assert cli.on(there, "deploy").returncode == 0
    assert script.read_bytes() == good, "deploy makes it what it must be"


def test_hosts_that_were_not_deployed_to(there: Machines, cli: Remote) -> None:
    known = ["--known-hosts", str(there.known_hosts)]
    done = cli("launch", "--hosts", "job@192.0.2.77", *known, "--lab", "01")
    assert done.returncode == 2 and all(f":{machine.port}" in done.stderr for machine in there.all), done.stderr


def test_a_local_rack_never_takes_the_hosts_name(cli: Remote) -> None:
    done = cli("up", "--rack", "remote", "--nodes", "2", "--runtime", "netns")
    assert (done.returncode, "is on rented machines" in done.stderr) == (4, True), done.stderr
    assert RackFolder("remote").read_rack() is not None


def test_down_removes_all_that_was_deployed(there: Machines, cli: Remote) -> None:
    assert cli("down", "--rack", "remote").returncode == 0
    assert files_of(there) == []
    assert cli("status", "--rack", "remote", "--json").stdout.strip() == "[]"
