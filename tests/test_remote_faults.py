"""Faults of rented machines, played on real sshd: each ends in time, with the right row, and with nothing half-done."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from racks import tagged, wait_until
from sshd import USER, Machine, Machines, Quiet, keygen, machines
from test_remote import Remote

from torchrack.model.checks import Check
from torchrack.model.hosts import Host
from torchrack.model.job import Job
from torchrack.model.rack import MiB, Rack
from torchrack.places.netns_check import PATH
from torchrack.places.ssh import Ssh
from torchrack.places.ssh_connect import CONNECT_S, HostKeys, Trust
from torchrack.places.ssh_push import NotAll, Payload, push
from torchrack.places.talk import block, hear, named, tell, words
from torchrack.plan.render import sha256
from torchrack.run.phases import Progress
from torchrack.run.preflight import preflight

pytestmark = [pytest.mark.ssh, pytest.mark.netns, pytest.mark.slow]
IPTABLES = shutil.which("iptables", path=PATH)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(f"faults-{os.getpid()}", 2, tmp_path_factory.mktemp("there")) as made:
        yield made


@pytest.fixture
def place(there: Machines, tmp_path: Path) -> Iterator[Ssh]:
    made = place_of(there, tmp_path)
    yield made
    made.close()


def place_of(there: Machines, state: Path, hosts: tuple[Host, ...] = (), host_keys: HostKeys = "known") -> Ssh:
    trust = Trust(host_keys, there.known_hosts, lambda line: None)
    return Ssh("faults", state, hosts or there.hosts(), trust)


def look(place: Ssh, *, probes: bool = False) -> dict[str, Check]:
    """Preflight's rows of node1 that are not ok, by check; those of node0 must all be ok."""
    rack = Rack(name="faults", nodes=len(place.hosts), runtime="ssh")
    outcome = preflight(place, rack, Job(), Progress(Quiet()), probes=probes)
    assert [row for row in outcome.rows if row.node == "node0" and row.state != "ok"] == []
    return {row.check: row for row in outcome.rows if row.node == "node1" and row.state != "ok"}


def altered(there: Machines, **more: object) -> tuple[Host, ...]:
    """The hosts, the second one described wrongly."""
    first, second = there.hosts()
    return first, second.model_copy(update=more)


# Getting in


def test_a_key_that_is_not_welcome(there: Machines, tmp_path: Path) -> None:
    stranger = keygen(tmp_path / "stranger")
    row = look(place_of(there, tmp_path, altered(there, key=str(stranger))))["login"]
    assert row.state == "fail" and f"no key of yours is accepted for user {USER}" in row.value
    assert "ssh-copy-id" in row.fix


def test_a_key_that_is_not_there(there: Machines, tmp_path: Path) -> None:
    row = look(place_of(there, tmp_path, altered(there, key="/nowhere/key")))["login"]
    assert "there is no key /nowhere/key" in row.value


def test_an_unknown_host_is_refused_until_its_key_is_pinned(there: Machines, tmp_path: Path) -> None:
    known = there.known_hosts.read_text()
    there.known_hosts.write_text(known.splitlines(keepends=True)[0])
    try:
        row = look(place_of(there, tmp_path))["host key"]
        shown = subprocess.run(["ssh-keygen", "-lf", there.keys / "host-node1.pub"], capture_output=True, text=True)
        assert row.state == "fail" and shown.stdout.split()[1] in row.fix, "the fingerprint as ssh-keygen shows it"
        assert look(place_of(there, tmp_path, host_keys="accept-new")) == {}
        assert there.known_hosts.read_text().splitlines()[1].split()[:3] == known.splitlines()[1].split()[:3]
        assert look(place_of(there, tmp_path)) == {}, "from now on it is known"
    finally:
        there.known_hosts.write_text(known)


def test_a_changed_host_key_is_refused_even_with_accept_new(there: Machines, tmp_path: Path) -> None:
    other = keygen(tmp_path / "other")
    machine = there.all[1]
    good = (machine.home / "sshd/hostkey").read_bytes()
    (machine.home / "sshd/hostkey").write_bytes(other.read_bytes())
    try:
        row = look(place_of(there, tmp_path, host_keys="accept-new"))["host key"]
    finally:
        (machine.home / "sshd/hostkey").write_bytes(good)
    assert row.state == "fail" and "has CHANGED" in row.value and "ssh-keygen -f" in row.fix


