"""The compose place: the file and the subnets it decides on (pure), then a real engine."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import IPv4Network
from itertools import islice
from pathlib import Path

import pytest
import yaml

from torchrack.model.errors import CommandFailed, NameTaken, NotEnough, NotRunning, TorchrackError, UsageError
from torchrack.model.rack import Rack
from torchrack.places.compose import Compose
from torchrack.places.compose_file import compose_yaml
from torchrack.places.engine import SubnetLost, complaint
from torchrack.places.image import ensure_cpu_image
from torchrack.places.local import NSSWITCH, hosts_file, wait_for
from torchrack.places.subnets import POOLS, InUse, candidates, parse_routes

RACK = Rack(nodes=2, fabric_subnet="10.78.0.0/24", mgmt_subnet="10.79.0.0/24")
STATE = Path("/home/someone/checkout/.torchrack/lab")
GOLDEN = Path(__file__).parent / "golden"
docker_only = pytest.mark.docker


def check_golden(name: str, text: str) -> None:
    """Compare with the golden file; TORCHRACK_GOLDEN=write rewrites it instead."""
    if os.environ.get("TORCHRACK_GOLDEN") == "write":
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text()


# The file


@pytest.mark.parametrize("name, gpu", [("compose.yaml", False), ("compose-gpu.yaml", True)])
def test_golden_file(name: str, gpu: bool) -> None:
    image = "torchrack:cuda" if gpu else "torchrack:cpu"
    check_golden(name, compose_yaml(RACK, image, STATE, gpu=gpu))


@docker_only
@pytest.mark.parametrize("name", ["compose.yaml", "compose-gpu.yaml"])
def test_docker_compose_accepts_the_golden_file(name: str) -> None:
    file = GOLDEN / name
    subprocess.run(["docker", "compose", "--file", str(file), "config", "--quiet"], check=True, capture_output=True)


@docker_only
def test_a_state_folder_of_any_name_arrives_unchanged(tmp_path: Path) -> None:
    state = Path("/a $HOME ${X:-y} $$ \"quoted\" 'folder': #1")
    (tmp_path / "compose.yaml").write_text(compose_yaml(RACK, "torchrack:cpu", state))
    argv = ["docker", "compose", "--file", str(tmp_path / "compose.yaml"), "config", "--format", "json"]
    read = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)
    label = read["services"]["node0"]["labels"]["torchrack.state"]
    assert label.replace("$$", "$") == str(state)  # `config` escapes again what it prints


def test_a_rack_without_subnets_has_no_file() -> None:
    with pytest.raises(ValueError, match="no subnet yet"):
        compose_yaml(Rack(), "torchrack:cpu", STATE)


def test_the_gpu_file_needs_no_subnets_and_has_no_networks() -> None:
    content = yaml.safe_load(compose_yaml(Rack(nodes=3), "torchrack:cuda", STATE, gpu=True))
    assert "networks" not in content
    assert [service["hostname"] for service in content["services"].values()] == ["node0", "node1", "node2"]


# The subnets


def used(*subnets: str) -> list[InUse]:
    return [InUse(IPv4Network(subnet), f"docker network of {subnet}") for subnet in subnets]


@pytest.mark.parametrize(
    "taken, fabric, mgmt",
    [
        ([], "10.78.0.0/24", "10.79.0.0/24"),
        (["10.78.0.0/24"], "10.78.1.0/24", "10.79.1.0/24"),
        (["10.79.0.0/23", "10.78.2.128/32"], "10.78.3.0/24", "10.79.3.0/24"),
        (["10.0.0.0/8"], "172.29.0.0/24", "172.30.0.0/24"),
    ],
)
def test_the_first_free_pair_is_taken(taken: list[str], fabric: str, mgmt: str) -> None:
    first = next(candidates(Rack(), used(*taken)))
    assert (first.fabric_subnet, first.mgmt_subnet) == (fabric, mgmt)


def test_each_offer_is_another_pair() -> None:
    offers = list(islice(candidates(Rack(), used("10.78.1.0/24")), 300))
    assert len({offer.fabric_subnet for offer in offers} | {offer.mgmt_subnet for offer in offers}) == 600


def test_a_subnet_asked_for_is_kept_and_the_other_avoids_it() -> None:
    offer = next(candidates(Rack(mgmt_subnet="10.78.0.0/24"), []))
    assert (offer.fabric_subnet, offer.mgmt_subnet) == ("10.78.1.0/24", "10.78.0.0/24")


def test_a_subnet_asked_for_that_is_taken_names_who_has_it() -> None:
    with pytest.raises(NameTaken, match=r"fabric_subnet 10\.1\.0\.0/24 is taken: docker network of 10\.1\.0\.0/16"):
        next(candidates(Rack(fabric_subnet="10.1.0.0/24"), used("10.1.0.0/16")))


def test_two_subnets_asked_for_that_overlap_are_refused() -> None:
    with pytest.raises(UsageError, match="overlap"):
        next(candidates(Rack(fabric_subnet="10.1.0.0/24", mgmt_subnet="10.1.0.0/16"), []))


def test_both_subnets_asked_for_are_offered_once() -> None:
    offers = candidates(RACK, [])
    assert next(offers) == RACK
    with pytest.raises(NotEnough, match="asks for"):
        next(offers)


def test_nothing_free_says_so() -> None:
    pools = used("10.78.0.0/15", *(pool["fabric"].format(0).replace(".0.0/24", ".0.0/16") for pool in POOLS))
    with pytest.raises(NotEnough, match="free"):
        next(candidates(Rack(), pools))


def test_routes_that_lead_everywhere_take_nothing() -> None:
    routes = [
        {"dst": "default", "dev": "eth0"},
        {"dst": "0.0.0.0/1", "dev": "tun0"},
        {"dst": "128.0.0.0/1", "dev": "tun0"},
        {"dst": "10.78.0.0/16", "dev": "br-1"},
        {"type": "local", "dst": "192.0.2.2", "dev": "eth0"},
    ]
    assert [str(use.subnet) for use in parse_routes(routes)] == ["10.78.0.0/16", "192.0.2.2/32"]


# What the engine's words mean (as engine 20.10 and Compose 2.26 print them)


@pytest.mark.parametrize(
    "words, error, hint",
    [
        ("Pool overlaps with other one on this address space", SubnetLost, "try again"),
        ("could not find an available, non-overlapping IPv4 address pool", NotEnough, "network prune"),
        ("write /var/lib/docker/tmp/x: no space left on device", NotEnough, "system prune"),
        ("No such image: torchrack:cpu", CommandFailed, "make image"),
        ("something new", CommandFailed, "docker info"),
    ],
)
def test_a_complaint_becomes_an_error_with_a_fix(words: str, error: type[TorchrackError], hint: str) -> None:
    found = complaint(
        ["docker", "compose", "up"], 1, f" Network x_mgmt  Creating\nError response from daemon: {words}\n"
    )
    assert type(found) is error
    assert words in str(found)
    assert hint in (found.hint or "")


# A real engine


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def image() -> str:
    return ensure_cpu_image(quiet)


@pytest.fixture
def make_place(tmp_path: Path, image: str) -> Iterator[Callable[..., Compose]]:
    """Places with names of their own, taken down at the end."""
    made: list[Compose] = []

    def make(name: str = "", folder: str = "state") -> Compose:
        made.append(Compose(name or f"t{uuid.uuid4().hex[:8]}", tmp_path / folder))
        return made[-1]

    yield make
    for place in made:
        place.down()


@pytest.fixture
def docker() -> Iterator[Callable[..., str]]:
    """Runs `docker ...`; what `create` and `network create` made is removed at the end."""
    undo: list[list[str]] = []

    def run(*argv: str) -> str:
        done = subprocess.run(["docker", *argv], check=True, capture_output=True, text=True).stdout.strip()
        if argv[0] == "create":
            undo.append(["rm", "-f", done])
        if argv[:2] == ("network", "create"):
            undo.append(["network", "rm", done])
        return done

    yield run
    for argv in undo:
        subprocess.run(["docker", *argv], check=True, capture_output=True)


def left_of(place: Compose) -> list[str]:
    """The containers and networks that carry the rack's name, whoever owns them."""
    names = []
    for what in (["ps", "--all", "--format", "{{.Names}}"], ["network", "ls", "--format", "{{.Name}}"]):
        argv = ["docker", *what, "--filter", f"label=torchrack.rack={place.name}"]
        names += subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()
    return names


