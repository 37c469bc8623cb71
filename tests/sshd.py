"""Rented machines for tests: the nodes of a netns rack, each behind a real sshd with a host key of its own.

A port of 127.0.0.1 stands for a machine's address. Each connection to it gets an `sshd -i` inside the node's namespaces
(as uid 1000 of the node, so nobody is root there). Faults are played on what is real: the port, the keys, the disk.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchrack.model.hosts import Host
from torchrack.model.rack import Rack
from torchrack.places.base import Process
from torchrack.places.netns import Netns
from torchrack.run.phases import Console

SSHD = "/usr/sbin/sshd"
USER = "job"
ORDINARY = 54321
CONF = """
HostKey {home}/sshd/hostkey
AuthorizedKeysFile {home}/sshd/authorized
StrictModes no
UsePAM no
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxSessions 64
Subsystem sftp internal-sftp
LogLevel VERBOSE
"""


class Quiet(Console):
    """A console that nobody reads."""


def keygen(path: Path, comment: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)], check=True)
    return path


@dataclass
class Machine:
    """One node's front door. `mode`: what meets a connection to its port."""

    place: Netns
    node: str
    keys: Path
    port: int = 0
    user: str = USER
    mode: Literal["sshd", "silent"] = "sshd"
    doors: list[tuple[subprocess.Popen[bytes], socket.socket]] = field(default_factory=list)
    quiet: list[socket.socket] = field(default_factory=list)
    server: socket.socket | None = None
    keeper: Process | None = None
    enter: list[str] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return Path(self.place.home(self.node))

    @property
    def folder(self) -> Path:
        """What torchrack may write to, as ~/.torchrack would be."""
        return self.home / "rented"

    def furnish(self) -> None:
        """Host key, configuration, whose login is welcome."""
        key = keygen(self.keys / f"host-{self.node}")
        self.place.put(
            self.node,
            {
                "sshd/hostkey": key.read_bytes(),
                "sshd/authorized": (self.keys / "user.pub").read_bytes(),
                "sshd/conf": CONF.format(home=self.home).encode(),
            },
        )
        (self.home / "sshd/hostkey").chmod(0o600)
        # All logins share one user namespace, as on a real machine: else none could see another's processes.
        keeper = self.place.spawn(self.node, ["sh", "-c", "echo $$; exec cat"])
        assert keeper.stdout
        self.keeper, self.enter = keeper, ["nsenter", "-t", keeper.stdout.readline().decode().strip(), "-U"]

    def open(self) -> None:
        self.server = socket.create_server(("127.0.0.1", self.port))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self._accept, args=(self.server,), daemon=True).start()

    def door(self) -> list[str]:
        """What meets one connection."""
        argv = [*self.enter, "--preserve-credentials", "--", SSHD, "-i", "-e", "-f", f"{self.home}/sshd/conf"]
        return self.place.argv(self.node, argv, root=True)

    def _accept(self, server: socket.socket) -> None:
        command = self.door()
        with contextlib.suppress(OSError), (self.keys / f"{self.node}.log").open("ab") as log:
            while True:
                connection, _ = server.accept()
                if self.mode == "silent":
                    self.quiet.append(connection)
                    continue
                door = subprocess.Popen(command, stdin=connection, stdout=connection, stderr=log)
                self.doors.append((door, connection))

    def refuse(self) -> None:
        """Nobody listens any more; connections that are there stay."""
        if self.server:
            with contextlib.suppress(OSError):
                self.server.shutdown(socket.SHUT_RDWR)
            self.server.close()
            self.server = None

    def hang_up(self) -> None:
        """Every connection breaks, as if the machine's network went."""
        for door, connection in self.doors:
            with contextlib.suppress(OSError), connection:
                connection.shutdown(socket.SHUT_RDWR)
            door.send_signal(signal.SIGCONT)  # nsenter stops itself when its child is stopped
            door.wait()
        self.doors.clear()

    def close(self) -> None:
        self.refuse()
        self.hang_up()
        for connection in self.quiet:
            connection.close()
        if self.keeper:
            with self.keeper:
                self.keeper.kill()

    def known_hosts_line(self) -> str:
        kind, key, *_ = (self.keys / f"host-{self.node}.pub").read_text().split()
        return f"[127.0.0.1]:{self.port} {kind} {key}\n"

    def processes(self) -> str:
        """Command lines of all that lives in the node."""
        code = "import glob\nfor p in glob.glob('/proc/[0-9]*/cmdline'):\n try: print(open(p).read())\n except OSError: pass"
        return self.place.run(self.node, [sys.executable, "-I", "-c", code]).stdout.decode().replace("\0", " ")


