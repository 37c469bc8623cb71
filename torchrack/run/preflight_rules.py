"""The rules of preflight: pure functions from what hosts told to rows. Nothing here connects to anything."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchrack.model.checks import Check, State
from torchrack.model.health import Report
from torchrack.model.job import Job
from torchrack.model.rack import GiB, MiB, NetName, Nic, size_text

MEETS = "the agents meet in a store on this port of the first node"

CLOCK_S = 1.0
SHM_LEAST, SHM_GOOD = 128 * MiB, GiB
NOFILE_GOOD = 4096
DISK_LEAST, DISK_GOOD = 64 * MiB, 2 * GiB
GPU_FREE_MIB = 1024  # what a GPU may have in use and still be called free: a display, a monitor


@dataclass(frozen=True)
class Seen:
    """All that a rule may know: what the hosts told, and the NIC that the plan takes for each network."""

    reports: tuple[Report, ...]
    nics: Mapping[str, Mapping[NetName, Nic]]
    job: Job
    rack: str
    allow_public: bool = False


Rule = Callable[[Seen], Iterator[Check]]


def judge(seen: Seen) -> tuple[Check, ...]:
    """Every rule on everything seen, in the order of RULES."""
    return tuple(row for rule in RULES for row in rule(seen))


def clock(seen: Seen) -> Iterator[Check]:
    why = "logs, certificates and rendezvous time-outs are compared across hosts"
    for report in seen.reports:
        h = report.health
        # The host's time was read somewhere between asking and answering; only what is certainly off is called off.
        off = h.clock - h.asked if h.clock < h.asked else max(0.0, h.clock - h.answered)
        state: State = "ok" if abs(off) <= CLOCK_S else "fail"
        value = "within 1 s" if state == "ok" else f"{off:+.1f} s"
        yield Check(node=report.node, check="clock", state=state, value=value, why=why, fix=_fix(state, CLOCK_FIX))


CLOCK_FIX = "make provision HOSTS=…, or sudo timedatectl set-ntp true"


def torch(seen: Seen) -> Iterator[Check]:
    for report in seen.reports:
        h = report.health
        why, fix = "torchrun is started by launch.sh, from beside this Python", ""
        if not report.torch:
            value, fix = (
                f"none in {h.python}",
                "make deploy HOSTS=… TORCH=auto brings it, or torchrack_python names another Python",
            )
        elif h.missing:
            value = f"{report.torch}, but no {', '.join(h.missing)} beside {h.python}"
            fix = "use a virtual environment: its bin/ has python, torchrun and torch"
        else:
            value = f"{report.torch} in {h.python}"
        yield Check(node=report.node, check="torch", state="fail" if fix else "ok", value=value, why=why, fix=fix)


def equal(seen: Seen) -> Iterator[Check]:
    """The same versions everywhere: what most hosts have is taken for the one that is meant."""
    wants: tuple[tuple[str, State, Callable[[Report], str], str], ...] = (
        ("torch version", "fail", lambda r: r.torch, "ranks of two torch versions may hang or disagree in silence"),
        ("NCCL version", "fail", lambda r: r.health.nccl, "NCCL refuses or hangs between versions"),
        ("python version", "warn", lambda r: ".".join(r.python.split(".")[:2]), "pickled objects may not be readable"),
        ("driver", "warn", lambda r: r.health.driver, "the lowest driver decides which CUDA works"),
        ("GPUs", "fail", _gpus, "every node starts the same number of ranks"),
    )
    for name, bad, value, why in wants:
        values = {report.node: value(report) for report in seen.reports}
        usual = Counter(values.values()).most_common(1)[0][0] if values else ""
        for node, own in values.items():
            same = own == usual
            yield Check(
                node=node,
                check=name,
                state="ok" if same else bad,
                value=(own or "none") + ("" if same else f" (others: {usual or 'none'})"),
                why=why,
                fix="" if same else f"bring it to {usual or 'none'} like the others, or leave {node} out",
            )


def _gpus(report: Report) -> str:
    names = Counter(gpu.name for gpu in report.health.gpus)
    return ", ".join(f"{count} × {name}" for name, count in names.items())


def gpus_free(seen: Seen) -> Iterator[Check]:
    why = "a job of somebody else takes memory and time"
    for report in seen.reports:
        busy = [i for i, gpu in enumerate(report.health.gpus) if gpu.used_mib > GPU_FREE_MIB]
        if report.health.gpu_error:
            value = f"nvidia-smi: {report.health.gpu_error.splitlines()[0]}"
            yield Check(
                node=report.node,
                check="GPUs free",
                state="fail",
                value=value,
                why="no CUDA without a driver that answers",
                fix="make provision HOSTS=… checks the driver",
            )
        elif busy:
            value = ", ".join(f"GPU {i}: {report.health.gpus[i].used_mib} MiB in use" for i in busy)
            fix = f"ssh {report.health.host} nvidia-smi shows whose it is"
            yield Check(node=report.node, check="GPUs free", state="warn", value=value, why=why, fix=fix)
        else:
            value = f"{len(report.health.gpus)} free" if report.health.gpus else "no GPU: gloo on CPUs"
            yield Check(node=report.node, check="GPUs free", state="ok", value=value, why=why)


def shm(seen: Seen) -> Iterator[Check]:
    why = "NCCL and DataLoader workers keep their buffers in /dev/shm: too small is a bus error"
    for report in seen.reports:
        state: State = "fail" if report.shm < SHM_LEAST else "warn" if report.shm < SHM_GOOD else "ok"
        fix = _fix(state, "sudo mount -o remount,size=8G /dev/shm; in a container: --shm-size=8g")
        yield Check(node=report.node, check="/dev/shm", state=state, value=size_text(report.shm), why=why, fix=fix)


def limits(seen: Seen) -> Iterator[Check]:
    for report in seen.reports:
        h, node = report.health, report.node
        rdma = bool(h.rdma)
        locked = h.memlock == -1
        yield Check(
            node=node,
            check="memlock",
            state="fail" if rdma and not locked else "ok",
            value="unlimited" if locked else size_text(h.memlock) + ("" if rdma else ", no RDMA that needs more"),
            why="RDMA pins its buffers in memory (ibv_reg_mr fails otherwise)",
            fix="make provision HOSTS=…, or ulimit -l unlimited in limits.conf" if rdma and not locked else "",
        )
        few = -1 < h.nofile < NOFILE_GOOD
        yield Check(
            node=node,
            check="nofile",
            state="warn" if few else "ok",
            value="unlimited" if h.nofile == -1 else str(h.nofile),
            why="every connection of every rank is a descriptor",
            fix="make provision HOSTS=…, or ulimit -n 131072" if few else "",
        )
        endless = h.stack == -1
        yield Check(
            node=node,
            check="stack",
            state="warn" if endless else "ok",
            value="unlimited" if endless else size_text(h.stack),
            why="an unlimited stack gives NCCL's threads 2 MB, too little before 2.28",
            fix="ulimit -s 8192" if endless else "",
        )


def disk(seen: Seen) -> Iterator[Check]:
    for report in seen.reports:
        free = report.health.disk_free
        state: State = "fail" if free < DISK_LEAST else "warn" if free < DISK_GOOD else "ok"
        value = f"{size_text(free)} free" if state != "ok" else f"more than {size_text(DISK_GOOD)} free"
        fix = _fix(state, f"free some at {report.health.folder}, or torchrack_folder names another place")
        why = "payload, logs and checkpoints are written there"
        yield Check(node=report.node, check="disk", state=state, value=value, why=why, fix=fix)


def names(seen: Seen) -> Iterator[Check]:
    why = "gloo and torchrun look their own name up where nothing is pinned; this plan gives addresses instead"
    for report in seen.reports:
        own = report.health.own_name
        loops = [address for address in own if address.startswith("127.") or address == "::1"]
        if not own:
            value, fix = f"{report.hostname} does not resolve", f"add {report.hostname} to /etc/hosts there"
        elif loops:
            value = f"{report.hostname} means {', '.join(loops)}"
            fix = f"let /etc/hosts give {report.hostname} its {_mgmt_address(seen, report)}"
        else:
            value, fix = "its own name means its own address", ""
        yield Check(node=report.node, check="own name", state="warn" if fix else "ok", value=value, why=why, fix=fix)


def _mgmt_address(seen: Seen, report: Report) -> str:
    nic = seen.nics.get(report.node, {}).get("mgmt")
    return nic.address if nic else "address"


def port(seen: Seen) -> Iterator[Check]:
    wanted = seen.job.port
    for report in seen.reports[:1]:
        taken = wanted in report.health.listening
        yield Check(
            node=report.node,
            check="rendezvous port",
            state="fail" if taken else "ok",
            value=f"{wanted} is taken" if taken else f"{wanted} is free",
            why=MEETS,
            fix=f"ssh {report.health.host} ss -ltnp shows by whom; or PORT={wanted + 1}" if taken else "",
        )


def leftovers(seen: Seen) -> Iterator[Check]:
    why = "a run that is left, or an orphan, holds ports, GPUs and memory"
    for report in seen.reports:
        alive = report.health.runs
        value = ", ".join(f"run {r.run}: {len(r.pids)} process{'es' * (len(r.pids) != 1)}" for r in alive) or "none"
        rack = next((run.rack for run in alive if run.rack), seen.rack)
        which = "HOSTS=…" if rack == "remote" else f"HOSTS=… RACK={rack}"
        fix = f"make collect {which} shows how it stands, if it is yours; make stop {which} ends it" if alive else ""
        state: State = "fail" if alive else "ok"
        yield Check(node=report.node, check="earlier runs", state=state, value=value, why=why, fix=fix)


def nics(seen: Seen) -> Iterator[Check]:
    why = "gloo and NCCL are pinned to it by name"
    for report in seen.reports:
        chosen = seen.nics.get(report.node)
        if not chosen:
            continue
        fabric, mgmt = chosen["fabric"], chosen["mgmt"]
        link = report.health.link(fabric.name)
        speed = f", {link.speed / 1000:g} Gbit/s" if link and link.speed else ""
        beside = "" if fabric != mgmt else ", the only network they share: ssh rides it too"
        value = f"{fabric.name} {fabric.address}/{fabric.prefix}{speed}{beside}"
        yield Check(node=report.node, check="data NIC", state="ok", value=value, why=why)
        yield from _overlaps(report)


def _overlaps(report: Report) -> Iterator[Check]:
    real = [nic for nic in report.nics if nic.name != "lo"]
    for i, one in enumerate(real):
        for other in real[i + 1 :]:
            a, b = (ipaddress.IPv4Network(f"{nic.address}/{nic.prefix}", strict=False) for nic in (one, other))
            if a.overlaps(b) and one.name != other.name:
                yield Check(
                    node=report.node,
                    check="subnets",
                    state="fail",
                    value=f"{one.name} {a} and {other.name} {b} overlap",
                    why="the kernel sends by route, not by the address of the socket: bytes leave by the wrong NIC",
                    fix="give each NIC a subnet of its own, or take one of them down",
                )


def public(seen: Seen) -> Iterator[Check]:
    why = "rendezvous and NCCL ports authenticate nobody: who reaches them can join or crash the job"
    for report in seen.reports:
        chosen = seen.nics.get(report.node)
        if chosen and chosen["fabric"].ip.is_global:
            state: State = "warn" if seen.allow_public else "fail"
            fix = "a private network, or a firewall (make provision) and ALLOW_PUBLIC=1"
            value = f"{chosen['fabric'].address} is a public address"
            yield Check(node=report.node, check="public address", state=state, value=value, why=why, fix=fix)


def rdma(seen: Seen) -> Iterator[Check]:
    why = "without usable RDMA NCCL falls back to sockets and says nothing"
    for report in seen.reports:
        h = report.health
        active = [device for device in h.rdma if "ACTIVE" in device.state]
        idle = [device.device for device in h.rdma if device not in active]
        if not h.rdma:
            yield Check(node=report.node, check="RDMA", state="ok", value="none", why=why)
        elif not h.rdma_usable:
            fix = "in a container: --device /dev/infiniband --ulimit memlock=-1 --network host"
            value = f"{len(h.rdma)} ports, but /dev/infiniband cannot be opened"
            yield Check(node=report.node, check="RDMA", state="fail", value=value, why=why, fix=fix)
        else:
            value = ", ".join(f"{device.device} {device.rate}" for device in active) or "no port is active"
            value += f"; not active: {', '.join(idle)}" if idle and active else ""
            fix = "ibstat tells each port's state; a cable or the subnet manager?" if idle else ""
            yield Check(node=report.node, check="RDMA", state="warn" if idle else "ok", value=value, why=why, fix=fix)


RULES: tuple[Rule, ...] = (
    clock, torch, equal, gpus_free, shm, limits, disk, names, port, leftovers, nics, public, rdma,
)  # fmt: skip


def _fix(state: State, text: str) -> str:
    return "" if state == "ok" else text


def collapse(rows: Sequence[Check], nodes: Sequence[str]) -> tuple[Check, ...]:
    """Rows that say the same of several nodes as one; "all" where they are all. Order is kept."""
    groups: dict[tuple[str, ...], list[str]] = {}
    first: dict[tuple[str, ...], Check] = {}
    for row in rows:
        key = (row.check, row.state, row.value, row.why, row.fix)
        groups.setdefault(key, []).append(row.node)
        first.setdefault(key, row)
    return tuple(
        first[key].model_copy(update={"node": "all" if set(who) >= set(nodes) else _ranges(who)})
        for key, who in groups.items()
    )


def _ranges(nodes: Sequence[str]) -> str:
    """node0 node1 node2 node5 as node0-2 node5."""
    numbers = sorted({int(node.removeprefix("node")) for node in nodes if node.removeprefix("node").isdigit()})
    other = [node for node in nodes if not node.removeprefix("node").isdigit()]
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    named = [f"node{run[0]}" + (f"-{run[-1]}" if len(run) > 1 else "") for run in runs]
    return " ".join([*named, *other])