def test_a_host_that_refuses_connections(there: Machines, tmp_path: Path) -> None:
    machine = there.all[1]
    machine.refuse()
    try:
        row = look(place_of(there, tmp_path))["reachable"]
    finally:
        machine.open()
    assert row.state == "fail" and "refuses connections" in row.value


def test_a_host_that_takes_connections_and_never_speaks(there: Machines, tmp_path: Path) -> None:
    there.all[1].mode = "silent"
    began = time.monotonic()
    try:
        row = look(place_of(there, tmp_path))["reachable"]
    finally:
        there.all[1].mode = "sshd"
    assert "does not say a word of ssh" in row.value
    assert time.monotonic() - began < CONNECT_S + 8


def test_a_name_that_does_not_resolve(there: Machines, tmp_path: Path) -> None:
    row = look(place_of(there, tmp_path, altered(there, address="no-such-host.invalid")))["reachable"]
    assert "does not resolve" in row.value


def test_a_host_that_hangs_is_given_up(there: Machines, place: Ssh) -> None:
    assert look(place) == {}
    machine = there.all[1]
    code = """
import glob, os, sys
for path in glob.glob("/proc/[0-9]*/cmdline"):
    if open(path, "rb").read().startswith((b"sshd", b"/usr/sbin/sshd")):
        os.kill(int(path.split("/")[2]), int(sys.argv[1]))
"""
    with changed(machine, [sys.executable, "-c", code, "19"], [sys.executable, "-c", code, "18"]):
        began = time.monotonic()
        row = look(place)["reachable"]
        assert "starts no command any more" in row.value and time.monotonic() - began < 25


# What is wrong with a host


def fake_python(there: Machines, version: str) -> str:
    """A Python on node1 whose torch says another version."""
    home = there.all[1].home / f"fake-{version}"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(home)], check=True)
    packages = next(home.glob("lib/python*/site-packages"))
    (packages / f"torch-{version}.dist-info").mkdir()
    (packages / f"torch-{version}.dist-info/METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    (home / "bin/torchrun").write_text("#!/bin/sh\n")
    (home / "bin/torchrun").chmod(0o755)
    return str(home / "bin/python")


def test_another_torch(there: Machines, tmp_path: Path) -> None:
    found = look(place_of(there, tmp_path, altered(there, python=fake_python(there, "2.12.0"))))
    assert set(found) == {"torch version"}
    assert found["torch version"].state == "fail" and "2.12.0 (others: 2." in found["torch version"].value


def test_no_torch_and_no_such_python(there: Machines, tmp_path: Path) -> None:
    row = look(place_of(there, tmp_path, altered(there, python="/usr/bin/no-such-python")))["python"]
    assert row.state == "fail" and "no /usr/bin/no-such-python there" in row.value
    bare = subprocess.run(["sh", "-c", "command -v /usr/bin/python3"], capture_output=True, text=True).stdout.strip()
    if bare:
        assert "torch" in look(place_of(there, tmp_path, altered(there, python=bare)))


def test_a_clock_that_is_a_minute_off(there: Machines, tmp_path: Path) -> None:
    import torch  # its version: the clock alone must stand out

    python = fake_python(there, torch.__version__)
    late = "import sys, time; real = time.time; time.time = lambda: real() + 60; exec(sys.argv[1])"
    wrapper = Path(python).with_name("late")
    wrapper.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "-I -S -c" ] && shift 3\nexec {python} -I -S -c "{late}" "$@"\n')
    wrapper.chmod(0o755)
    row = look(place_of(there, tmp_path, altered(there, python=str(wrapper))))["clock"]
    assert row.state == "fail" and 58 < float(row.value.removesuffix(" s")) < 62


def as_root(machine: Machine, *argv: str) -> None:
    output = machine.place.run(machine.node, argv, root=True)
    assert output.code == 0, output.stderr.decode()


@contextlib.contextmanager
def changed(machine: Machine, do: list[str], undo: list[str]) -> Iterator[None]:
    as_root(machine, *do)
    try:
        yield
    finally:
        as_root(machine, *undo)


