"""Lab 20, NIC pinning: a machine has several NICs, and a library that is not told takes the wrong one, in silence.

    torchrun --standalone --nproc-per-node 2 lab.py
    GLOO_SOCKET_IFNAME='^lo' torchrun --standalone --nproc-per-node 2 lab.py

On one machine every byte goes over lo whatever is pinned, so there the bytes prove nothing; the addresses still do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import statistics
import struct
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import golden
import torch
import torch.distributed as dist

SIZE, CALLS = 4 << 20, 4  # bytes of each all_reduce; the first call of a group is not timed
PIN = "GLOO_SOCKET_IFNAME"


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()

    # 1. What NICs is a node made of? Names are the node's own business; the subnet is what nodes have in common.
    host, mine = socket.gethostname(), nics()
    own = socket.gethostbyname(host)
    nodes = dict(gathered((host, mine)))
    nets = golden.shared_networks(list(nodes.values()))
    slow = golden.network_of(own, mine)  # where gloo goes unless told: the network that the hostname means
    master = golden.network_of(socket.gethostbyname(os.environ["MASTER_ADDR"]), mine)
    fast = next((net for net in [master, *nets] if net in nets and net != slow), slow)
    name = golden.nic_on(fast, mine)[0]
    for net in nets * (rank == 0):
        names = ", ".join(f"{host} {golden.nic_on(net, nics)[0]}" for host, nics in nodes.items())
        print(f"network {net}: {names}{'  <- what a hostname means' if net == slow else ''}", flush=True)

    # 2. The same all_reduces in three fresh groups: gloo reads the variable whenever a group is made.
    ways = {"unpinned": (None, slow), "pinned": (name, fast), "as started": (os.environ.get(PIN), fast)}
    rows = {way: measured(pin, mine) for way, (pin, _) in ways.items()}
    # 3. Which spellings does each library take? gloo is asked here and now: a group of one needs no network.
    values = [name, name[:-1], f"={name}", "^lo", f"lo,{name}", f"{name},nope", f"{name} ", f"={name},=lo", name[0], ""]
    said = {value: asked(value) for value in values}
    if rank == 0:
        report(rows, list(dict.fromkeys([*nets, golden.LOOPBACK])), said, [nic[0] for nic in mine])

    dist.barrier()  # compare last: a rank that stopped in between would take its neighbours down
    for value, took in said.items():
        golden.check(f"gloo given {value!r}", [took], [golden.gloo_takes(value, mine, own)])
    for way, (_, net) in list(ways.items())[: 3 if len(nodes) > 1 else 2]:  # on one machine, start it as you like
        _, networks, x, counts = rows[way]
        golden.check(f"network of each rank, {way}", networks, [net] * world)
        golden.check(f"sum, {way}", x.tolist(), golden.total(SIZE, world).tolist())
        if len(nodes) > 1:
            due = [golden.payload(SIZE, CALLS, world) * (n == net) for n in nets]
            golden.check_bytes(f"bytes sent by network, {way}", [counts[n] for n in nets], due)
    print(f"golden ok: rank {rank} unpinned on {slow}, pinned with {name} on {fast}", flush=True)
    dist.destroy_process_group()


def measured(pin: str | None, mine: list[golden.Nic]) -> tuple[float, list[str | None], torch.Tensor, dict[str, int]]:
    """Reduce in a new group with this pin: seconds a call, networks of the ranks, the sum, bytes sent by network."""
    with pinned(pin):
        before = listening()
        group = dist.new_group(timeout=timedelta(seconds=60))
        took = sorted({address for address, _ in listening() - before})
    x, seconds, start = torch.empty(SIZE // 4), [], sent()
    for _ in range(CALLS):
        x.fill_(dist.get_rank() + 1.0)
        dist.barrier(group)
        began = time.perf_counter()
        dist.all_reduce(x, group=group)
        seconds.append(time.perf_counter() - began)
    dist.barrier(group)
    counts = {golden.network(nic): sent()[nic[0]] - start[nic[0]] for nic in mine}
    networks = [golden.network_of(address, mine) for rank in gathered(took) for address in rank]
    return statistics.median(seconds[1:]), networks, x, counts


def asked(value: str) -> list[str] | None:
    """The addresses that gloo takes for this value, None where it refuses."""
    before = listening()
    with pinned(value), contextlib.suppress(RuntimeError):
        alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))  # noqa: F841
        return sorted({address for address, _ in listening() - before})
    return None


@contextlib.contextmanager
def pinned(value: str | None) -> Iterator[None]:
    """The variable set to `value`, or unset, and afterwards as it was."""
    was = dict(os.environ)
    os.environ.pop(PIN, None)
    os.environ |= {} if value is None else {PIN: value}
    try:
        yield
    finally:
        os.environ.pop(PIN, None)
        os.environ |= was


def gathered(mine: object) -> list:
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def nics() -> list[golden.Nic]:
    """Every NIC with an IPv4 address, asked of the kernel (SIOCGIFADDR, SIOCGIFNETMASK)."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # a NIC without an address
                asked = [fcntl.ioctl(any_socket, what, struct.pack("256s", name.encode())) for what in (0x8915, 0x891B)]
                address, mask = (answer[20:24] for answer in asked)
                found.append((name, socket.inet_ntoa(address), int.from_bytes(mask).bit_count()))
    return found


def sent() -> dict[str, int]:
    """Bytes that each NIC of this node has sent: the counters of /sys/class/net/*/statistics, all in one file."""
    rows = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return {name.strip(): int(numbers.split()[8]) for name, numbers in rows}


def listening() -> set[tuple[str, str]]:
    """(address, port) that this process listens on: what a library took, by the kernel's word rather than its own."""
    own = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since it was listed
            own.add(str(fd.readlink()))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return {(socket.inet_ntoa(bytes.fromhex(address)[::-1]), port) for address, port in ends}


def report(rows: dict[str, tuple], nets: list[str], said: dict[str, list[str] | None], names: list[str]) -> None:
    print(f"{'':12}{'all_reduce':>12}{'algbw':>12}   sent by this node: " + "".join(f"{net:>16}" for net in nets))
    for way, (seconds, _, _, counts) in rows.items():
        by_net = "".join(f"{counts[net] / 1e6:>13.1f} MB" for net in nets)
        print(f"{way:12}{seconds * 1e3:>9.1f} ms{SIZE / seconds / 1e6:>7.0f} MB/s" + 22 * " " + by_net)
    print(f"pinned is {rows['unpinned'][0] / rows['pinned'][0]:.1f} times as fast")
    print(f"{'value':16}{'gloo took':28}NCCL may use (its documented grammar)")
    for value, took in said.items():
        nccl = ", ".join(golden.nccl_takes(value, names)) or "nothing: no socket interface found"
        print(f"{value!r:16}{'refused' if took is None else ', '.join(took):28}{nccl}", flush=True)


if __name__ == "__main__":
    main()
