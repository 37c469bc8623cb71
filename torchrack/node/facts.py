"""Print this node's facts as one Python literal. Runs on the node: standard library only, nothing of torchrack's.

    facts.py                               what a plan needs
    facts.py --health FOLDER RACK NODE     and what preflight judges: limits, clock, GPUs, versions, links, leftovers

Versions come from the names of package metadata: importing torch would cost seconds. It only reads; nothing is changed.
It runs with -S, and without json, socket, hashlib, subprocess and shutil: their imports took five times as long.
"""

from __future__ import annotations

import _socket
import os
import pwd
import resource
import site
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # as typing's own, whose import takes longer than the facts
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

LARGEST = 1 << 26  # bytes of a file that is still hashed
DUMP, ERROR, DONE = 0x301, 2, 3  # of netlink(7): the flags of a request, the kinds of message that end its answer
ROUTE, GETADDR, ADDRESS, LOCAL = 0, 22, 1, 2  # of rtnetlink(7)
SOCK_DIAG, BY_FAMILY, LISTEN = 4, 20, 10  # of sock_diag(7)


def which(name: str) -> str:
    """The path of a command; where an ordinary user's PATH has no sbin, that one's too."""
    paths = [f"{folder}/{name}" for folder in (*os.get_exec_path(), "/usr/sbin", "/sbin")]
    return next((path for path in paths if os.access(path, os.X_OK)), "")


def kernel(protocol: int, request: int, body: bytes) -> Iterator[bytes]:
    """What the kernel has, message by message, over netlink: no `ip` or `ss` need be there. Raises OSError."""
    link = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW, protocol)
    link.send(struct.pack("=IHHII", 16 + len(body), request, DUMP, 1, 0) + body)
    while data := link.recv(1 << 16):
        while data:
            size, kind = struct.unpack_from("=IH", data)
            if kind == ERROR:
                raise OSError(-struct.unpack_from("=i", data, 16)[0], "netlink")
            if kind == DONE:
                link.close()
                return
            yield data[16:size]
            data = data[size + 3 & ~3 :]


def nics() -> list[dict[str, object]]:
    """Every IPv4 address."""
    found = list[dict[str, object]]()
    for message in kernel(ROUTE, GETADDR, struct.pack("=BxxxI", _socket.AF_INET, 0)):
        prefix, index = struct.unpack_from("=xBxxI", message)
        told = dict(attributes(message[8:]))
        address = told.get(LOCAL) or told[ADDRESS]  # of two ends of a line, the own one
        name = _socket.if_indextoname(index)
        found.append({"name": name, "address": ".".join(map(str, address)), "prefix": prefix})
    return found


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        size, kind = struct.unpack_from("=HH", data)
        yield kind, data[4:size]
        data = data[size + 3 & ~3 :]


def memory_available() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def package_folders() -> list[str]:
    """Where packages are: what the site module, which -S leaves out, would have put on sys.path, first things first."""
    top = os.path.dirname(os.path.dirname(os.path.abspath(sys.executable)))
    folders = site.getsitepackages()
    try:
        with open(f"{top}/pyvenv.cfg") as lines:
            settings = [line.replace(" ", "").strip().lower() for line in lines]
    except OSError:
        settings = None
    if settings is not None:
        python = "python%d.%d" % sys.version_info[:2]
        own = [f"{top}/{lib}/{python}/site-packages" for lib in ("lib", "lib64")]
        folders = own + (folders if "include-system-site-packages=true" in settings else [])
    for folder in tuple(folders):
        for name in sorted(entries(folder)):
            if name.endswith(".pth"):  # names more folders; lines of code in it are not run
                folders += [os.path.join(folder, line) for line in lines_of(f"{folder}/{name}") if line]
    return folders


def entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def lines_of(path: str) -> list[str]:
    try:
        with open(path) as lines:
            return [line.strip() for line in lines]
    except (OSError, ValueError):
        return []


