"""The netns place beyond the contract: crashes, other users, full disks, machines that do not allow it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchrack.model.errors import CommandFailed, NotInstalled, NotPermitted, RackBusy, TimedOut
from torchrack.model.rack import MiB, Rack
from torchrack.places import netns, netns_check
from torchrack.places.base import NodeState
from torchrack.places.local import shape_argv, wait_for
from torchrack.places.netns import Netns, holder_config, link_lines, under_tmp
from torchrack.places.netns_process import PROC, Process, find, kill, same

pytestmark = pytest.mark.netns
HERE = Path(__file__).parents[1]
USERNS = ["unshare", "--user", "--map-root-user", "--mount", "--", "sh", "-ec"]
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")


def quiet(line: str) -> None:
    pass


def rack(nodes: int = 2) -> Rack:
    return Rack(nodes=nodes, shm=8 * MiB)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Netns]:
    place = Netns("test", tmp_path / "a plåce")
    yield place
    place.down()
    assert find(place.name, place.state) == []


# What the holder is told


def test_the_holder_is_told_everything() -> None:
    two = Rack(nodes=2, mgmt_subnet="10.79.0.0/24", fabric_subnet="10.78.0.0/24", mgmt_mbit=50)
    assert link_lines(two, "node1") == [
        "addr add 10.79.0.11/24 brd + dev mgmt",
        "addr add 10.78.0.11/24 brd + dev fabric",
        "link set lo up",
        "link set mgmt up",
        "link set fabric up",
    ]
    config = holder_config(two, keep=[])
    assert config["nodes"]["node0"]["tc"] == [
        "qdisc replace dev mgmt root tbf rate 50mbit burst 65536b latency 100ms",
    ]
    assert config["shm"] == 1 << 30


def test_the_burst_grows_with_the_rate() -> None:
    """A kernel tick lets out 1/250 s worth at most, so a fixed burst would cap fast links."""
    assert "65536b" in shape_argv("mgmt", 100)
    assert "5000000b" in shape_argv("mgmt", 10_000)


def test_a_checkout_under_tmp_stays_visible() -> None:
    assert "/tmp/clone/.torchrack/lab/place" in under_tmp(Path("/tmp/clone/.torchrack/lab/place"))
    assert "/tmpfoo/place" not in under_tmp(Path("/tmpfoo/place"))


# Size and speed


def test_thirty_two_nodes(place: Netns) -> None:
    full = place.up(rack(32), quiet)
    assert len(place.nodes()) == 32
    last = full.address("node31", "fabric")
    assert last == "10.78.0.41"
    hello = "import socket, sys; socket.create_connection((sys.argv[1], 22), 5)"
    output = place.run("node0", [place.python("node0"), "-I", "-c", hello, last])
    assert b"ConnectionRefusedError" in output.stderr  # node31's kernel answered: the wire is there
    began = time.monotonic()
    place.down()
    assert time.monotonic() - began < 5


def test_a_job_gets_three_variables_and_no_more(place: Netns) -> None:
    place.up(rack(1), quiet)
    lines = place.run("node0", ["env"]).stdout.decode().splitlines()
    bin_folder = Path(sys.executable).parent
    home = place.home("node0")
    assert sorted(lines) == ["HOME=" + home, "LANG=C.UTF-8", f"PATH={bin_folder}:{netns_check.PATH}"]
    assert place.run("node0", ["sh", "-c", "command -v python3"]).stdout.decode().strip() == f"{bin_folder}/python3"


# Processes and state


def test_the_rack_outlives_its_caller_and_is_found_again(place: Netns) -> None:
    place.up(rack(), quiet)
    (place.state / netns.STATE).unlink()
    fresh = Netns(place.name, place.state)
    assert [state.state for state in fresh.nodes()] == ["up", "up"]
    assert fresh.run("node1", ["hostname"]).stdout == b"node1\n"


def test_state_says_who_holds_the_rack(place: Netns) -> None:
    place.up(rack(), quiet)
    recorded = [Process(*fields) for fields in json.loads((place.state / netns.STATE).read_text())]
    assert {process.role for process in recorded} == {"holder", "node0", "node1"}
    assert all(same(process) for process in recorded)
    assert sorted(recorded) == sorted(find(place.name, place.state))


def test_the_holder_keeps_none_of_the_callers_files(place: Netns) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    place.up(rack(), quiet)
    os.close(writer)
    os.set_blocking(reader, False)
    assert os.read(reader, 1) == b""  # the end; BlockingIOError if anyone still held it
    os.close(reader)


def test_a_dead_anchor_is_a_broken_node(place: Netns) -> None:
    place.up(rack(), quiet)
    kill(next(process for process in find(place.name, place.state) if process.role == "node1"))
    broken = NodeState("node1", "broken", "its anchor process has died")
    assert wait_for(lambda: place.nodes() == (NodeState("node0", "up"), broken), 5)
    (place.state / "nodes/node1/log").write_text("last words")
    assert place.read("node1", "log") == b"last words"


def test_a_recycled_pid_is_never_killed(place: Netns) -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        mine = PROC / str(stranger.pid)
        pidns = (mine / "ns/pid").stat().st_ino
        place.state.mkdir()
        recorded = [("holder", stranger.pid, 1, pidns), ("node0", stranger.pid, 1, pidns)]
        (place.state / netns.STATE).write_text(json.dumps(recorded))
        assert place.nodes() == ()
        place.down()
        kill(Process("holder", stranger.pid, 1, pidns))
        with pytest.raises(subprocess.TimeoutExpired):
            stranger.wait(0.2)
        stranger.kill()


@pytest.mark.parametrize("rubbish", ["", "{", "[]", '{"nodes": '])
def test_half_written_state_is_no_obstacle(place: Netns, rubbish: str) -> None:
    place.state.mkdir()
    for name in (netns.STATE, netns.CONFIG):
        (place.state / name).write_text(rubbish)
    assert place.nodes() == ()
    place.down()
    assert not place.state.exists()


def test_up_refuses_a_rack_that_is_up(place: Netns) -> None:
    place.up(rack(), quiet)
    with pytest.raises(RackBusy, match="fix: make down RACK=test"):
        place.up(rack(), quiet)


def test_up_starts_clean_where_a_rack_died_with_its_machine(place: Netns) -> None:
    place.up(rack(), quiet)
    place.put("node0", {"old": b"rack's"})
    for process in find(place.name, place.state):
        kill(process)
    assert wait_for(lambda: not place.nodes(), 5)
    place.up(rack(1), quiet)
    with pytest.raises(FileNotFoundError):
        place.read("node0", "old")


def test_down_keeps_what_is_not_its_own_and_removes_what_jobs_locked(place: Netns) -> None:
    place.up(rack(), quiet)
    place.run("node0", ["sh", "-c", "mkdir -p a/b && touch a/b/c && ln -s /etc a/link && chmod 0 a/b && chmod 500 a"])
    (place.state / "record").write_text("not the place's")
    place.down()
    assert [path.name for path in place.state.iterdir()] == ["record"]
    assert Path("/etc").stat().st_mode & 0o777 == 0o755


@as_root
def test_another_users_rack_is_named_and_not_touched(place: Netns) -> None:
    pretend = ["sh", "-c", "read line", str(netns.HOLDER), "holder", place.name, str(place.state)]
    with subprocess.Popen([*NOBODY, *pretend], stdin=subprocess.PIPE) as theirs:
        try:
            assert wait_for(lambda: "65534" in (PROC / f"{theirs.pid}/status").read_text(), 5)
            for attempt in (place.down, place.nodes, lambda: place.up(rack(), quiet)):
                with pytest.raises(NotPermitted, match=f"rack test is nobody's \\(process {theirs.pid}"):
                    attempt()
            assert theirs.poll() is None
        finally:
            theirs.kill()


# Crashes

UP = """
import sys
from pathlib import Path
from torchrack.places.netns import Netns
from torchrack.model.rack import Rack
rack = Netns(sys.argv[1], Path(sys.argv[2])).up(Rack(nodes=int(sys.argv[3]), shm=8 << 20), lambda line: None)
print("up", flush=True)
sys.stdin.read()
"""


def start_up(place: Netns, nodes: int) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", UP, place.name, str(place.state), str(nodes)]
    return subprocess.Popen(argv, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def roles(place: Netns) -> set[str]:
    return {process.role for process in find(place.name, place.state)}


MOMENTS: dict[str, Callable[[Netns], bool]] = {
    "folders": lambda place: place.state.exists(),
    "config": lambda place: (place.state / netns.CONFIG).exists(),
    "log": lambda place: (place.state / netns.LOG).exists(),
    "holder": lambda place: "holder" in roles(place),
    "first anchor": lambda place: "node0" in roles(place),
    "all anchors": lambda place: len(roles(place)) == 9,
    "recorded": lambda place: (place.state / netns.STATE).exists(),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_down_cleans_up_after_a_caller_killed_during_up(place: Netns, moment: str) -> None:
    with start_up(place, 8) as caller:
        assert wait_for(lambda: MOMENTS[moment](place), 20, pause=0.0005)
        caller.send_signal(signal.SIGKILL)
    place.down()
    assert place.nodes() == ()
    assert not place.state.exists()
    place.up(rack(1), quiet)  # and the next one works at once
    assert len(place.nodes()) == 1


def test_a_half_made_rack_ends_when_its_caller_dies(place: Netns) -> None:
    """Even with no `down`: the holder cannot tell anybody that it is ready."""
    with start_up(place, 8) as caller:
        assert wait_for(lambda: "holder" in roles(place), 20, pause=0.0005)
        caller.send_signal(signal.SIGKILL)
    assert wait_for(lambda: not roles(place), 20)


def test_a_finished_rack_survives_its_caller(place: Netns) -> None:
    with start_up(place, 1) as caller:
        assert caller.stdout and caller.stdout.readline() == b"up\n"
        os.killpg(os.getpgid(caller.pid), 0)  # it has a group; the holder has a session of its own
        caller.send_signal(signal.SIGKILL)
    assert place.run("node0", ["hostname"]).stdout == b"node0\n"
    assert os.getsid(find(place.name, place.state)[0].pid) != os.getsid(0)


def test_an_interrupted_up_leaves_nothing(place: Netns) -> None:
    with start_up(place, 8) as caller:
        assert wait_for(lambda: "holder" in roles(place), 20, pause=0.0005)
        caller.send_signal(signal.SIGINT)
        assert caller.wait(20) != 0
    assert roles(place) == set()
    assert not place.state.exists()


# Bad machines


def sandboxed(setup: str, folder: Path, nodes: int = 2) -> str:
    """Bring a rack up where `setup` was done as the root of a user namespace; returns the error, or "up"."""
    code = """
