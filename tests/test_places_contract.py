"""What every place promises (torchrack/places/base.py), tried on real racks of each kind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sshd import machines

from torchrack.model.errors import Lacking, NotPermitted, TimedOut, TorchrackError
from torchrack.model.rack import NETS, MiB, NetName, Rack
from torchrack.places.base import NodeState, Place
from torchrack.places.local import wait_for
from torchrack.places.ssh import Ssh
from torchrack.places.ssh_connect import Trust

KINDS = [
    pytest.param("netns", marks=pytest.mark.netns),
    pytest.param("compose", marks=[pytest.mark.docker, pytest.mark.slow]),
    pytest.param("ssh", marks=[pytest.mark.ssh, pytest.mark.netns]),
]
SHM = 96 * MiB
MBIT = 100
BYTES = bytes(range(256)) * 40


def make(kind: str, name: str, state: Path) -> Place:
    if kind == "netns":
        from torchrack.places.netns import Netns

        return Netns(name, state)
    if kind == "ssh":
        from torchrack.places.ssh import Ssh

        return Ssh(name, state)
    from torchrack.places.compose import Compose

    return Compose(name, state)


def leftovers(place: Place) -> list[str]:
    """What of a rack the machine still holds, seen without the place's own state."""
    if place.kind == "netns":
        from torchrack.places.netns_process import find

        return [str(process) for process in find(place.name, place.state.resolve())]
    if isinstance(place, Ssh):
        return [host.folder for host in place.hosts if any(Path(host.folder).glob("*"))]
    label = f"label=torchrack.rack={place.name}"
    lists = (["docker", "ps", "--all", "--quiet"], ["docker", "network", "ls", "--quiet"])
    return [line for argv in lists for line in output_of([*argv, "--filter", label]).split()]


def output_of(argv: list[str]) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@dataclass
class Up:
    place: Place
    rack: Rack

    def python(self, node: str, code: str, *args: str, root: bool = False) -> str:
        """Run a few lines of Python on a node; returns what they print."""
        output = self.place.run(node, [self.place.python(node), "-I", "-c", code, *args], root=root)
        assert output.code == 0, output.stderr.decode()
        return output.stdout.decode().strip()

    def shell(self, node: str, script: str, *, root: bool = False) -> tuple[int, str]:
        output = self.place.run(node, ["sh", "-c", script], root=root)
        return output.code, output.stdout.decode().strip()


MakeRack = Callable[..., Up]


