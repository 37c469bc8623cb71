"""A rack of pretend nodes on Linux namespaces: no daemon, no image, no root.

A detached holder (netns_holder.py) is PID 1 of a user, network, mount and PID namespace; each node is an anchor process
in its own network, UTS, mount, IPC and PID namespaces inside. Killing the holder ends the rack and all in it.
"""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torchrack.model.errors import CommandFailed, Lacking, NotEnough, NotFound, NotRunning, RackBusy, Remains, TimedOut
from torchrack.model.rack import NETS, NetName, Rack
from torchrack.places import netns_check
from torchrack.places.base import NodeState, Step
from torchrack.places.local import NSSWITCH, LocalPlace, hosts_file, other_names, shape_argv, wait_for, writing
from torchrack.places.netns_process import HOLDER, Process, alive, find, kill, same

# Every rack has network namespaces of its own, so all racks use the same subnets and never collide.
SUBNETS: Mapping[NetName, str] = {"mgmt": "10.79.0.0/24", "fabric": "10.78.0.0/24"}
PASSWD = "root:x:0:0:root:/:/bin/sh\njob:x:1000:1000:job:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
LOG, CONFIG, STATE = "holder.log", "config.json", "state.json"
FOLDERS = ("nodes", "tmp", "etc")
DOWN_SECONDS = 10.0


class Netns(LocalPlace):
    kind: ClassVar[str] = "netns"

    def check(self) -> None:
        netns_check.check()

    def prepare(self, step: Step) -> None:
        from torchrack.places.torch_wheel import install  # only this call needs it

        install(sys.executable, step)

    def up(self, rack: Rack, step: Step) -> Rack:
        self._refuse_existing()
        rack = rack.model_copy(update={f"{net}_subnet": getattr(rack, f"{net}_subnet") or SUBNETS[net] for net in NETS})
        self._remove_files()  # what a rack that died with the machine has left
        try:
            with writing(self.state):
                self._lay_out(rack)
            self._start_holder(rack.nodes)
            self._record(rack)
        except BaseException:
            self.down()
            raise
        step(f"{rack.nodes} nodes, each in namespaces of its own")
        return rack

    def nodes(self) -> tuple[NodeState, ...]:
        roles = {process.role for process in self._processes()}
        expected = self._read(CONFIG).get("nodes", roles - {"holder"}) if roles else ()
        return tuple(
            NodeState(node, "up") if node in roles else NodeState(node, "broken", "its anchor process has died")
            for node in sorted(expected, key=lambda node: int(node.removeprefix("node")))
        )

    def home(self, node: str) -> str:
        return str(self.state / "nodes" / node)

    def python(self, node: str) -> str:
        return sys.executable

    def put(self, node: str, files: Mapping[str, bytes]) -> None:
        self._anchor(node)
        with writing(self.state):
            for path, content in files.items():
                target = self._outside(node, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
                target.chmod(0o755 if path.endswith(".sh") else 0o644)

    def read(self, node: str, path: str) -> bytes:
        try:
            return self._outside(node, path).read_bytes()
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{node}:{path}") from None

    def _outside(self, node: str, path: str) -> Path:
        """A node's path as seen from here: its home is the same folder, and outlives it; /tmp and /dev/shm do not."""
        full = Path(self.home(node), path)
        if full.is_relative_to(self.home(node)):
            return full
        return Path(f"/proc/{self._anchor(node).pid}/root{full}")

    def argv(self, node: str, command: Sequence[str], root: bool) -> list[str]:
        enter = [
            shutil.which("nsenter", path=netns_check.PATH) or "nsenter",
            "-t",
            str(self._anchor(node).pid),
            "-U",
            "--preserve-credentials",
            "-n",
            "-u",
            "-m",
            "-i",
            "-p",
        ]
        user = () if root else netns_check.JOB_USER
        path = f"{Path(self.python(node)).parent}:{netns_check.PATH}"
        home = self.home(node)
        clean = ["env", "-i", "-C", home, f"PATH={path}", f"HOME={home}", "LANG=C.UTF-8"]
        return [*enter, "--", *user, *clean, *command]

    def down(self) -> None:
        found = find(self.name, self.state)
        for process in found:
            kill(process)
        # The holder's death ends all others; the kernel lets it go only when the last of them is gone.
        if not wait_for(lambda: not any(map(alive, found)) and not find(self.name, self.state), DOWN_SECONDS):
            left = [f"process {process.pid} ({process.role})" for process in found if alive(process)]
            raise Remains(left, f"make down RACK={self.name}")
        self._remove_files()

    def _refuse_existing(self) -> None:
        if found := find(self.name, self.state):
            raise RackBusy(f"rack {self.name} is up already (process {found[0].pid})", f"make down RACK={self.name}")

    def _lay_out(self, rack: Rack) -> None:
        for folder in FOLDERS:
            (self.state / folder).mkdir(parents=True, exist_ok=True)
        for node in rack.node_names:
            Path(self.home(node)).mkdir(exist_ok=True)
            own_tmp = self.state / "tmp" / node
            own_tmp.mkdir(exist_ok=True)
            own_tmp.chmod(0o1777)
        for name, text in (("hosts", hosts_file(rack)), ("nsswitch.conf", NSSWITCH), ("passwd", PASSWD)):
            (self.state / "etc" / name).write_text(text)
        (self.state / CONFIG).write_text(json.dumps(holder_config(rack, under_tmp(self.state))))

    def _start_holder(self, count: int) -> None:
        """Start the detached holder and wait until all nodes are up."""
        interpreter = [sys.executable, "-I", "-S", str(HOLDER), "holder", self.name, str(self.state)]
        argv = ["setsid", "--fork", *netns_check.UNSHARE, *interpreter]
        seconds = up_seconds(count)
        with (self.state / LOG).open("wb") as log:
            null, environment = subprocess.DEVNULL, {"PATH": netns_check.PATH}
            process = subprocess.Popen(argv, stdin=null, stdout=subprocess.PIPE, stderr=log, env=environment, cwd="/")
        with process:
            assert process.stdout
            in_time = select.select([process.stdout], [], [], seconds)[0]
            if not in_time:
                message = f"{count} nodes were not up within {seconds:g} s; the holder's log ends:\n{self._log()}"
                raise TimedOut(message, "try again when the machine is less busy, or with fewer NODES")
            if process.stdout.readline() != b"ready\n":
                raise not_started(argv, self._log())

    def _log(self) -> str:
        return (self.state / LOG).read_text(errors="replace")[-4000:]

    def _record(self, rack: Rack) -> None:
        """Write who holds the rack, before anyone uses it."""
        found = find(self.name, self.state)
        missing = {"holder", *rack.node_names} - {process.role for process in found}
        if missing:
            raise CommandFailed([str(HOLDER)], 1, self._log(), f"no process of {', '.join(sorted(missing))}: try again")
        with writing(self.state):
            draft = self.state / f"{STATE}.new"
            draft.write_text(json.dumps(found))
            draft.replace(self.state / STATE)

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.state / name).read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # a crash before or while it was written
            return {}

    def _processes(self) -> list[Process]:
        """The living holder and anchors: as recorded, else as found in /proc."""
        recorded = [process for process in (Process(*fields) for fields in self._read(STATE)) if same(process)]
        return recorded or find(self.name, self.state)

    def _anchor(self, node: str) -> Process:
        processes = self._processes()
        for process in processes:
            if process.role == node:
                return process
        if processes and node not in self._read(CONFIG).get("nodes", ()):
            raise NotFound(f"rack {self.name} has no {node}", f"make status RACK={self.name} lists its nodes")
        raise NotRunning(f"{node} of rack {self.name} is not up", f"make up RACK={self.name}")

    def _remove_files(self) -> None:
        if not self.state.exists():
            return
        try:
            for folder in FOLDERS:
                remove_tree(self.state / folder)
            for name in (CONFIG, LOG, f"{STATE}.new", STATE):
                (self.state / name).unlink(missing_ok=True)
            if not any(self.state.iterdir()):
                self.state.rmdir()
        except OSError as error:
            raise Remains([f"{error.filename} ({error.strerror})"], f"sudo rm -r {self.state}") from error