@dataclass
class ThisMachine(Machine):
    """Where the tests run, as an ordinary user who may use Docker: as root would, nobody else's runs are seen."""

    place: Path  # type: ignore[assignment]
    uid: int = field(default_factory=lambda: os.getuid() or ORDINARY)

    def __post_init__(self) -> None:
        self.user = USER if os.getuid() == 0 else getpass.getuser()

    @property
    def home(self) -> Path:
        return self.place

    def furnish(self, more: str = "") -> None:
        """`more` are further lines of sshd's configuration."""
        (self.home / "sshd").mkdir(parents=True)
        keygen(self.keys / f"host-{self.node}").rename(self.home / "sshd/hostkey")
        (self.home / "sshd/authorized").write_bytes((self.keys / "user.pub").read_bytes())
        (self.home / "sshd/conf").write_text(CONF.format(home=self.home) + more)
        (self.home / "sshd/passwd").write_text(f"{self.user}:x:{self.uid}:{self.uid}::{self.home}:/bin/sh\n")
        for path in (self.home, *self.home.rglob("*")):
            os.chown(path, self.uid, -1, follow_symlinks=False)

    def door(self) -> list[str]:
        sshd = [SSHD, "-i", "-e", "-f", f"{self.home}/sshd/conf"]
        if os.getuid():
            return sshd
        who = f"--reuid={self.uid} --regid={self.uid} --groups={Path('/var/run/docker.sock').stat().st_gid}"
        become = f'mount --bind {self.home}/sshd/passwd /etc/passwd && exec setpriv {who} "$@"'
        return ["unshare", "--mount", "sh", "-c", become, "sh", *sshd]


@dataclass
class Machines:
    """Rented machines: node i of the rack below is host i."""

    place: Netns | None
    keys: Path
    all: Sequence[Machine]

    @property
    def known_hosts(self) -> Path:
        return self.keys / "known_hosts"

    @property
    def user_key(self) -> Path:
        return self.keys / "user"

    def trust_all(self) -> None:
        self.known_hosts.write_text("".join(machine.known_hosts_line() for machine in self.all))

    def hosts(self) -> tuple[Host, ...]:
        return tuple(
            Host(
                name=f"m{index}",
                address="127.0.0.1",
                port=machine.port,
                user=machine.user,
                key=str(self.user_key),
                python=sys.executable,
                folder=str(machine.folder),
            )
            for index, machine in enumerate(self.all)
        )

    def inventory(self, path: Path) -> Path:
        """The same as an Ansible inventory (JSON is YAML)."""
        hosts = {
            host.name: {
                "ansible_host": host.address,
                "ansible_port": host.port,
                "ansible_user": host.user,
                "ansible_ssh_private_key_file": host.key,
                "torchrack_python": host.python,
                "torchrack_folder": host.folder,
            }
            for host in self.hosts()
        }
        path.write_text(json.dumps({"all": {"hosts": hosts}}, indent=1))
        return path


@contextlib.contextmanager
def this_machine(more: str = "") -> Iterator[Machines]:
    """The machine that the tests run on, behind sshd; its python3 has no torch. `more`: variables of each login."""
    with tempfile.TemporaryDirectory(prefix="torchrack-") as name:  # pytest's own folders are root's alone
        folder = Path(name)
        folder.chmod(0o755)
        keys = folder / "keys"
        keygen(keys / "user", "torchrack-test")
        machine = ThisMachine(folder / "home", "node0", keys)
        python = (
            shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
        )  # one that any user may start
        subprocess.run([python, "-m", "venv", "--without-pip", str(folder / "bare")], check=True)
        machine.furnish(f"SetEnv PATH={folder}/bare/bin:{os.environ['PATH']} {more}\n")
        machine.open()
        made = Machines(None, keys, [machine])
        made.trust_all()
        try:
            yield made
        finally:
            machine.close()


@contextlib.contextmanager
def machines(name: str, count: int, folder: Path, **rack: object) -> Iterator[Machines]:
    """`count` machines behind sshd; all trusted, all gone at the end."""
    place = Netns(name, folder / "machines")
    asked = {"name": name, "nodes": count, "shm": 1 << 30, **rack}
    place.up(Rack.model_validate(asked), lambda line: None)
    found: list[Machine] = []
    made = Machines(place, folder / "keys", found)
    try:
        keygen(made.user_key, "torchrack-test")
        for index in range(count):
            machine = Machine(place, f"node{index}", made.keys)
            machine.furnish()
            machine.open()
            found.append(machine)
        made.trust_all()
        yield made
    finally:
        for machine in made.all:
            machine.close()
        place.down()
