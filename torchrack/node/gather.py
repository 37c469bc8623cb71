"""Bring home what tells how a host stands: `gather.py HOME`, a tar on stdout. Runs there, standard library only.

Of this rack: its processes, the logs of runs that are there, flight-recorder dumps. Of the host: sockets, kernel
messages, GPUs, NCCL's RAS. What is not to be had is a line that says why.
"""

from __future__ import annotations

import contextlib
import glob
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile

EACH_S = 8
LARGEST = 64 << 20  # bytes of one file
DUMPS = ("/tmp/nccl_trace_rank_*", "/tmp/comm_lib_trace_rank_*")
RAS = ("127.0.0.1", 28028)
COMMANDS = {
    "sockets.txt": ["ss", "-tnp"],
    "kernel.txt": ["dmesg", "--ctime"],
    "gpus.txt": ["nvidia-smi"],
    "gpu-topology.txt": ["nvidia-smi", "topo", "-m"],
    "rdma.txt": ["rdma", "statistic"],
}


def said(argv: list[str]) -> str:
    tool = shutil.which(argv[0], path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if not tool:
        return f"no {argv[0]} on this host"
    try:
        done = subprocess.run([tool, *argv[1:]], capture_output=True, timeout=EACH_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{argv[0]}: {error}"
    return (done.stdout + done.stderr).decode(errors="replace")[-(1 << 20) :]


def field(pid: str, name: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def own(home: str) -> list[str]:
    """Pids that this rack started."""
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and f"TORCHRACK_AT={home}" in field(pid, "environ")]


def processes(pids: list[str]) -> str:
    rows = ["pid state waits-in command"]
    for pid in pids:
        state = field(pid, "stat").rpartition(")")[2].split()[:1]
        rows.append(f"{pid} {''.join(state)} {field(pid, 'wchan') or '-'} {field(pid, 'cmdline')}")
    return "\n".join(rows)


def stacks(pids: list[str]) -> str:
    """Where each rank stands, if py-spy is beside this Python or in PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    tool = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    ranks = [pid for pid in pids if "LOCAL_RANK=" in field(pid, "environ")]
    if not tool:
        return f"no py-spy on this host; {len(ranks)} ranks: {' '.join(ranks)}"
    return "\n\n".join(said([tool, "dump", "--pid", pid]) for pid in ranks) or "no rank is alive"


def ras() -> str:
    try:
        with socket.create_connection(RAS, 2) as peer:
            peer.settimeout(EACH_S)
            peer.sendall(b"verbose status\n")
            return b"".join(iter(lambda: peer.recv(1 << 16), b"")).decode(errors="replace")
    except OSError as error:
        return f"NCCL's RAS at {RAS[0]}:{RAS[1]}: {error}"


def add(tar: tarfile.TarFile, name: str, text: str) -> None:
    content = (text.rstrip() + "\n").encode()
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def main(home: str) -> None:
    pids = own(home)
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|gz") as tar:
        add(tar, "processes.txt", processes(pids))
        add(tar, "stacks.txt", stacks(pids))
        add(tar, "ras.txt", ras())
        for name, argv in COMMANDS.items():
            add(tar, name, said(argv))
        for base, _, files in os.walk(f"{home}/runs"):
            for name in files:
                path = os.path.join(base, name)
                if "/logs" in path or "/out/" in path or name.endswith((".jsonl", ".txt")):
                    with contextlib.suppress(OSError):
                        if os.path.isfile(path) and os.stat(path).st_size <= LARGEST:  # no pipe of a flight recorder
                            tar.add(path, os.path.relpath(path, home))
        for path in (found for pattern in DUMPS for found in glob.glob(pattern)):
            with contextlib.suppress(OSError):
                tar.add(path, f"dumps/{os.path.basename(path)}")


main(sys.argv[1])
