"""Which two subnets a rack takes: the first pair that overlaps nothing that is in use."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network

from torchrack.model.errors import NameTaken, NotEnough, UsageError
from torchrack.model.rack import NETS, NetName, Rack

# The second pool is for machines where 10.0.0.0/8 as a whole is routed somewhere, as many VPNs do.
POOLS: tuple[dict[NetName, str], ...] = (
    {"mgmt": "10.79.{}.0/24", "fabric": "10.78.{}.0/24"},
    {"mgmt": "172.30.{}.0/24", "fabric": "172.29.{}.0/24"},
)
WIDEST = 8  # bits; a wider route is a default route in disguise
HINT = "free one (docker network prune), or give mgmt_subnet and fabric_subnet in the rack file"


@dataclass(frozen=True)
class InUse:
    """A subnet that is taken, and by what, e.g. `docker network bridge`."""

    subnet: IPv4Network
    owner: str


def candidates(rack: Rack, in_use: Sequence[InUse]) -> Iterator[Rack]:
    """`rack` with subnets that are free, then with the next free ones, and so on.

    Raises UsageError or NameTaken for subnets that the rack asks for, NotEnough when there is nothing (more) to offer.
    """
    given = _given(rack)
    _refuse_taken(given, in_use)
    taken = [*(use.subnet for use in in_use), *given.values()]
    for pool in POOLS:
        for k in range(256):
            chosen = {net: IPv4Network(pool[net].format(k)) for net in NETS if net not in given}
            if not _overlapping(chosen.values(), taken):
                fields = {f"{net}_subnet": str(subnet) for net, subnet in chosen.items()}
                yield rack.model_copy(update=fields)
            if not chosen:
                raise NotEnough("somebody else just took a subnet that this rack asks for", HINT)
    raise NotEnough("no subnet of 10.78.0.0/15 and 172.29-30.0.0/16 is free", HINT)


def _given(rack: Rack) -> dict[NetName, IPv4Network]:
    given: dict[NetName, IPv4Network] = {}
    if rack.mgmt_subnet:
        given["mgmt"] = rack.subnet("mgmt")
    if rack.fabric_subnet:
        given["fabric"] = rack.subnet("fabric")
    if len(given) == 2 and given["mgmt"].overlaps(given["fabric"]):
        raise UsageError(f"mgmt {given['mgmt']} and fabric {given['fabric']} overlap", "give each its own subnet")
    return given


def _refuse_taken(given: dict[NetName, IPv4Network], in_use: Sequence[InUse]) -> None:
    for net, subnet in given.items():
        for use in in_use:
            if subnet.overlaps(use.subnet):
                message = f"{net}_subnet {subnet} is taken: {use.owner} has {use.subnet}"
                raise NameTaken(message, f"another {net}_subnet, or none: then a free one is chosen")


def _overlapping(wanted: Iterable[IPv4Network], taken: Iterable[IPv4Network]) -> bool:
    taken = list(taken)
    return any(subnet.overlaps(other) for subnet in wanted for other in taken)


def of_host() -> list[InUse]:
    """What this machine routes somewhere or has an address in; empty where there is no `ip` command."""
    try:
        argv = ["ip", "-j", "-4", "route", "show", "table", "all"]
        routes = json.loads(subprocess.run(argv, capture_output=True, check=True, text=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return []
    return parse_routes(routes)


def parse_routes(routes: Iterable[dict[str, str]]) -> list[InUse]:
    """The subnets of `ip -j route`, less the default route and its halves (0.0.0.0/1): those lead everywhere."""
    uses = [
        InUse(IPv4Network(route["dst"], strict=False), f"a route of this host ({route.get('dev', 'no device')})")
        for route in routes
        if route["dst"] != "default"
    ]
    return [use for use in uses if use.subnet.prefixlen >= WIDEST]
