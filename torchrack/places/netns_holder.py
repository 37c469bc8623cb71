"""PID 1 of a rack on Linux namespaces. Standard library only; run as `python -I -S netns_holder.py holder RACK STATE`.

The holder reads STATE/config.json, makes a bridge a network and an anchor a node, writes "ready" and then only waits:
when it dies, the kernel ends everything in the rack. An anchor is PID 1 of one node and keeps its namespaces open. Both
command lines end in `netns_holder.py ROLE RACK STATE`, with "holder" or the node's name as the role, so that they are
found in /proc even where no state file was written.
"""

# os.path and open: importing pathlib would be the slowest part of the start.
# ruff: noqa: PTH103, PTH110, PTH112, PTH123

import ctypes
import json
import os
import signal
import subprocess
import sys
import traceback
from typing import Any

NEWNS, NEWUTS, NEWIPC, NEWNET, NEWPID = 0x20000, 0x4000000, 0x8000000, 0x40000000, 0x20000000
RDONLY, NOSUID, NODEV, NOEXEC, BIND, REC = 1, 2, 4, 8, 4096, 16384
ANCHOR = "import signal\nwhile True: signal.pause()"  # not this file: its imports would cost every node 3 MB
libc = ctypes.CDLL(None, use_errno=True)


def call(function: Any, *args: Any) -> None:
    if function(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}{args}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    call(libc.mount, os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode())


def batch(tool: str, lines: list[str]) -> None:
    subprocess.run([tool, "-batch", "-"], input="\n".join(lines), text=True, check=True, stdout=sys.stderr)


def silence_ipv6() -> None:
    """Without this, neighbour and multicast chatter would count as bytes on the wires."""
    for scope in ("all", "default"):
        path = f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6"
        if os.path.exists(path):
            with open(path, "w") as file:
                file.write("1")


def private_tmp(own: str, keep: list[str]) -> None:
    """Put the folder `own` over /tmp; what is in `keep` (a checkout or a venv may lie there) stays visible."""
    shared = os.open("/tmp", os.O_PATH)
    mount(own, "/tmp", flags=BIND)
    for path in keep:
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{shared}/{os.path.relpath(path, '/tmp')}", path, flags=BIND | REC)


def mount_all(node: str, state: str, config: dict[str, Any]) -> None:
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    try:
        mount("sysfs", "/sys", "sysfs", RDONLY | NOSUID | NODEV | NOEXEC)
    except OSError as error:  # refused where parts of /sys are masked: /sys/class/net then shows the host's NICs
        print(f"{node}: keeps the host's /sys: {error}", file=sys.stderr)
    if not config["shm_shared"]:
        mount_shm(config)
    for name in ("hosts", "nsswitch.conf", "passwd"):
        mount(f"{state}/etc/{name}", f"/etc/{name}", flags=BIND)
    if os.path.isdir("/run/nscd"):  # the C library would ask the host's cache before it reads our hosts file
        mount("none", "/run/nscd", "tmpfs", RDONLY)
    private_tmp(f"{state}/tmp/{node}", config["keep"])


def mount_shm(config: dict[str, Any]) -> None:
    mount("shm", "/dev/shm", "tmpfs", NOSUID | NODEV, f"size={config['shm']},mode=1777")


def become_node(node: str, state: str, config: dict[str, Any], born: int, go: tuple[int, int]) -> None:
    """In a fresh child: make the node, then become its anchor. Never returns."""
    call(libc.unshare, NEWNET | NEWNS | NEWUTS | NEWIPC)
    os.close(born)
    call(libc.sethostname, node.encode(), len(node))
    mount_all(node, state, config)
    silence_ipv6()
    os.close(go[1])
    os.read(go[0], 1)  # ends when the holder closes it: the NICs have arrived
    batch("ip", config["nodes"][node]["ip"])
    batch("tc", config["nodes"][node]["tc"])
    settle()
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", ANCHOR, __file__, node, sys.argv[2], state])


def fork_node(node: str, state: str, config: dict[str, Any], born: int, go: tuple[int, int], bad: int) -> int:
    """Start a node as PID 1 of a PID namespace of its own; returns its PID as the holder sees it."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    call(libc.unshare, NEWPID)
    pid = os.fork()
    if pid == 0:
        try:
            become_node(node, state, config, born, go)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{node}: {error}", file=sys.stderr, flush=True)
        except BaseException:
            traceback.print_exc()
        os.write(bad, b"!")
        os._exit(1)
    call(libc.setns, own, NEWPID)
    os.close(own)
    return pid


def cables(networks: list[str], pids: list[int]) -> list[str]:
    return [
        line
        for index, pid in enumerate(pids)
        for net in networks
        for line in (
            f"link add {net}{index} type veth peer name {net} netns {pid}",
            f"link set {net}{index} master {net} up",
        )
    ]


def hold(state: str) -> None:
    with open(f"{state}/config.json") as file:
        config = json.load(file)
    networks = config["networks"]
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    if config["shm_shared"]:
        mount_shm(config)  # every node inherits it
    silence_ipv6()
    # Without snooping a bridge has nothing to announce: every byte on a wire is a node's.
    bridges = [(f"add {net} type bridge mcast_snooping 0", f"set {net} up") for net in networks]
    batch("ip", [f"link {words}" for bridge in bridges for words in bridge])
    born, go, bad = os.pipe(), os.pipe(), os.pipe()  # all close on exec: their ends tell how far every node has come
    pids = [fork_node(node, state, config, born[1], go, bad[1]) for node in config["nodes"]]
    os.close(born[1])
    os.close(bad[1])
    os.read(born[0], 1)
    batch("ip", cables(networks, pids))
    os.close(go[1])
    if os.read(bad[0], 1):
        sys.exit("a node did not come up")


def settle() -> None:
    """Let go of the caller's pipe, and let the kernel reap every orphan by itself (kept across exec)."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def main(state: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        hold(state)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"holder: {error}")
    os.write(1, b"ready\n")  # fails where the caller has died meanwhile, which ends the half-made rack
    settle()
    while True:
        signal.pause()


main(sys.argv[3])