def installed() -> dict[str, str]:
    """Versions by package, as the names of metadata folders tell them: to read them all takes 0.1 s."""
    found = {}
    for folder in reversed(package_folders()):
        for entry in entries(folder):
            stem, kind = os.path.splitext(entry)
            if kind in (".dist-info", ".egg-info"):
                name, version, *_ = *stem.split("-"), ""  # torch-2.13.0+cpu.dist-info, torch-2.13.0-py3.11.egg-info
                found[name.lower().replace("_", "-").replace(".", "-")] = version or told_version(f"{folder}/{entry}")
    return found


def told_version(metadata: str) -> str:
    """Of a package whose folder's name does not tell: torch.egg-info, as a build from source leaves it."""
    told = (line.split(":", 1)[1].strip() for line in lines_of(f"{metadata}/PKG-INFO") if line.startswith("Version:"))
    return next(told, "")


def first_line(path: str) -> str:
    return next(iter(lines_of(path)), "")


def resolved(name: str) -> list[str]:
    try:
        found = _socket.getaddrinfo(name.encode(), None)  # a str would be read as IDNA, whose import takes long
        return sorted({str(info[4][0]) for info in found})
    except OSError:
        return []


def listening() -> list[int]:
    """TCP ports that somebody listens on."""
    ports = set[int]()
    try:
        for family in (_socket.AF_INET, _socket.AF_INET6):
            wanted = struct.pack("=BBxxI48x", family, _socket.IPPROTO_TCP, 1 << LISTEN)
            ports.update(int.from_bytes(message[4:6], "big") for message in kernel(SOCK_DIAG, BY_FAMILY, wanted))
    except OSError:  # this kernel has no sock_diag; for these tables it would walk through all connections
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            rows = [line.split() for line in lines_of(table)[1:]]
            ports |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    return sorted(ports)


def links() -> list[dict[str, object]]:
    """mtu in bytes; speed in Mbit/s, 0 where the driver does not tell."""
    base, found = "/sys/class/net", list[dict[str, object]]()
    for name in sorted(os.listdir(base)) if os.path.isdir(base) else ():
        speed, mtu = first_line(f"{base}/{name}/speed"), first_line(f"{base}/{name}/mtu")
        found.append({"name": name, "mtu": int(mtu or 0), "speed": int(speed) if speed.isdigit() else 0})
    return found


def default_nic() -> str:
    rows = [line.split() for line in lines_of("/proc/net/route")[1:]]
    return next((row[0] for row in rows if row[1] == "00000000" and row[7] == "00000000"), "")


def rdma() -> list[dict[str, object]]:
    base, found = "/sys/class/infiniband", list[dict[str, object]]()
    for device in sorted(os.listdir(base)) if os.path.isdir(base) else ():
        for port in sorted(os.listdir(f"{base}/{device}/ports")):
            where = f"{base}/{device}/ports/{port}"
            state, rate = (first_line(f"{where}/{name}") for name in ("state", "rate"))
            found.append({"device": f"{device}:{port}", "state": state, "rate": rate})
    return found


