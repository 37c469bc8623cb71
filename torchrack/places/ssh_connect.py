"""One verified ssh connection to a host, over Fabric: ~/.ssh/config and ProxyJump are its work, trust is ours.

Fabric itself takes any host key (AutoAddPolicy, known_hosts unread) and waits for ever; here a key must be known, every
wait has a bound, and each way to fail is told as what it is.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from torchrack.model.errors import Unreachable
from torchrack.model.hosts import Host

if TYPE_CHECKING:
    from fabric import Connection
    from paramiko import HostKeys as KnownHosts
    from paramiko import PKey, SSHClient

CONNECT_S = 10.0  # for TCP, for the server's first words and for the login, each
SILENT_S = 20  # seconds of unanswered bytes after which the kernel gives a connection up (the supervisor's lease)
KEEPALIVE_S = 5
SYSTEM_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)  # tracebacks of what is told as a row of preflight
HostKeys = Literal["known", "accept-new"]
_reading = Lock()


@dataclass(frozen=True)
class Trust:
    """Whose host keys are taken: those in `known_hosts`; with accept-new also a new one, which is pinned and told."""

    host_keys: HostKeys = "known"
    known_hosts: Path | None = None
    tell: Callable[[str], None] = print

    @property
    def file(self) -> Path:
        return self.known_hosts or Path("~/.ssh/known_hosts").expanduser()


class UnknownKey(Exception):
    """Raised by the policy below; becomes an Unreachable."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__(fingerprint)
        self.fingerprint = fingerprint


def fingerprint(key: PKey) -> str:
    """As `ssh-keygen -l` prints it: ED25519 SHA256:…"""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"{key.get_name()} SHA256:{digest}"


class Policy:
    """What to do about a host key that known_hosts does not have (paramiko's MissingHostKeyPolicy)."""

    def __init__(self, trust: Trust) -> None:
        self.trust = trust

    def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:
        if self.trust.host_keys == "known":
            raise UnknownKey(fingerprint(key))
        pin(self.trust.file, hostname, key)
        self.trust.tell(f"{hostname}: its key is new and now pinned in {self.trust.file}: {fingerprint(key)}")


