"""Ask one real library which address it takes on this node, with the environment it is given; print one JSON object.

Runs on the node: `python nics.py gloo|nccl|torchrun`. Standard library and the library asked, nothing of torchrack's.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
import re
import socket
import sys

Answer = dict[str, object]  # {"address": str or None, "why": str}


def listeners() -> set[str]:
    """Addresses that this process listens on: what a library took, seen from the kernel rather than from its word."""
    own = set()
    for fd in glob.glob("/proc/self/fd/*"):
        with contextlib.suppress(OSError):  # closed since it was listed
            own.add(os.readlink(fd))
    found = set()
    with open("/proc/net/tcp") as table:
        for line in list(table)[1:]:
            fields = line.split()
            if fields[3] == "0A" and "socket:[%s]" % fields[9] in own:
                found.add(socket.inet_ntoa(bytes.fromhex(fields[1].split(":")[0])[::-1]))
    return found


def gloo() -> Answer:
    import torch.distributed as dist  # only this question needs torch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined, unused-ignore]
    took = sorted(listeners())
    pinned = os.environ.get("GLOO_SOCKET_IFNAME")
    why = "GLOO_SOCKET_IFNAME=" + pinned if pinned else "the address that the node's own hostname resolves to"
    return {"address": took[0] if took else None, "why": why}


def nccl() -> Answer:
    spec = [p for base in sys.path for p in glob.glob(base + "/nvidia/nccl/lib/libnccl.so*")]
    if not spec:
        return {"address": None, "why": "no NCCL on this node: pip install nvidia-nccl-cu13 (it answers without a GPU)"}
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,BOOTSTRAP", NCCL_DEBUG_FILE="/dev/stderr")
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    code = ctypes.CDLL(spec[0]).ncclGetUniqueId(ctypes.create_string_buffer(128))
    os.close(writer)
    os.dup2(1, 2)
    text = os.read(reader, 1 << 16).decode(errors="replace")
    used = re.search(r"Using (\S+?):(\d+\.\d+\.\d+\.\d+)<", text)
    if used:
        pinned = os.environ.get("NCCL_SOCKET_IFNAME") or _conf().get("NCCL_SOCKET_IFNAME")
        why = "NCCL_SOCKET_IFNAME=" + pinned if pinned else "NCCL's own order: anything but docker*, lo, virbr*"
        return {"address": used.group(2), "why": why}
    warned = re.search(r"NCCL WARN (.*)", text)
    return {"address": None, "why": "ncclGetUniqueId gave %d: %s" % (code, warned.group(1) if warned else text[-200:])}


def _conf() -> dict[str, str]:
    try:
        with open(os.environ["NCCL_CONF_FILE"]) as lines:
            return dict(line.strip().split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    except (KeyError, OSError):
        return {}


def torchrun() -> Answer:
    given = os.environ.get("PET_LOCAL_ADDR")
    name = given or socket.getfqdn()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return {"address": None, "why": "MASTER_ADDR would be %s, which does not resolve: %s" % (name, error)}
    how = "--local-addr" if given else "socket.getfqdn(), as no --local-addr is given"
    return {"address": address, "why": "MASTER_ADDR would be %s: %s" % (name, how)}


try:
    answer = {"gloo": gloo, "nccl": nccl, "torchrun": torchrun}[sys.argv[1]]()
except Exception as error:  # a library's refusal is the answer here
    answer = {"address": None, "why": str(error).strip().splitlines()[0][:200]}
json.dump(answer, sys.stdout)
sys.stdout.flush()
os._exit(0)  # a process group of one has nobody to say goodbye to
