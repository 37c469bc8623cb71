"""What lab 20 must show, worked out in one process: which NIC each rule picks, and how many bytes then leave a node.

A NIC is (name, address, prefix length), a node is a list of them, a network is its subnet written out.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import torch

Nic = tuple[str, str, int]
LOOPBACK = "127.0.0.0/8"


def network(nic: Nic) -> str:
    return str(ipaddress.ip_network(f"{nic[1]}/{nic[2]}", strict=False))


def network_of(address: str, nics: Sequence[Nic]) -> str | None:
    """The network in which `address` lies, if one of these NICs is on it: of another node's address too."""
    ip = ipaddress.ip_address(address)
    return next((network(nic) for nic in nics if ip in ipaddress.ip_network(network(nic))), None)


def nic_on(net: str, nics: Sequence[Nic]) -> Nic:
    return next(nic for nic in nics if network(nic) == net)


def shared_networks(nodes: Sequence[Sequence[Nic]]) -> list[str]:
    """The networks that every node has a NIC on; lo is one only where all ranks are on one node."""
    found = [network(nic) for nic in nodes[0]]
    everywhere = [net for net in found if all(net in map(network, nics) for nics in nodes)]
    return [net for net in everywhere if net != LOOPBACK or len(nodes) == 1]


def gloo_takes(value: str, nics: Sequence[Nic], own: str) -> list[str] | None:
    """The addresses that gloo listens on, None where it refuses: a list of exact names, each of which must exist.

    `own` is what the hostname resolves to. No value, or one of a single character, counts as none
    (tried, torch 2.13; gloo/transport/tcp/device.cc).
    """
    if len(value) < 2:
        return [own]
    addresses = {name: address for name, address, _ in nics}
    names = value.split(",")
    return sorted({addresses[name] for name in names}) if all(name in addresses for name in names) else None


def nccl_takes(value: str, names: Sequence[str]) -> list[str]:
    """The NICs that NCCL may use: `^` (all but) and then `=` (exactly) are read once, for the whole list of prefixes.

    Source: NCCL's src/misc/socket.cc, src/misc/utils.cc, and its documentation of NCCL_SOCKET_IFNAME.
    """
    if len(value) < 2:
        rules = ["ib", "^docker,lo,virbr", "docker", "lo", "virbr"]
        return next(found for rule in rules if (found := nccl_takes(rule, names)))
    rest = value.removeprefix("^")
    exact = rest.startswith("=")
    tokens = [token for token in rest.removeprefix("=").split(",") if token]
    hits = [n for n in names if any(n == token if exact else n.startswith(token) for token in tokens)]
    return [n for n in names if n not in hits] if value.startswith("^") else hits


def payload(size: int, calls: int, world: int) -> int:
    """Bytes that leave each node: a ring passes 2·(n-1)/n of the data along each edge, and one edge leaves a node."""
    return calls * size * 2 * (world - 1) // world


def total(size: int, world: int) -> torch.Tensor:
    """What an all_reduce of `size` bytes of the rank's number plus one must end with, exact in float32."""
    return torch.full((size // 4,), world * (world + 1) / 2)


def check(what: str, got: Sequence[object], expected: Sequence[object]) -> None:
    """End this process with exit code 1 at the first element that differs."""
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if g != e:
            raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} got {g}")


def check_bytes(what: str, got: Sequence[int], expected: Sequence[int]) -> None:
    """The same for counted bytes: headers, acknowledgements and barriers come on top, up to 15 % and 256 kB."""
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if not e <= g <= e * 1.15 + 256_000:
            raise SystemExit(f"golden mismatch: {what}, element {i}: expected {e} (and at most 15 % more) got {g}")
