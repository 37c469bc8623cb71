"""Which NIC of each host is which network: mgmt is where ssh came in, fabric what carries the job. Pure.

A host's own `nic` or `subnet` decides; else the network that all hosts share and that is not mgmt, the fastest of
several; where there is none, mgmt carries the job too.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network

from torchrack.model.errors import UsageError
from torchrack.model.health import Report
from torchrack.model.hosts import Host
from torchrack.model.rack import NETS, NetName, Nic, NodeFacts, Rack

# What containers, VMs and VPNs put on a host: never a data network by itself, but one may be named.
VIRTUAL = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel", "tailscale", "wg", "tun", "zt")


def placed(rack: Rack, hosts: Sequence[Host], reports: Sequence[Report]) -> tuple[Rack, tuple[NodeFacts, ...]]:
    """The rack with the subnets that its hosts share, and their facts with the NIC of each network."""
    chosen = networks(hosts, reports)
    facts = tuple(report.facts().model_copy(update={"nets": chosen[report.node]}) for report in reports)
    common = common_subnets([(_nic(fact, "mgmt"), _nic(fact, "fabric")) for fact in facts])
    return rack.model_copy(update={f"{net}_subnet": common.get(net) for net in NETS}), facts


def _nic(fact: NodeFacts, net: NetName) -> Nic:
    return next(nic for nic in fact.nics if nic.name == fact.nets[net])


def networks(hosts: Sequence[Host], reports: Sequence[Report]) -> dict[str, dict[NetName, str]]:
    """Node to the names of its NICs. UsageError, of all hosts at once, where an inventory asks the impossible."""
    mgmt = {report.node: _mgmt(report) for report in reports}
    named, wrong = dict[str, Nic](), list[str]()
    for host, report in zip(hosts, reports, strict=True):
        nic, problem = _named(host, report)
        if nic:
            named[report.node] = nic
        wrong += [problem] if problem else []
    if wrong:
        raise UsageError("\n".join(wrong), "correct torchrack_nic or torchrack_subnet in the inventory")
    shared = _fastest(reports, shared_networks(reports, mgmt)) if len(named) < len(reports) else None
    chosen: dict[str, dict[NetName, str]] = {}
    for report in reports:
        fabric = named.get(report.node) or (report.nic_on(shared) if shared else None) or mgmt[report.node]
        chosen[report.node] = {"mgmt": mgmt[report.node].name, "fabric": fabric.name}
    return chosen


def shared_networks(reports: Sequence[Report], mgmt: dict[str, Nic]) -> list[IPv4Network]:
    """The networks on which every host has exactly one real NIC, less those of mgmt."""
    sets = [{_network(nic) for nic in _real(report) if nic != mgmt[report.node]} for report in reports]
    return sorted(set.intersection(*sets)) if sets else []


def common_subnets(chosen: Sequence[tuple[Nic, Nic]]) -> dict[NetName, str]:
    """From each node's (mgmt, fabric): the subnet of a network where all nodes agree on one."""
    found: dict[NetName, str] = {}
    nets: tuple[NetName, NetName] = ("mgmt", "fabric")
    for index, net in enumerate(nets):
        subnets = {_network(nics[index]) for nics in chosen}
        if len(subnets) == 1:
            found[net] = str(subnets.pop())
    return found


def _network(nic: Nic) -> IPv4Network:
    return IPv4Network(f"{nic.address}/{nic.prefix}", strict=False)


def _real(report: Report) -> list[Nic]:
    return [nic for nic in report.nics if not nic.name.startswith(VIRTUAL)]


def _mgmt(report: Report) -> Nic:
    """Where ssh came in; behind a forwarded port, what the host's name means; else where its default route leads."""
    health = report.health
    for address in (health.ssh_address, *health.own_name):
        for nic in report.nics:
            if nic.address == address and nic.name != "lo":
                return nic
    by_default = [nic for nic in _real(report) if nic.name == health.default_nic]
    candidates = [*by_default, *_real(report), *report.nics]
    if not candidates:
        raise UsageError(f"{report.node} ({health.host}) has no IPv4 address", "give its NIC one")
    return candidates[0]


def _named(host: Host, report: Report) -> tuple[Nic | None, str]:
    seen = ", ".join(f"{nic.name} {nic.address}/{nic.prefix}" for nic in report.nics)
    if host.nic:
        nic = next((nic for nic in report.nics if nic.name == host.nic), None)
        return nic, "" if nic else f"{report.node} ({host}) has no NIC {host.nic} with an address; it has {seen}"
    if host.subnet:
        nic = report.nic_on(IPv4Network(host.subnet))
        return nic, "" if nic else f"{report.node} ({host}) has no address in {host.subnet}; it has {seen}"
    return None, ""


def _fastest(reports: Sequence[Report], shared: Sequence[IPv4Network]) -> IPv4Network | None:
    def speed(network: IPv4Network) -> int:
        """That of its slowest NIC."""
        nics = [(report, report.nic_on(network)) for report in reports]
        links = [report.health.link(nic.name) for report, nic in nics if nic]
        return min((link.speed if link else 0 for link in links), default=0)

    return max(shared, key=speed, default=None)