def test_a_small_dev_shm(there: Machines, place: Ssh) -> None:
    size = "mount -o remount,size={} /dev/shm".format
    with changed(there.all[1], size("64m").split(), size("1g").split()):
        row = look(place)["/dev/shm"]
    assert (row.state, row.value) == ("fail", "64 MiB")


def test_a_name_that_means_127_0_1_1(there: Machines, place: Ssh) -> None:
    hosts = there.all[1].home / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node1\n")
    with changed(there.all[1], ["mount", "--bind", str(hosts), "/etc/hosts"], ["umount", "/etc/hosts"]):
        row = look(place)["own name"]
    assert (row.state, row.value) == ("warn", "node1 means 127.0.1.1")


def test_a_data_network_that_is_cut(there: Machines, place: Ssh) -> None:
    cut = "ip route add unreachable 10.78.0.10"
    with changed(there.all[1], cut.split(), cut.replace("add", "del").split()):
        rack = Rack(name="faults", nodes=2, runtime="ssh")
        rows = preflight(place, rack, Job(), Progress(Quiet())).rows
    bad = {(row.node, row.check): row for row in rows if row.state == "fail"}
    assert ("node1", "data network") in bad and "node0:29400" in bad["node1", "data network"].value


@pytest.mark.skipif(not IPTABLES, reason="no iptables: apt-get install iptables")
@pytest.mark.parametrize(("port", "closed"), [("29400", "node0:29400"), ("32768:60999", "node0:")])
def test_a_data_port_behind_a_firewall(there: Machines, place: Ssh, port: str, closed: str) -> None:
    """The rendezvous port, then the ports of the kernel's choice: a packet filter on one host swallows what comes."""
    rule = [str(IPTABLES), "-A", "INPUT", "-i", "fabric", "-p", "tcp", "--syn", "--dport", port, "-j", "DROP"]
    with changed(there.all[0], rule, [word.replace("-A", "-D") for word in rule]):
        began = time.monotonic()
        rows = preflight(place, Rack(name="faults", nodes=2, runtime="ssh"), Job(), Progress(Quiet())).rows
        assert time.monotonic() - began < 20
    (bad,) = [row for row in rows if row.state != "ok"]
    assert (bad.node, bad.check, bad.state) == ("node1", "data network", "fail")
    assert closed in bad.value and "no answer within 3 s" in bad.value and "make provision" in bad.fix


def test_packets_that_are_too_large_for_the_way(there: Machines, place: Ssh) -> None:
    mtu = "ip link set fabric mtu {}".format
    with changed(there.all[0], mtu(1400).split(), mtu(1500).split()):
        rows = preflight(place, Rack(name="faults", nodes=2, runtime="ssh"), Job(), Progress(Quiet())).rows
    assert ("node1", "fail") in {(row.node, row.state) for row in rows if row.check == "MTU"}


@contextlib.contextmanager
def port_taken(there: Machines) -> Iterator[None]:
    """Somebody listens on node0 where the agents want to meet."""
    code = (
        "import socket, sys; s = socket.create_server(('10.78.0.10', 29400)); print('on', flush=True); sys.stdin.read()"
    )
    with there.place.spawn("node0", [sys.executable, "-I", "-c", code]) as taken:
        assert taken.stdout and taken.stdout.readline() == b"on\n"
        try:
            yield
        finally:
            assert taken.stdin
            taken.stdin.close()


@pytest.mark.parametrize("probes", [False, True])
def test_a_rendezvous_port_that_is_taken(there: Machines, place: Ssh, probes: bool) -> None:
    rack = Rack(name="faults", nodes=2, runtime="ssh")
    with port_taken(there):
        rows = preflight(place, rack, Job(), Progress(Quiet()), probes=probes).rows
    bad = [row for row in rows if row.state != "ok"]
    assert [(row.node, row.check) for row in bad] == [("node0", "rendezvous port")], "said once"