def up_seconds(count: int) -> float:
    """How long `count` nodes may take to come up; 32 take 0.7 s on two idle cores."""
    return 10 + 0.5 * count


def not_started(argv: Sequence[str], log: str) -> Lacking | CommandFailed:
    """The error for a holder that gave up, from its log."""
    if "unshare" in log and os.strerror(errno.ENOSPC) in log:
        hint = "make down ALL=1, or sudo sysctl -w user.max_net_namespaces=15000"
        return NotEnough(f"no more namespaces may be made here; the holder's log:\n{log}".rstrip(), hint)
    return CommandFailed(argv, 1, log, "make down ALL=1, then try again")


def under_tmp(state: Path) -> list[str]:
    """What a node needs of the machine's /tmp, which it does not share: our files, where they lie there."""
    needed = {state, HOLDER.parent, Path(sys.prefix), Path(sys.base_prefix)}
    return sorted(str(path) for path in needed if path.is_relative_to("/tmp"))


def holder_config(rack: Rack, keep: list[str]) -> dict[str, Any]:
    """All that the holder is told; it decides nothing."""
    nodes = {node: {"ip": link_lines(rack, node), "tc": [_shape(rack, node)]} for node in rack.node_names}
    return {"networks": NETS, "shm": rack.shm, "shm_shared": rack.shm_shared, "keep": keep, "nodes": nodes}


def _shape(rack: Rack, node: str) -> str:
    return " ".join(shape_argv(other_names(rack, node).get("mgmt", "mgmt"), rack.mgmt_mbit)[1:])


def link_lines(rack: Rack, node: str) -> list[str]:
    """Lines for `ip -batch` on the node, once its NICs are there."""
    renamed = other_names(rack, node)
    rename = [f"link set {net} name {name}" for net, name in renamed.items()]
    addresses = {net: f"{rack.address(node, net)}/{rack.subnet(net).prefixlen}" for net in NETS}
    add = [f"addr add {address} brd + dev {renamed.get(net, net)}" for net, address in addresses.items()]
    return [*rename, *add, *(f"link set {nic} up" for nic in ("lo", *(renamed.get(net, net) for net in NETS)))]


def remove_tree(folder: Path) -> None:
    """Remove a folder even if a job left folders in it that may not be written."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except PermissionError:
        for parent, names, _ in os.walk(folder):
            for path in (Path(parent, name) for name in names):
                if not path.is_symlink():
                    path.chmod(0o700)
        shutil.rmtree(folder)
