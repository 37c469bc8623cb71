"""Rack, Node and the facts a place tells about its nodes: plain validated data."""

from __future__ import annotations

import ipaddress
import re
from functools import cached_property
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

NetName = Literal["mgmt", "fabric"]
NETS: tuple[NetName, ...] = ("mgmt", "fabric")
LOCAL_NODES = 32
FIRST_HOST = 10  # .10 to .41: two digits for all 32 nodes, since c10d orders agents by the text of their addresses

MiB = 1 << 20
GiB = 1 << 30
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmg]?)i?b?\s*$", re.IGNORECASE)
_SCALE = {"": 1, "k": 1 << 10, "m": MiB, "g": GiB}


def parse_size(value: object) -> int:
    """Bytes from 67108864, "64m", "64MiB" or "1g" (powers of two, as Docker's shm_size takes them)."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("must be a size such as 64m or 1g")
    match = _SIZE.match(str(value))
    if not match:
        raise ValueError("must be a size such as 64m or 1g")
    return int(float(match[1]) * _SCALE[match[2].lower()])


def size_text(size: int) -> str:
    """A size in bytes for people: 64 MiB, 1 GiB."""
    return f"{size / GiB:.3g} GiB" if size >= GiB else f"{size / MiB:.3g} MiB"


def _subnet(value: str) -> str:
    return str(ipaddress.IPv4Network(value))


Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$", description="lower-case letters, digits and -")]
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=MiB, le=512 * GiB)]
Subnet = Annotated[str, AfterValidator(_subnet)]
LocalRuntime = Literal["auto", "compose", "netns"]
RuntimeName = LocalRuntime | Literal["ssh"]


class Model(BaseModel):
    # Built when first used: most commands use few of them.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Rack(Model):
    """A rack of pretend nodes: how many, how large, and its two networks.

    `shm` is the size of each node's /dev/shm in bytes; `mgmt_mbit` the shaped rate of the mgmt NIC in Mbit/s.
    A subnet left out is chosen by the place, which avoids those in use. Two things can be made as they should not be,
    to be met on purpose: `nic_names` that differ on every second node, and one /dev/shm for all (`shm_shared`).
    """

    name: Name = "lab"
    nodes: int = Field(default=2, ge=1, le=4096)
    runtime: RuntimeName = "auto"
    shm: Size = GiB
    shm_shared: bool = False
    mgmt_mbit: int = Field(default=100, ge=1, le=100_000)
    nic_names: Literal["alike", "differ"] = "alike"
    mgmt_subnet: Subnet | None = None
    fabric_subnet: Subnet | None = None

    @model_validator(mode="after")
    def _nodes_fit(self) -> Rack:
        for net in NETS:
            subnet = self.mgmt_subnet if net == "mgmt" else self.fabric_subnet
            # The last address is the broadcast address, .1 may be the bridge's.
            if subnet and ipaddress.IPv4Network(subnet).num_addresses - 1 < FIRST_HOST + self.nodes:
                raise ValueError(
                    f"{net}_subnet {subnet} is too small for {self.nodes} nodes that start at .{FIRST_HOST}"
                )
        return self

    @cached_property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"node{i}" for i in range(self.nodes))

    @cached_property
    def _addresses(self) -> dict[tuple[str, NetName], str]:
        first = {net: int(self.subnet(net).network_address) + FIRST_HOST for net in NETS}
        names = enumerate(self.node_names)
        return {(node, net): str(ipaddress.IPv4Address(first[net] + i)) for i, node in names for net in NETS}

    def subnet(self, net: NetName) -> ipaddress.IPv4Network:
        """The network of `net`; raises ValueError while the place has not chosen it yet."""
        value = self.mgmt_subnet if net == "mgmt" else self.fabric_subnet
        if value is None:
            raise ValueError(f"{net} has no subnet yet")
        return ipaddress.IPv4Network(value)

    def address(self, node: str, net: NetName) -> str:
        """The address that `node` is given on `net`, e.g. 10.78.0.10 for node0 on fabric."""
        return self._addresses[node, net]


class LocalRack(Rack):
    """A rack on this machine, as asked for by flags or a rack file."""

    nodes: int = Field(default=2, ge=1, le=LOCAL_NODES)
    runtime: LocalRuntime = "auto"


class Nic(Model):
    """One interface as the kernel of a node names it, with its IPv4 address."""

    name: str
    address: str
    prefix: int = Field(ge=0, le=32)

    @cached_property
    def ip(self) -> ipaddress.IPv4Address:
        return ipaddress.IPv4Address(self.address)


class NodeFacts(Model):
    """What a place tells about one node; everything that plan() may know of it."""

    node: str
    hostname: str
    nics: tuple[Nic, ...]
    cores: int = Field(ge=1)
    shared_by: int = Field(default=1, ge=1, description="nodes that share these cores: all of a local rack's")
    shm: int = Field(ge=0, description="size of /dev/shm in bytes")
    memory: int = Field(default=0, ge=0, description="bytes available")
    python: str = ""
    torch: str = Field(default="", description="version from the package's metadata; empty: not installed")
    nets: dict[NetName, str] = Field(
        default_factory=dict, description="the NIC of a network, where it was chosen and no common subnet tells"
    )

    def nic_on(self, subnet: ipaddress.IPv4Network) -> Nic | None:
        """The NIC whose address lies in `subnet`: names differ by place and Docker promises no order."""
        return next((nic for nic in self.nics if nic.ip in subnet), None)

    def nic_for(self, net: NetName, rack: Rack) -> Nic | None:
        """The NIC that this node has on `net` of `rack`, or None."""
        if net in self.nets:
            return next((nic for nic in self.nics if nic.name == self.nets[net]), None)
        return self.nic_on(rack.subnet(net))