def test_the_same_checks_run_on_a_local_rack(there: Machines) -> None:
    subnets = {"mgmt_subnet": "10.79.0.0/24", "fabric_subnet": "10.78.0.0/24"}
    rack = Rack(name=there.place.name, nodes=2, **subnets)
    outcome = preflight(there.place, rack, Job(), Progress(Quiet()))
    assert [row for row in outcome.rows if row.state != "ok"] == []
    assert {"clock", "torch", "data NIC", "data network"} <= {row.check for row in outcome.rows}


# Pushing


def loads(size: int, text: bytes = b"") -> dict[str, Payload]:
    constant = {"scripts/launch.sh": b"echo " + text, "labs/big.bin": os.urandom(size)}
    return {f"node{i}": Payload(constant, {"scripts/env.sh": f"i={i}{text!r}".encode()}) for i in range(2)}


def have(there: Machines) -> list[dict[str, bytes]]:
    """What `current` holds on each machine."""
    found = []
    for i, machine in enumerate(there.all):
        current = machine.folder / f"faults/node{i}/current"
        files = [path for path in current.resolve().rglob("*") if path.is_file()] if current.exists() else []
        found.append({str(path.relative_to(current.resolve())): path.read_bytes() for path in files})
    return found


def half_done(there: Machines) -> list[str]:
    # os.walk: what was given up may be on its way out while we look.
    return [folder for machine in there.all for folder, _, _ in os.walk(machine.folder) if folder.endswith(".part")]


@pytest.fixture
def settled(there: Machines, place: Ssh) -> Iterator[Ssh]:
    """Machines that hold a first payload."""
    place.settle({node: place.report(node) for node in place.node_names})
    push(place, loads(1000, b"first"), "test")
    yield place
    place.down()


def test_a_second_deployer_is_told_who_is_at_work(there: Machines, settled: Ssh) -> None:
    before = have(there)
    lock = there.all[1].folder / "faults/node1/lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("alice@laptop, process 7")
        held.flush()
        with pytest.raises(NotAll) as caught:
            push(settled, loads(1000, b"second"), "bob")
    assert list(caught.value.failed) == ["node1"]
    assert "another deployer is at work: alice@laptop" in str(caught.value)
    assert have(there) == before and half_done(there) == []


def test_a_second_deployer_leaves_the_first_one_its_new_folder(there: Machines, place: Ssh) -> None:
    place.learn({node: place.report(node) for node in place.node_names})
    with place.receiver("node1", "deploy") as first:
        files = {"scripts/a": b"alice's"}
        tell(first, [words("0" * 8, "alice", *named(sha256(files)))])
        assert hear(first)["want"] == list(files)
        with pytest.raises(NotAll, match="another deployer is at work: alice"):
            push(place, loads(1000, b"second"), "bob")
        tell(first, [block(zlib.compress(files["scripts/a"]))])
        assert "staged" in hear(first)
        tell(first, [words("commit")])
        assert "done" in hear(first)
    place.down()


def test_a_disk_that_fills_up_leaves_all_hosts_as_they_were(there: Machines, settled: Ssh) -> None:
    before = have(there)
    machine = there.all[1]
    folder = machine.folder / "faults/node1/payload"
    copy = machine.home / "copy"
    shutil.copytree(folder, copy)
    as_root(machine, "mount", "-t", "tmpfs", "-o", "size=300k,mode=777", "small", str(folder))
    try:
        output = machine.place.run("node1", ["sh", "-c", f"cp -a {copy}/. {folder}/"])
        assert output.code == 0, output.stderr
        with pytest.raises(NotAll, match=r"node1: .*No space left on device"):
            push(settled, loads(2 * MiB, b"second"), "test")
        assert machine.place.run("node1", ["sh", "-c", f"ls {folder} | grep -c part"]).stdout == b"0\n"
    finally:
        as_root(machine, "umount", str(folder))
    assert have(there) == before and half_done(there) == []


def test_a_first_deploy_that_fails_on_one_host_leaves_no_folder_on_the_others(there: Machines, place: Ssh) -> None:
    place.learn({node: place.report(node) for node in place.node_names})
    in_the_way = there.all[1].folder / "faults"
    in_the_way.parent.mkdir(exist_ok=True)
    in_the_way.write_text("a file, where a folder must be")
    try:
        with pytest.raises(NotAll) as caught:
            push(place, loads(1000, b"first"), "test")
        assert list(caught.value.failed) == ["node1"]
        assert wait_until(lambda: not (there.all[0].folder / "faults" / "node0").exists(), 10)
    finally:
        in_the_way.unlink()