def sh(place: Compose, node: str, script: str, *, root: bool = False) -> str:
    output = place.run(node, ["sh", "-c", script], root=root)
    return (output.stdout + output.stderr).decode()


@docker_only
def test_nodes_are_as_asked_whatever_the_callers_environment(
    make_place: Callable[..., Compose], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PROJECT_NAME": "other", "FILE": "/nowhere", "COMPATIBILITY": "1", "PROFILES": "x"}.items():
        monkeypatch.setenv(f"COMPOSE_{name}", value)
    place = make_place()
    rack = place.up(Rack(name=place.name, nodes=2, shm="256m", mgmt_mbit=50), quiet)

    assert [(state.node, state.state) for state in place.nodes()] == [("node0", "up"), ("node1", "up")]
    for facts in place.facts():
        assert (facts.hostname, facts.shm) == (facts.node, 256 << 20)
        mgmt, fabric = (facts.nic_on(rack.subnet(net)) for net in ("mgmt", "fabric"))
        assert mgmt and fabric
        assert mgmt.address == rack.address(facts.node, "mgmt")
        qdiscs = sh(place, facts.node, "tc qdisc show").splitlines()
        assert ["rate 50Mbit" in line for line in qdiscs if f"dev {mgmt.name}" in line] == [True]
        assert not [line for line in qdiscs if f"dev {fabric.name}" in line and "tbf" in line]
    assert sh(place, "node1", "cat /etc/hosts /etc/nsswitch.conf") == hosts_file(rack) + NSSWITCH
    assert "not permitted" in sh(place, "node0", f"tc qdisc del dev {mgmt.name} root")


@docker_only
def test_a_given_subnet_of_another_network_is_refused_by_name(
    make_place: Callable[..., Compose], docker: Callable[..., str]
) -> None:
    place = make_place()
    other = f"{place.name}-other"
    docker("network", "create", "--subnet", "10.77.3.0/24", other)
    with pytest.raises(NameTaken, match=f"docker network {other} has 10.77.3.0/24"):
        place.up(Rack(name=place.name, nodes=1, fabric_subnet="10.77.0.0/16"), quiet)
    assert left_of(place) == []


@docker_only
def test_a_subnet_taken_at_the_last_moment_is_given_up_for_the_next(
    make_place: Callable[..., Compose], docker: Callable[..., str]
) -> None:
    place = make_place()
    lost: list[str] = []

    def take_it(line: str) -> None:
        if line.startswith("docker compose up") and not lost:
            file = yaml.safe_load((place.state / "compose.yaml").read_text())
            lost.append(file["networks"]["fabric"]["ipam"]["config"][0]["subnet"])
            docker("network", "create", "--subnet", lost[0], f"{place.name}-thief")

    rack = place.up(Rack(name=place.name, nodes=1), take_it)
    assert lost and rack.fabric_subnet not in (None, lost[0])
    assert [state.state for state in place.nodes()] == ["up"]


@docker_only
def test_names_of_somebody_else_are_refused_and_left_alone(
    make_place: Callable[..., Compose], docker: Callable[..., str], image: str
) -> None:
    place = make_place()
    network = docker("network", "create", f"torchrack-{place.name}_fabric")
    with pytest.raises(NameTaken, match=f"network torchrack-{place.name}_fabric is not torchrack's"):
        place.up(Rack(name=place.name, nodes=1), quiet)
    container = docker("create", "--name", f"torchrack-{place.name}-node0-1", image, "true")
    with pytest.raises(NameTaken, match=f"docker container rm torchrack-{place.name}-node0-1"):
        place.up(Rack(name=place.name, nodes=1), quiet)
    docker("inspect", network, container)


@docker_only
def test_the_rack_of_another_checkout_is_named_and_left_alone(make_place: Callable[..., Compose]) -> None:
    theirs = make_place(folder="theirs")
    theirs.up(Rack(name=theirs.name, nodes=1), quiet)
    ours = make_place(theirs.name, folder="ours")
    with pytest.raises(NameTaken, match=f"kept in {theirs.state}\n  fix: RACK=another"):
        ours.up(Rack(name=ours.name, nodes=1), quiet)
    assert ours.nodes() == ()
    with pytest.raises(NotRunning, match="no node0"):
        ours.spawn("node0", ["true"])
    ours.down()
    assert [state.state for state in theirs.nodes()] == ["up"]
    with pytest.raises(NameTaken, match=f"fix: make down RACK={theirs.name}"):
        theirs.up(Rack(name=theirs.name, nodes=1), quiet)
    assert [state.state for state in theirs.nodes()] == ["up"]


@docker_only
def test_two_racks_at_once_take_different_subnets(make_place: Callable[..., Compose]) -> None:
    places, racks = [make_place(folder=f"state{i}") for i in range(2)], dict[str, Rack]()

    def bring_up(place: Compose) -> None:
        racks[place.name] = place.up(Rack(name=place.name, nodes=1), quiet)

    threads = [threading.Thread(target=bring_up, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = (racks[place.name] for place in places)
    assert {first.fabric_subnet, first.mgmt_subnet}.isdisjoint({second.fabric_subnet, second.mgmt_subnet})
    places[0].down()
    assert [state.state for state in places[1].nodes()] == ["up"]


@docker_only
def test_a_failure_midway_removes_all_that_was_made(
    make_place: Callable[..., Compose], docker: Callable[..., str]
) -> None:
    place = make_place()

    def kill_node1(line: str) -> None:
        if line == "names and shaping":
            docker("kill", f"torchrack-{place.name}-node1-1")

    with pytest.raises(NotRunning, match="node1 did not stay up: Exited"):
        place.up(Rack(name=place.name, nodes=2), kill_node1)
    assert left_of(place) == []


@docker_only
def test_a_dead_node_is_told_apart_and_its_files_can_still_be_read(
    make_place: Callable[..., Compose], docker: Callable[..., str]
) -> None:
    place = make_place()
    place.up(Rack(name=place.name, nodes=2), quiet)
    place.put("node1", {"run/log.txt": b"last words"})
    docker("kill", f"torchrack-{place.name}-node1-1")
    alive, dead = place.nodes()
    assert (alive.state, dead.state) == ("up", "broken")
    assert "Exited (137)" in dead.detail
    assert place.read("node1", "run/log.txt") == b"last words"
    with pytest.raises(NotRunning, match="node1 is not up"):
        place.run("node1", ["true"])
    docker("rm", f"torchrack-{place.name}-node1-1")
    assert [state.node for state in place.nodes()] == ["node0"]


@docker_only
def test_a_node_keeps_its_names_and_shaping_over_a_restart(
    make_place: Callable[..., Compose], docker: Callable[..., str]
) -> None:
    place = make_place()
    rack = place.up(Rack(name=place.name, nodes=1), quiet)
    docker("restart", f"torchrack-{place.name}-node0-1")
    assert wait_for(lambda: "tbf" in sh(place, "node0", "tc qdisc show"), 10)
    assert sh(place, "node0", "cat /etc/hosts") == hosts_file(rack)


@docker_only
def test_no_job_can_kill_what_keeps_its_node_alive(make_place: Callable[..., Compose]) -> None:
    place = make_place()
    place.up(Rack(name=place.name, nodes=1), quiet)
    sh(place, "node0", "kill -9 -1")
    assert [state.state for state in place.nodes()] == ["up"]


@docker_only
def test_two_downs_at_once_both_succeed(make_place: Callable[..., Compose]) -> None:
    place = make_place()
    place.up(Rack(name=place.name, nodes=2), quiet)
    (place.state / "compose.yaml").unlink()
    other = make_place(place.name)
    thread = threading.Thread(target=other.down)
    thread.start()
    place.down()
    thread.join()
    assert left_of(place) == []


UP = """
import fcntl, sys
from pathlib import Path
from torchrack.model.rack import Rack
from torchrack.places.compose import Compose

name, state = sys.argv[1], Path(sys.argv[2])
lock = (state / "lock").open("w")
fcntl.flock(lock, fcntl.LOCK_EX)
place = Compose(name, state)
place.inherit_fds = (lock.fileno(),)
place.up(Rack(name=name, nodes=2), lambda line: print(line, flush=True))
print("done", flush=True)
"""


def freed(lock: Path) -> bool:
    """Whether nobody holds the lock any more."""
    with lock.open() as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def up_in_another_process(place: Compose) -> subprocess.Popen[str]:
    place.state.mkdir(exist_ok=True)
    argv = [sys.executable, "-c", UP, place.name, str(place.state)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def seen(place: Compose, what: str, process: subprocess.Popen[str]) -> None:
    """Wait until `up` in another process has come to `what`: a network, a container, or a line of progress."""
    assert process.stdout
    if what in ("mgmt", "fabric", "node"):
        assert wait_for(lambda: any(what in name for name in left_of(place)), 60)
    else:
        assert any(line.startswith(what) for line in process.stdout)


@docker_only
@pytest.mark.parametrize("moment", ["docker compose up", "mgmt", "node", "names and shaping"])
def test_after_kill_9_in_the_middle_of_up_down_leaves_nothing(make_place: Callable[..., Compose], moment: str) -> None:
    place = make_place()
    with up_in_another_process(place) as process:
        seen(place, moment, process)
        process.kill()
    assert wait_for(lambda: freed(place.state / "lock"), 60, pause=0.05)
    # All or nothing (killed before it began): the lock was held until `docker compose up` had ended.
    assert len(left_of(place)) == 4 or (moment == "docker compose up" and left_of(place) == [])
    place.down()
    assert left_of(place) == []


@docker_only
@pytest.mark.parametrize("moment", ["docker compose up", "node"])
def test_ctrl_c_in_the_middle_of_up_removes_what_was_made(make_place: Callable[..., Compose], moment: str) -> None:
    place = make_place()
    with up_in_another_process(place) as process:
        seen(place, moment, process)
        process.send_signal(signal.SIGINT)
    assert process.returncode in (-signal.SIGINT, 1)
    assert left_of(place) == []