@contextlib.contextmanager
def racks(kind: str, folder: Path) -> Iterator[MakeRack]:
    """A function that brings racks up; whatever it made is taken down at the end."""
    made: list[Place] = []
    rented = contextlib.ExitStack()

    def bring_up(name: str, nodes: int, **more: object) -> Up:
        place = make(kind, f"test-{name}-{os.getpid()}", folder / name)
        if isinstance(place, Ssh):
            there = machines(
                f"rented-{len(made)}-{os.getpid()}", nodes, folder / f"{name}-{len(made)}", shm=SHM, mgmt_mbit=MBIT
            )
            rented_now = rented.enter_context(there)
            trust = Trust(known_hosts=rented_now.known_hosts)
            place = Ssh(place.name, place.state, rented_now.hosts(), trust)
        place.check()
        made.append(place)
        asked = {"name": place.name, "nodes": nodes, "shm": SHM, "mgmt_mbit": MBIT, **more}
        return Up(place, place.up(Rack.model_validate(asked), lambda line: None))

    try:
        yield bring_up
    finally:
        with rented:
            for place in made:
                place.down()


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def up(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with racks(kind, tmp_path_factory.mktemp(kind)) as bring_up:
        yield bring_up("main", 2)


@pytest.fixture
def new_rack(kind: str, tmp_path: Path) -> Iterator[MakeRack]:
    with racks(kind, tmp_path) as bring_up:
        yield bring_up


# What a rack can be made to get wrong


@pytest.mark.parametrize("kind", KINDS[:2], indirect=True)  # rented machines are as they are
def test_nodes_of_two_makes_that_share_their_dev_shm(new_rack: MakeRack) -> None:
    up = new_rack("odd", 2, nic_names="differ", shm_shared=True)
    names = {fact.node: {nic.address: nic.name for nic in fact.nics} for fact in up.place.facts()}
    for net, name in (("mgmt", "ens3"), ("fabric", "ens4")):
        assert names["node1"][up.rack.address("node1", net)] == name
        assert names["node0"][up.rack.address("node0", net)] not in ("ens3", "ens4")
    assert "rate 100Mbit" in up.shell("node1", "tc qdisc show dev ens3", root=True)[1]
    knock = "import socket, sys; print(socket.socket().connect_ex((sys.argv[1], 9)))"
    assert up.python("node1", knock, up.rack.address("node0", "fabric")) == "111", (
        "nobody listens, but the node is there"
    )
    up.shell("node0", "echo node0 > /dev/shm/whose")
    assert up.shell("node1", "cat /dev/shm/whose") == (0, "node0")
    assert all(fact.shm == SHM for fact in up.place.facts())


# Networks and names


def test_up_tells_the_subnets_it_took(up: Up) -> None:
    assert up.rack.mgmt_subnet and up.rack.fabric_subnet
    assert not up.rack.subnet("mgmt").overlaps(up.rack.subnet("fabric"))


def test_nodes_are_seen_by_a_fresh_process(up: Up, kind: str) -> None:
    fresh = make(kind, up.place.name, up.place.state)
    assert fresh.nodes() == (NodeState("node0", "up"), NodeState("node1", "up"))


def test_facts(up: Up) -> None:
    facts = up.place.facts()
    assert [fact.node for fact in facts] == [fact.hostname for fact in facts] == ["node0", "node1"]
    for fact in facts:
        addresses = [nic.address for nic in fact.nics if nic.address != "127.0.0.1"]
        assert sorted(addresses) == sorted(up.rack.address(fact.node, net) for net in NETS)
        assert len({nic.name for net in NETS if (nic := fact.nic_on(up.rack.subnet(net)))}) == 2
        assert fact.shm == SHM
        assert fact.shared_by == (1 if up.place.kind == "ssh" else 2)


RESOLVE = """
import json, socket, sys
print(json.dumps({name: sorted({info[4][0] for info in socket.getaddrinfo(name, None)}) for name in sys.argv[1:]}))
"""


def test_every_name_means_its_mgmt_address_and_nothing_else(up: Up) -> None:
    names = up.rack.node_names
    for node in names:
        seen = json.loads(up.python(node, RESOLVE, *names, "localhost"))
        assert seen == {name: [up.rack.address(name, "mgmt")] for name in names} | {"localhost": ["127.0.0.1"]}


def test_unknown_names_and_reverse_lookups_cost_nothing(up: Up) -> None:
    code = """
import socket, sys, time
began = time.monotonic()
try: socket.getaddrinfo("nosuchhost.example", None)
except socket.gaierror: pass
try: socket.gethostbyaddr(sys.argv[1])
except OSError: pass
print(time.monotonic() - began < 1, socket.getfqdn())
"""
    assert up.python("node0", code, up.rack.address("node1", "fabric")) == "True node0"


RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 0))
server.settimeout(20)
print(server.getsockname()[1], flush=True)
peer, who = server.accept()
peer.settimeout(20)
count, began = 0, time.monotonic()
while data := peer.recv(1 << 18): count += len(data)
print(who[0], count, count / (time.monotonic() - began), flush=True)
"""
SEND = """
import socket, sys
block = bytes(1 << 16)
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as peer:
    for _ in range(int(sys.argv[3])): peer.sendall(block)