@pytest.mark.parametrize("after", [0.15, 0.6])
def test_a_host_that_dies_while_it_is_sent_to(there: Machines, settled: Ssh, after: float) -> None:
    before = have(there)
    machine = there.all[1]
    killer = threading.Timer(after, lambda: (machine.refuse(), machine.hang_up()))
    killer.start()
    try:
        with pytest.raises(NotAll) as caught:
            push(settled, loads(24 * MiB, b"second"), "test")
    finally:
        killer.join()
        machine.open()
    assert list(caught.value.failed) == ["node1"]
    assert have(there) == before, "node0 took all of it and still has what it had"
    assert wait_until(lambda: half_done(there) == [], 10)
    assert all(not one.same for one in push(settled, loads(1000, b"third"), "test").values()), "nothing is locked"


# Running


SLEEPER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["setsid", "sleep", "4321"])
print("sleeping", os.environ["RANK"], flush=True)
time.sleep(300)
"""


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Remote:
    return Remote(tmp_path_factory.mktemp("home"), "ssh", "remote")


@pytest.fixture
def running(there: Machines, cli: Remote, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A launch whose two ranks ignore SIGTERM and have children in sessions of their own."""
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    assert cli.on(there, "deploy").returncode == 0
    with cli.start("launch", *cli.named(there), "--deadline", "120", str(script)) as process:
        assert process.stdout
        seen = 0
        for line in process.stdout:
            seen += "sleeping" in line
            if seen == 2:
                break
        assert seen == 2, process.stderr and process.stderr.read()
        yield process
        process.kill()


def nothing_runs(there: Machines) -> bool:
    return not any(tagged(f"TORCHRACK_AT={machine.folder}") for machine in there.all) and not any(
        "sleep 4321" in machine.processes() for machine in there.all
    )


def test_ctrl_c_ends_everything_everywhere(there: Machines, running: subprocess.Popen[str]) -> None:
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert "interrupted" in said and running.returncode == 1
    assert wait_until(lambda: nothing_runs(there), 5)


def test_a_killed_client_ends_everything_everywhere(there: Machines, running: subprocess.Popen[str]) -> None:
    running.kill()
    assert wait_until(lambda: nothing_runs(there), 20)


def test_stop_from_another_checkout(there: Machines, running: subprocess.Popen[str], tmp_path: Path) -> None:
    other = Remote(tmp_path, "ssh", "remote")
    done = other.on(there, "stop")
    assert done.returncode == 0 and "ended 20" in done.stderr, done.stderr
    assert wait_until(lambda: nothing_runs(there), 5)
    running.communicate(timeout=60)
    assert running.returncode == 1