def gpus() -> dict[str, object]:
    tool = which("nvidia-smi")
    if not tool:
        return {"gpus": [], "driver": "", "gpu_error": ""}
    import subprocess  # only here, where it is small beside nvidia-smi: it can end what does not answer

    query = "--query-gpu=name,driver_version,memory.used,memory.total"
    try:
        done = subprocess.run(
            [tool, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30
        )
    except subprocess.TimeoutExpired:
        return {"gpus": [], "driver": "", "gpu_error": "nvidia-smi did not answer within 30 s"}
    if done.returncode:
        return {"gpus": [], "driver": "", "gpu_error": (done.stdout + done.stderr).strip()[:300]}
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    found = [{"name": row[0], "used_mib": int(row[2]), "total_mib": int(row[3])} for row in rows]
    return {"gpus": found, "driver": rows[0][1] if rows else "", "gpu_error": ""}


def runs() -> list[dict[str, object]]:
    """Living processes that carry a run's tag; `rack` is the one of ours that it belongs to, "" where none is told."""
    found: dict[tuple[str, str], list[int]] = {}
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    items = dict(item.partition(b"=")[::2] for item in file.read().split(b"\0"))
            except OSError:
                continue
            if run := items.get(b"TORCHRACK_RUN"):
                *_, rack, _ = [b"", b"", *items.get(b"TORCHRACK_AT", b"").split(b"/")]  # FOLDER/RACK/NODE
                found.setdefault((os.fsdecode(run), os.fsdecode(rack)), []).append(int(pid))
    return [{"run": run, "rack": rack, "pids": pids} for (run, rack), pids in sorted(found.items())]


def limit(which: int) -> int:
    """The soft limit; -1 is none."""
    soft = resource.getrlimit(which)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def free(path: str) -> int:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    disk = os.statvfs(path)
    return disk.f_frsize * disk.f_bavail


def new_sha256() -> Any:
    """Python's own, where it has a name; hashlib would load all of OpenSSL first."""
    for name in ("_sha2", "_sha256"):
        try:
            return __import__(name).sha256
        except ImportError:
            continue
    import hashlib

    return hashlib.sha256


def digest(folder: str) -> str:
    """One name for all files that are really there, as plan/render.py names a payload; "" without any."""
    sha256, hashed = new_sha256(), {}
    for where, folders, names in os.walk(folder + "/"):
        folders[:] = [name for name in folders if name != "__pycache__"]  # Python's own
        for name in names:
            path = os.path.join(where, name)
            try:
                seen = os.lstat(path)
                if not stat.S_ISREG(seen.st_mode) or seen.st_size > LARGEST:
                    return "?"  # nothing that a deploy puts there
                with open(path, "rb") as file:
                    hashed[os.path.relpath(path, folder)] = sha256(file.read()).hexdigest()
            except OSError:
                return "?"
    lines = "".join(f"{hashed[path]}  {path}\n" for path in sorted(hashed))
    return sha256(lines.encode()).hexdigest()[:8] if lines else ""


def health(packages: dict[str, str], folder: str, rack: str, node: str) -> dict[str, object]:
    beside = os.path.dirname(sys.executable)
    full = os.path.expanduser(folder)
    return {
        "clock": time.time(),
        "user": pwd.getpwuid(os.getuid()).pw_name if os.getuid() in {row.pw_uid for row in pwd.getpwall()} else "",
        "python": os.environ.get("TORCHRACK_PYTHON") or sys.executable,  # in_image.sh's own path
        "missing": [name for name in ("python", "torchrun") if not os.access(f"{beside}/{name}", os.X_OK)],
        "folder": full,
        "deployed": digest(f"{full}/{rack}/{node}/current"),
        "disk_free": free(full),
        "memlock": limit(resource.RLIMIT_MEMLOCK),
        "nofile": limit(resource.RLIMIT_NOFILE),
        "stack": limit(resource.RLIMIT_STACK),
        "nccl": next((version for name, version in packages.items() if name.startswith("nvidia-nccl-cu")), ""),
        "own_name": resolved(os.uname().nodename),
        "ssh_address": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[2],
        "default_nic": default_nic(),
        "links": links(),
        "rdma": rdma(),
        "rdma_usable": os.access("/dev/infiniband", os.R_OK | os.X_OK),
        "listening": listening(),
        "port_range": [int(word) for word in first_line("/proc/sys/net/ipv4/ip_local_port_range").split()],
        "runs": runs(),
        **gpus(),
    }


def main() -> None:
    shm, packages = os.statvfs("/dev/shm"), installed()
    facts: dict[str, object] = {
        "hostname": os.uname().nodename,
        "nics": nics(),
        "cores": len(os.sched_getaffinity(0)),
        "shm": shm.f_frsize * shm.f_blocks,
        "memory": memory_available(),
        "python": "%d.%d.%d" % sys.version_info[:3],
        "torch": packages.get("torch", ""),
    }
    if sys.argv[1:2] == ["--health"]:
        facts["health"] = health(packages, *sys.argv[2:])
    print(ascii(facts))


main()