"""


def send(up: Up, net: NetName, size: int) -> float:
    """Bytes a second from node0 to node1 over `net`."""
    address = up.rack.address("node1", net)
    server = up.place.spawn("node1", [up.place.python("node1"), "-I", "-c", RECEIVE, address])
    with server:
        assert server.stdout
        port = server.stdout.readline().decode().strip()
        up.python("node0", SEND, address, port, str(size >> 16))
        source, count, rate = server.stdout.readline().split()
    assert (source.decode(), int(count)) == (up.rack.address("node0", net), size)
    return float(rate)


def test_mgmt_is_shaped_and_fabric_is_not(up: Up) -> None:
    shaped = MBIT * 1e6 / 8
    assert 0.75 * shaped < send(up, "mgmt", 6 * MiB) < 1.15 * shaped
    assert send(up, "fabric", 64 * MiB) > 4 * shaped


def test_a_fresh_rack_sends_nothing_by_itself(new_rack: MakeRack) -> None:
    """Otherwise the wires table would show bytes that no rank sent."""
    fresh = new_rack("quiet", 2)
    count = "import re; print(sum(int(l.split()[9]) for l in open('/proc/net/dev') if re.match(r' *(?!lo)\\w+:', l)))"
    assert int(fresh.python("node0", count)) < 1000


# Nodes are separate


def test_nodes_share_no_shared_memory_tmp_or_home(up: Up) -> None:
    for folder in ("/dev/shm", "/tmp", "."):
        assert up.shell("node0", f"echo mine > {folder}/only-here") == (0, "")
        assert up.shell("node1", f"test -e {folder}/only-here")[0] == 1, folder
    assert up.shell("node0", "stat -c %a /dev/shm /tmp") == (0, "1777\n1777")


def test_nodes_share_no_processes(up: Up) -> None:
    with up.place.spawn("node0", ["sh", "-c", "echo $$; exec sleep 98765"]) as sleeper:
        assert sleeper.stdout
        pid = int(sleeper.stdout.readline())
        assert wait_for(lambda: "98765" in processes(up, "node0"), 5)
        assert "98765" not in processes(up, "node1")
        assert up.shell("node0", f"kill {pid}") == (0, "")
        sleeper.wait(5)


def processes(up: Up, node: str) -> str:
    return up.python(node, "import glob\nfor p in glob.glob('/proc/[0-9]*/cmdline'): print(open(p).read())")


# Files


def test_put_and_read_back(up: Up) -> None:
    files = {"plain": b"", "deep/er/still.bin": BYTES, "run.sh": b"#!/bin/sh\necho ran $0\n"}
    up.place.put("node0", files)
    for path, content in files.items():
        assert up.place.read("node0", path) == content
    home = up.place.home("node0")
    assert up.place.read("node0", f"{home}/deep/er/still.bin") == BYTES
    assert up.shell("node0", "./run.sh && test ! -x plain && cat deep/er/still.bin | wc -c") == (
        0,
        "ran ./run.sh\n10240",
    )
    up.place.put("node0", {"plain": b"now longer"})
    assert up.place.read("node0", "plain") == b"now longer"
    with pytest.raises(FileNotFoundError):
        up.place.read("node0", "nowhere/at-all")
    with pytest.raises(FileNotFoundError):
        up.place.read("node1", "run.sh")


def test_what_a_job_writes_is_read_back(up: Up) -> None:
    assert up.shell("node1", "mkdir -p out && echo result > out/file && echo tmp > /tmp/file")[0] == 0
    assert up.place.read("node1", "out/file") == b"result\n"
    if up.place.kind == "netns":  # Docker's archive API does not see a tmpfs
        assert up.place.read("node1", "/tmp/file") == b"tmp\n"


# Commands


CHANGES = ("ip link set lo down", "tc qdisc add dev lo root tbf rate 1mbit burst 64kb latency 10ms", "hostname other")


def test_the_job_user_cannot_change_the_node(up: Up) -> None:
    assert up.shell("node0", "id -u")[1] != "0"
    assert up.shell("node0", "grep CapEff /proc/self/status")[1].split()[1] == "0000000000000000"
    for change in CHANGES:
        assert up.shell("node0", change)[0] != 0, change


def test_root_can_change_the_node(up: Up) -> None:
    if up.place.kind == "ssh":
        with pytest.raises(NotPermitted, match="nobody's root"):
            up.shell("node1", "id -u", root=True)
        return
    assert up.shell("node1", "id -u", root=True) == (0, "0")
    for change in (*CHANGES[:2], "tc qdisc del dev lo root", "ip link set lo up"):
        assert up.shell("node1", change, root=True)[0] == 0, change


def test_the_callers_environment_does_not_leak(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    leaks = ("OMP_NUM_THREADS", "NCCL_DEBUG", "PYTHONPATH", "https_proxy", "TORCHRACK_LEAK", "LD_LIBRARY_PATH")
    for name in leaks:
        monkeypatch.setenv(name, "leaked")
    environment = json.loads(up.python("node0", "import json, os; print(json.dumps(dict(os.environ)))"))
    assert not [name for name, value in environment.items() if name in leaks or value == "leaked"]
    assert up.shell("node0", f"test -w {environment['HOME']}")[0] == 0
    assert environment["PATH"].split(":")[0] == str(Path(up.place.python("node0")).parent)
    assert environment["LANG"] == "C.UTF-8"


def test_commands_start_in_the_home_folder(up: Up) -> None:
    assert up.shell("node1", "pwd") == (0, up.place.home("node1"))


def test_run_tells_streams_and_exit_code_apart(up: Up) -> None:
    output = up.place.run("node0", ["sh", "-c", "cat; echo oops >&2; exit 7"], stdin=BYTES)
    assert (output.code, output.stdout, output.stderr) == (7, BYTES, b"oops\n")


def test_arguments_arrive_unchanged(up: Up) -> None:
    words = ["", "a b", "$HOME", "'\"", "*", "line\nline", "é"]
    assert json.loads(up.python("node0", "import json, sys; print(json.dumps(sys.argv[1:]))", *words)) == words


def test_a_command_past_its_time_is_killed(up: Up) -> None:
    began = time.monotonic()
    with pytest.raises(TimedOut, match=r"(?s)did not end within 0\.5 s.*waiting for godot.*fix:"):
        up.place.run("node0", ["sh", "-c", "echo waiting for godot; exec sleep 54321"], timeout=0.5)
    assert time.monotonic() - began < 4
    assert wait_for(lambda: "54321" not in processes(up, "node0"), 5)


def test_spawned_streams_are_live(up: Up) -> None:
    with up.place.spawn("node0", ["sh", "-c", "read line; echo got $line; cat >/dev/null; exit 3"]) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b"this\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"got this\n"
        process.stdin.close()
        assert process.wait(5) == 3


CALLER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from test_places_contract import make
place = make(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
others = [place.spawn("node1", ["cat"]) for _ in range(3)]
watcher = place.spawn("node0", ["sh", "-c", "echo on > began; cat > /dev/null; echo ended > eof"])
others += [place.spawn("node1", ["cat"]) for _ in range(3)]
print("spawned", flush=True)
time.sleep(60)
"""