@pytest.mark.skipif(not IPTABLES, reason="no iptables: apt-get install iptables")
def test_a_data_port_that_was_closed_after_the_deploy(there: Machines, cli: Remote, tmp_path: Path) -> None:
    """A launch looks first: a row at once, where the ranks would wait for each other to the end of their patience."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    rule = [str(IPTABLES), "-A", "INPUT", "-i", "fabric", "-p", "tcp", "--syn", "--dport", "29400", "-j", "DROP"]
    with changed(there.all[0], rule, [word.replace("-A", "-D") for word in rule]):
        assert cli.on(there, "deploy").returncode == 0, "files need no data network"
        before, began = runs(cli), time.monotonic()
        done = cli.on(there, "launch", "--deadline", "120", str(tmp_path / "sleeper.py"))
    assert time.monotonic() - began < 20
    assert done.returncode == 4 and "nothing was started: node1 did not pass" in done.stderr, done.stderr
    assert "data network" in done.stdout and "node0:29400" in done.stderr
    assert runs(cli) == before and nothing_runs(there)


def test_a_rendezvous_port_that_was_taken_after_the_deploy(there: Machines, cli: Remote, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    assert cli.on(there, "deploy").returncode == 0
    with port_taken(there):
        done = cli.on(there, "launch", "--deadline", "120", str(tmp_path / "sleeper.py"))
    assert done.returncode == 4 and "nothing was started: node0 did not pass" in done.stderr, done.stderr
    assert "rendezvous port: 29400 is taken" in done.stderr and "PORT=29401" in done.stderr
    assert nothing_runs(there)


TALK = r"""#!/bin/sh
printf 'Welcome\n{"run": "of the day"}\n{ \377\nno end of line: '
exec sh -c "$SSH_ORIGINAL_COMMAND"
"""
WRITES = """
import os, time
open(os.environ["OUT"] + "/mine", "w").write(os.environ["RANK"])
open("beside", "w").write("x")
time.sleep(float(os.environ.get("REST", 0)))
"""


@pytest.fixture
def talkative(there: Machines) -> Iterator[Machine]:
    """A host whose login shell prints something before every command."""
    machine = there.all[1]
    conf, talk = machine.home / "sshd/conf", machine.home / "sshd/talk.sh"
    talk.write_text(TALK)
    talk.chmod(0o755)
    before = conf.read_text()
    conf.write_text(f"{before}ForceCommand {talk}\n")
    yield machine
    conf.write_text(before)


def test_a_host_whose_login_shell_talks(there: Machines, talkative: Machine, cli: Remote, tmp_path: Path) -> None:
    script = tmp_path / "writes.py"
    script.write_text(WRITES)
    assert cli.on(there, "preflight").returncode == 0
    assert cli.on(there, "deploy").returncode == 0
    done = cli.on(there, "launch", "--json", str(script))
    out = Path(cli.result(done)["record"]) / "out"
    assert done.returncode == 0, done.stderr
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        "node0/beside", "node1/beside", "rank0/mine", "rank1/mine",
    ]  # fmt: skip
    run = cli.on(there, "launch", "--detach", "--env", "REST=300", str(script)).stdout.split()[1]
    assert f"run {run} still runs" in cli.on(there, "collect").stderr
    assert json.loads(cli.on(there, "stop", "--json").stdout) == {"node0": [run], "node1": [run]}
    assert json.loads(cli.on(there, "collect", "--json").stdout)["runs"][run]["verdict"] == "interrupted"
    assert cli("down", "--rack", "remote").returncode == 0


def test_a_host_that_lets_nobody_in_says_why(there: Machines, talkative: Machine, place: Ssh) -> None:
    (talkative.home / "sshd/talk.sh").write_text("#!/bin/sh\necho 'Please login as ubuntu'\nexit 1\n")
    row = look(place)["python"]
    assert (row.node, row.state, "Please login as ubuntu" in row.value) == ("node1", "fail", True)


def runs(cli: Remote) -> list[str]:
    return sorted(path.name for path in (cli.home / ".torchrack/remote").iterdir())


@pytest.mark.parametrize("after", ["push", "network", "scripts", "ready"])
def test_a_host_that_dies_while_a_run_is_started(there: Machines, cli: Remote, tmp_path: Path, after: str) -> None:
    """It goes as soon as the client has told the end of that phase."""
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    assert cli.on(there, "deploy").returncode == 0
    machine, began = there.all[1], time.monotonic()
    with cli.start("launch", *cli.named(there), "--deadline", "120", str(script)) as process:
        assert process.stderr
        told = next((line for line in process.stderr if after in line.split()[:2]), "")
        machine.refuse()
        machine.hang_up()
        try:
            _, said = process.communicate(timeout=90)
        finally:
            machine.open()
            process.kill()
    assert told and process.returncode in (1, 4), said
    assert "node1" in said or f"127.0.0.1:{machine.port}" in said, said
    assert time.monotonic() - began < 60
    assert wait_until(lambda: nothing_runs(there), 20)
    assert cli.on(there, "stop").returncode == 0, "the host is back, and nothing is in the way"


def test_a_host_that_dies_in_the_middle_of_a_run(there: Machines, running: subprocess.Popen[str]) -> None:
    machine = there.all[1]
    machine.refuse()
    machine.hang_up()
    try:
        began = time.monotonic()
        _, said = running.communicate(timeout=90)
        assert running.returncode == 1 and time.monotonic() - began < 60
        assert "not all of node1 came" in said
    finally:
        machine.open()
    assert wait_until(lambda: nothing_runs(there), 20)