import sys
from pathlib import Path
from torchrack.places.netns import Netns
from torchrack.model.errors import TorchrackError
from torchrack.model.rack import Rack
place = Netns("test", Path(sys.argv[1]))
try:
    place.check()
    place.up(Rack(nodes=int(sys.argv[2]), shm=8 << 20), lambda line: None)
    place.down()
    print("up")
except TorchrackError as error:
    print(type(error).__name__, error)
print("left:", [str(path) for path in Path(sys.argv[1]).rglob("*")])
"""
    script = f'{setup}\nexec "$@"'
    argv = [*USERNS, script, "sh", sys.executable, "-c", code, str(folder), str(nodes)]
    done = subprocess.run(argv, cwd=HERE, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said, _, left = done.stdout.rpartition("left: ")
    assert left == "[]\n"
    return said


@pytest.mark.parametrize("setup", ["true", "mount -t tmpfs none /sys/kernel"], ids=["plain", "masked /sys"])
def test_a_rack_works_inside_a_user_namespace(setup: str, tmp_path: Path) -> None:
    assert sandboxed(setup, tmp_path / "place") == "up\n"


def test_user_namespaces_forbidden(tmp_path: Path) -> None:
    said = sandboxed("echo 0 > /proc/sys/user/max_user_namespaces", tmp_path / "place")
    assert said.startswith("NotPermitted this machine does not allow user namespaces")
    assert said.endswith("fix: sudo sysctl -w user.max_user_namespaces=15000\n")


def test_masked_proc(tmp_path: Path) -> None:
    said = sandboxed("mount -t tmpfs none /proc/sys/kernel", tmp_path / "place")
    assert said.startswith("NotPermitted netns: `mount -t proc proc /proc` failed in a trial namespace")
    assert "systempaths=unconfined" in said


def test_namespaces_run_out_midway(tmp_path: Path) -> None:
    """The holder's log says why, and nothing is left."""
    said = sandboxed("echo 3 > /proc/sys/user/max_net_namespaces", tmp_path / "place", nodes=4)
    assert said.startswith("NotEnough no more namespaces may be made here")
    assert re.search(r"node\d: \[Errno 28\]", said)  # which one comes too late is a race
    assert "sysctl -w user.max_net_namespaces" in said