def pin(file: Path, hostname: str, key: PKey) -> None:
    """Append a line to known_hosts; many connections may do so at once."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+") as lines:
        fcntl.flock(lines, fcntl.LOCK_EX)
        text = lines.read()
        torn = "\n" if text and not text.endswith("\n") else ""
        lines.write(f"{torn}{hostname} {key.get_name()} {key.get_base64()}\n")


def connect(host: Host, trust: Trust) -> Connection:
    """An open, verified connection. Raises Unreachable with the row it belongs to, the reason and the fix."""
    from fabric import Config, Connection

    keys = {"key_filename": str(Path(host.key).expanduser())} if host.key else {}
    waits = {"banner_timeout": CONNECT_S, "auth_timeout": CONNECT_S, "channel_timeout": CONNECT_S}
    if host.key and not Path(keys["key_filename"]).is_file():
        raise Unreachable("login", f"there is no key {host.key}", "correct ansible_ssh_private_key_file")
    connection = Connection(
        host.address,
        user=host.user,
        port=host.port,
        config=Config(overrides={"run": {"in_stream": False}}),
        connect_timeout=int(CONNECT_S),
        connect_kwargs=keys | waits,
    )
    _verify(connection, trust)
    try:
        connection.open()
    except Exception as error:
        connection.close()
        raise unreachable(error, host, connection, trust) from error
    _watch(connection)
    return connection


def _verify(connection: Connection, trust: Trust) -> None:
    """Our policy on the connection and on every ProxyJump before it: Fabric gave them all AutoAddPolicy."""
    link: Any = connection
    while hasattr(link, "client"):
        name = link.host if link.port == 22 else f"[{link.host}]:{link.port}"
        for file in (trust.file, SYSTEM_KNOWN_HOSTS):  # the later one's word counts
            for kind, key in _keys(file, name).items():
                link.client.get_host_keys().add(name, kind, key)
        link.client.set_missing_host_key_policy(Policy(trust))
        link = link.gateway


def _keys(file: Path, name: str) -> Mapping[str, PKey]:
    """What a known_hosts file has for a host, by the kind of key."""
    try:
        seen = file.stat()
    except OSError:
        return {}
    with _reading:
        found: Mapping[str, PKey] | None = _known(file, seen.st_mtime_ns, seen.st_size).lookup(name)
    return found or {}


@lru_cache(2)
def _known(file: Path, changed: int, size: int) -> KnownHosts:
    """A known_hosts file, read once for all hosts until it changes: that of a large cluster is long."""
    from paramiko import HostKeys as KnownHosts

    return KnownHosts(str(file))


def _watch(connection: Connection) -> None:
    """Notice a host that vanished: there is always something under way, which it must acknowledge."""
    transport = connection.transport
    transport.set_keepalive(KEEPALIVE_S)
    if isinstance(transport.sock, socket.socket):  # not behind a ProxyJump or ProxyCommand
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def unreachable(error: Exception, host: Host, connection: Connection, trust: Trust) -> Unreachable:
    """The true sentence for what connecting raised."""
    from paramiko import AuthenticationException, BadHostKeyException, PasswordRequiredException, SSHException
    from paramiko.ssh_exception import NoValidConnectionsError

    where, port = f"{connection.host}:{connection.port}", connection.port
    name = connection.host if port == 22 else f"[{connection.host}]:{port}"
    match error:
        case UnknownKey():
            hint = f"compare {error.fingerprint} with what the provider shows, then HOSTKEYS=accept-new pins it"
            return Unreachable("host key", f"{where}: its key is in no known_hosts", hint)
        case BadHostKeyException():
            shown, known = fingerprint(error.key), fingerprint(error.expected_key)
            why = f"{where}: its key has CHANGED: it shows {shown}, {trust.file} has {known}"
            hint = f"another machine answers there; if you know why: ssh-keygen -f {trust.file} -R '{name}'"
            return Unreachable("host key", why, hint)
        case PasswordRequiredException():
            return Unreachable("login", f"{where}: the key needs a passphrase", "ssh-add that key first")
        case AuthenticationException():
            why = f"{where}: no key of yours is accepted for user {connection.user} ({error})"
            return Unreachable("login", why, f"ssh-copy-id -p {port} {connection.user}@{connection.host}")
        case SSHException() if "No authentication methods" in str(error):
            hint = "ssh-add, or IdentityFile in ~/.ssh/config, or ansible_ssh_private_key_file in HOSTS=inventory.yml"
            return Unreachable("login", f"{where}: there is no key to offer: none in ~/.ssh, and no agent", hint)
        case socket.gaierror():
            return Unreachable(
                "reachable", f"{connection.host} does not resolve", "correct the name, or give an address"
            )
        case NoValidConnectionsError() if not _refused(error.errors.values()):
            return Unreachable("reachable", f"{where}: {error}", "is the address right, and is there a route to it?")
        case NoValidConnectionsError() | ConnectionRefusedError():
            hint = "check the address and the port, and that the machine is up and runs sshd"
            return Unreachable("reachable", f"{where} refuses connections", hint)
        case TimeoutError():
            why = f"{where} does not answer within {CONNECT_S:.0f} s"
            return Unreachable("reachable", why, "is the machine up, and does its firewall let you in?")
        case SSHException() if "banner" in str(error) or "No existing session" in str(error):
            why = f"{where} accepts connections but does not say a word of ssh within {CONNECT_S:.0f} s"
            return Unreachable("reachable", why, "is it the port of sshd? a machine that swaps or boots answers later")
        case _:
            why = f"{where}: {type(error).__name__}: {error}"
            return Unreachable(
                "reachable", why, f"see what ssh says: ssh -v -p {port} {connection.user}@{connection.host}"
            )


def _refused(errors: Iterable[Exception]) -> bool:
    return any(isinstance(error, ConnectionRefusedError) for error in errors)