def test_stdin_ends_when_the_caller_is_killed(up: Up) -> None:
    identity = [up.place.kind, up.place.name, str(up.place.state), str(Path(__file__).parent)]
    with subprocess.Popen([sys.executable, "-c", CALLER, *identity], stdout=subprocess.PIPE) as caller:
        assert caller.stdout and caller.stdout.readline() == b"spawned\n"
        assert wait_for(lambda: exists(up, "began"), 5)
        assert not exists(up, "eof")
        caller.send_signal(signal.SIGKILL)
    assert wait_for(lambda: exists(up, "eof"), 5)


def exists(up: Up, path: str) -> bool:
    try:
        up.place.read("node0", path)
    except FileNotFoundError:
        return False
    return True


def test_orphans_do_not_stay_as_zombies(up: Up) -> None:
    up.shell("node0", "(sleep 0.05 &) ; (true &)")
    zombies = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '"
    assert wait_for(lambda: up.shell("node0", zombies)[1] == "0", 5)


# Life


def test_up_on_a_rack_that_is_up_harms_nothing(up: Up) -> None:
    with pytest.raises(Lacking, match=f"make down RACK={up.place.name}"):
        up.place.up(Rack(name=up.place.name, nodes=2), lambda line: None)
    assert [state.state for state in up.place.nodes()] == ["up", "up"]
    assert up.shell("node1", "echo fine") == (0, "fine")


def test_down_leaves_nothing_and_is_repeatable(new_rack: MakeRack) -> None:
    first = new_rack("life", 2)
    job = first.place.spawn("node0", ["sleep", "1000"])
    first.place.down()
    with job:
        assert job.wait(5) != 0
    assert first.place.nodes() == ()
    assert leftovers(first.place) == []
    first.place.down()
    with pytest.raises(TorchrackError, match=r"make (up|deploy)"):
        first.place.run("node0", ["true"])
    again = new_rack("life", 3)
    assert [state.node for state in again.place.nodes()] == ["node0", "node1", "node2"]
    assert json.loads(again.python("node2", RESOLVE, "node1")) == {"node1": [again.rack.address("node1", "mgmt")]}


def test_two_racks_at_once_do_not_collide(up: Up, new_rack: MakeRack) -> None:
    other = new_rack("other", 1)
    other.place.put("node0", {"whose": b"other's"})
    up.place.put("node0", {"whose": b"main's"})
    assert other.place.read("node0", "whose") == b"other's"
    assert [state.node for state in other.place.nodes()] == ["node0"]
    other.place.down()
    assert up.shell("node0", "cat whose") == (0, "main's")
    assert send(up, "fabric", MiB) > 0