def test_full_disk(tmp_path: Path) -> None:
    said = sandboxed(f"mount -t tmpfs -o size=8k none {tmp_path}", tmp_path / "place")
    assert said.startswith("NotEnough no space left for")
    assert f"fix: free some disk space: df -h {tmp_path}" in said


def test_unwritable_state_folder(tmp_path: Path) -> None:
    said = sandboxed(f"mount -t tmpfs -o ro none {tmp_path}", tmp_path / "place")
    assert said.startswith(f"NotPermitted may not write {tmp_path}/place")
    assert "fix: make it yours" in said


def test_a_slow_start_is_bounded(place: Netns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / netns.HOLDER.name
    slow.write_text("import sys, time\nprint('still thinking', file=sys.stderr, flush=True)\ntime.sleep(60)\n")
    monkeypatch.setattr(netns, "HOLDER", slow)
    monkeypatch.setattr(netns, "up_seconds", lambda count: 0.5)
    with pytest.raises(TimedOut, match=r"(?s)2 nodes were not up within 0\.5 s.*still thinking.*fix:"):
        place.up(rack(), quiet)
    assert not place.state.exists()


def test_a_broken_start_tells_the_log(place: Netns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / netns.HOLDER.name
    broken.write_text("raise SystemExit('no bridges today')\n")
    monkeypatch.setattr(netns, "HOLDER", broken)
    with pytest.raises(CommandFailed, match="no bridges today"):
        place.up(rack(), quiet)
    assert not place.state.exists()


@pytest.mark.parametrize("tool", sorted(netns_check.PACKAGES))
def test_a_missing_tool_is_named_with_its_package(tool: str, tmp_path: Path) -> None:
    for name in {*netns_check.PACKAGES, "sh", "mount", "true"} - {tool}:
        (tmp_path / name).symlink_to(shutil.which(name, path=netns_check.PATH) or "/missing")
    with pytest.raises(NotInstalled, match=f"`{tool}`.*\n.*apt-get install {netns_check.PACKAGES[tool]}"):
        netns_check.check(str(tmp_path))


def test_this_machine_is_fine_and_the_check_is_quick() -> None:
    times = []
    for _ in range(3):
        began = time.monotonic()
        netns_check.check()
        times.append(time.monotonic() - began)
    assert min(times) < 0.1


@pytest.mark.parametrize(("name", "value", "command"), netns_check.SYSCTLS)
def test_each_forbidding_setting_is_named(
    name: str, value: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sys" / name).parent.mkdir(parents=True)
    (tmp_path / "sys" / name).write_text(f"{value}\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    error = netns_check.blame(-99, "unshare: unshare failed: Operation not permitted\n", tmp_path)
    assert isinstance(error, NotPermitted)
    assert error.hint == command


def test_a_container_that_forbids_it_is_told_how_to_start(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name:\tx\nSeccomp:\t2\n")
    hint = netns_check.blame(-99, "unshare failed: Operation not permitted", tmp_path).hint
    assert hint and "--security-opt seccomp=unconfined" in hint


@pytest.mark.parametrize("step", netns_check.HINTS)
def test_each_failing_step_has_a_fix(step: int, tmp_path: Path) -> None:
    error = netns_check.blame(step, "said this", tmp_path)
    assert netns_check.STEPS[step] in error.message and "said this" in error.message
    assert error.hint == netns_check.HINTS[step]


# Another user

ORDINARY = """
import json, os, sys
from pathlib import Path
from torchrack.places.netns import Netns
from torchrack.model.rack import Rack
place = Netns("test", Path(sys.argv[1]))
place.check()
place.up(Rack(nodes=2, shm=8 << 20), lambda line: None)
try:
    place.put("node1", {"hello.sh": b"#!/bin/sh\\nid -u; touch made; cat /sys/class/net/fabric/operstate\\n"})
    job = place.run("node1", ["./hello.sh"])
    denied = place.run("node1", ["ip", "link", "set", "lo", "down"]).code
    allowed = place.run("node1", ["ip", "link", "set", "lo", "down"], root=True).code
    facts = [fact.hostname for fact in place.facts()]
finally:
    place.down()
print(json.dumps([os.getuid(), job.stdout.decode().split(), denied > 0, allowed, facts, place.state.exists()]))
"""


def python_for_everyone() -> str:
    """A Python of our version that `nobody` may run: one below a 0700 home is not."""
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}", "/usr/local/bin/python3"):
        argv = [*NOBODY, "env", python, "-c", "import sys; print(sys.version_info[:2])"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd="/")
        if done.stdout.strip() == str(sys.version_info[:2]):
            return python
    pytest.skip(f"no Python 3.{sys.version_info.minor} here that another user may run")


@as_root
def test_an_ordinary_user_needs_no_root() -> None:
    python = python_for_everyone()
    packages = ":".join([str(HERE), *(path for path in sys.path if path.endswith("site-packages"))])
    with tempfile.TemporaryDirectory(prefix="torchrack-test-") as folder:
        os.chown(folder, 65534, 65534)
        argv = [*NOBODY, "env", f"PYTHONPATH={packages}", python, "-c", ORDINARY, f"{folder}/place"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd="/")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [65534, ["1000", "up"], True, 0, ["node0", "node1"], False]
