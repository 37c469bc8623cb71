"""Findings about names, interfaces and addresses: which one a peer was given, and why it cannot be reached."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchrack.diagnose.facts import Facts, Hit
from torchrack.diagnose.findings import Finding, Who, speakers

BRIDGES = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "podman", "lxc", "vnet")
_INTERFACE = re.compile(r"\[\d+\](?P<ifname>[^\s:\[\]]+):(?P<address>[^\s<]+)<\d+>")
_NUMERIC = re.compile(r"[\d.]+$|[0-9a-f:]*:[0-9a-f:]*$")
_FILTERED = re.compile("timed out|No route|prohibited|unreachable")
EPHEMERAL = 32768  # ports from here up are chosen by the kernel, never written in a command


def findings(facts: Facts) -> Iterator[Finding]:
    yield from names(facts)
    yield from no_interface(facts)
    yield from nccl_connects(facts)
    yield from gloo_connects(facts)
    yield from foreign(facts)


def names(facts: Facts) -> Iterator[Finding]:
    """A name that resolves in neither family; whose name it is tells the kind."""
    hits = [h for h in facts.all("c10d-name-unresolved") if h.groups["code"] != "-9"]  # -9: no address of that family
    failing = {(h.source, h.get("host")) for h in hits if h.get("family") != "IPv6"}
    hits = [h for h in hits if (h.source, h.get("host")) in failing]
    own = [h for h in hits if _is_own_name(facts, h)]
    other = [h for h in hits if h not in own]
    if own and not other:
        yield Finding("own-hostname-unresolvable", own, _own_name_who(facts, own), dict(own[0].groups))
    elif hits:
        yield Finding("dns-master-not-found", hits, speakers(facts, other or hits), dict(hits[0].groups))


def _is_own_name(facts: Facts, hit: Hit) -> bool:
    """The speaker bears that name, or, with one log only, the kernel chose the port, as --standalone lets it."""
    node, host = facts.node_of(hit), hit.groups["host"].split(".")[0]
    if node and len(facts.logs) > 1:
        return node == host
    if node == host:
        return True
    return int(hit.groups.get("port", "0")) >= EPHEMERAL


def _own_name_who(facts: Facts, own: list[Hit]) -> list[Who]:
    if len(facts.nodes) > 1:
        return speakers(facts, own)
    return [Who(own[0].groups["host"].split(".")[0])]


def env(facts: Facts, name: str) -> dict[str, str]:
    """What an NCCL variable was set to, by node; "" stands for an unknown node."""
    return {facts.node_of(h) or "": h.groups["value"] for h in facts.all("nccl-env") if h.groups["name"] == name}


def no_interface(facts: Facts) -> Iterator[Finding]:
    senseless = facts.all("nccl-senseless-family")
    hits = [*facts.all("nccl-no-interface"), *senseless]
    wanted = env(facts, "NCCL_SOCKET_IFNAME")
    if not hits:
        return
    who = speakers(facts, hits)
    value = next((wanted.get(w.node or "") for w in who if wanted.get(w.node or "")), None) or next(
        iter(wanted.values()), ""
    )
    names_one = value and not value.startswith("^") and value.strip("=") not in ("lo", "docker0")
    kind = "nic-ifname-not-found" if names_one or senseless else "nic-none-usable"
    evidence = [*hits[:4], *(h for h in facts.all("nccl-env") if h.groups["name"] == "NCCL_SOCKET_IFNAME")]
    yield Finding(kind, evidence, who, {"ifname": value} if value else {})


def interfaces(facts: Facts) -> dict[str, tuple[str, str | None]]:
    """Address -> (interface, node) as NCCL listed them."""
    found: dict[str, tuple[str, str | None]] = {}
    for hit in facts.all("nccl-socket-ifs"):
        for match in _INTERFACE.finditer(hit.groups["list"]):
            found.setdefault(match["address"], (match["ifname"], facts.node_of(hit)))
    for hit in facts.all("nccl-bootstrap-if"):
        found.setdefault(hit.groups["address"], (hit.groups["ifname"], facts.node_of(hit)))
    return found


def lan(facts: Facts) -> str | None:
    """An interface with an address that others can reach, to suggest."""
    for address, (ifname, _) in interfaces(facts).items():
        if ifname != "lo" and not ifname.startswith(BRIDGES) and not address.startswith(("127.", "169.254.", "fe80")):
            return ifname
    return None


def nccl_connects(facts: Facts) -> Iterator[Finding]:
    """NCCL connects that failed for good: the address says why."""
    known = interfaces(facts)
    retries = [] if _initialised(facts) else facts.all("nccl-connect-retry")
    hits = facts.all("nccl-connect-failed") or [h for h in retries if h.get("address")]
    if hits:
        hit = hits[0]
        address = hit.groups["address"]
        ifname = known.get(address, known.get(address.split("%")[0], ("", None)))[0]
        kind = _address_kind(address, ifname, hit.groups["reason"])
        yield from _address_finding(facts, kind, hits, address, ifname)
    elif not _initialised(facts) and (retries or facts.has("nccl-peer-lost", "watchdog")):
        suspects = list(_suspect_interfaces(facts, known))
        yield from suspects
        filtered = [h for h in retries if _FILTERED.search(h.get("reason") or "")]
        if filtered and not suspects:
            yield Finding("firewall-nccl-ports", filtered[:4], speakers(facts, filtered))


def _initialised(facts: Facts) -> bool:
    return any("Init COMPLETE" in hit.text for hit in facts.all("progress"))


def _address_kind(address: str, ifname: str, reason: str) -> str | None:
    if address.startswith(("127.", "::1")):
        return "nic-selection-loopback"
    if address.startswith("fe80"):
        return "nic-selection-ipv6-linklocal"
    if address.startswith("169.254."):
        return "nic-selection-link-local-v4"
    if ":" in address:
        return "ipv6-family-mismatch"
    if ifname.startswith(BRIDGES):
        return "nic-selection-docker-bridge"
    if is_container_address(address):
        return "container-bridge-ip-advertised" if ifname.startswith("eth") else "nic-selection-docker-bridge"
    if "refused" in reason:
        return None  # nobody listens there any more: a consequence of a rank that ended
    return "firewall-nccl-ports"


def is_container_address(address: str) -> bool:
    """In the range that Docker takes for its bridges (172.17.0.0 to 172.31.255.255)."""
    parts = address.split(".")
    return len(parts) == 4 and parts[0] == "172" and parts[1].isdigit() and 17 <= int(parts[1]) <= 31


def _address_finding(facts: Facts, kind: str | None, hits: list[Hit], address: str, ifname: str) -> Iterator[Finding]:
    if kind is None:
        return
    words = {"address": address} | ({"ifname": ifname} if ifname else {})
    if good := lan(facts):
        words["lan"] = good
    owner = interfaces(facts).get(address, ("", None))[1]
    who = speakers(facts, hits)
    if kind == "firewall-nccl-ports":
        target = facts.node_at(address)
        who = [*who, Who(target)] if target else who
    elif owner:
        who = [Who(owner), *(w for w in who if w.node != owner)]
    extra = [
        h
        for h in facts.all("nccl-socket-ifs", "nccl-env", "nccl-bootstrap-if")
        if address in h.text or "IFNAME" in h.text
    ]
    yield Finding(kind, [*hits[:4], *extra[:3]], who, words)


def _suspect_interfaces(facts: Facts, known: dict[str, tuple[str, str | None]]) -> Iterator[Finding]:
    """Init never completed and no address is named: an interface in use that no peer can reach."""
    hits = facts.all("nccl-bootstrap-if", "nccl-socket-ifs")
    for address, (ifname, _) in known.items():
        kind = _suspicion(ifname, address)
        if kind and (kind != "nic-selection-loopback" or len(facts.nodes) > 1):
            words = {"ifname": ifname, "address": address} | ({"lan": good} if (good := lan(facts)) else {})
            yield Finding(kind, [h for h in hits if address in h.text][:4], speakers(facts, hits), words)
            return


def _suspicion(ifname: str, address: str) -> str | None:
    if ifname == "lo" or address.startswith("127."):
        return "nic-selection-loopback"
    if address.startswith("169.254."):
        return "nic-selection-link-local-v4"
    if address.startswith("fe80"):
        return "nic-selection-ipv6-linklocal"
    return "nic-selection-docker-bridge" if ifname.startswith(BRIDGES) else None


def gloo_connects(facts: Facts) -> Iterator[Finding]:
    """Gloo's full mesh failed in the first attempt: loopback, a container's own address, or an unsuitable interface."""
    hits = facts.all("gloo-connect-failed")
    if not hits:
        return
    named = [h for h in hits if h.get("address")]
    address = named[0].groups["address"].removeprefix("::ffff:") if named else None
    words = {"address": address} if address else {}
    fallback = facts.all("gloo-loopback-fallback")
    if (address and address.startswith(("127.", "::1"))) or (fallback and not address):
        yield Finding(
            "gloo-hostname-loopback",
            [*hits[:4], *fallback[:2]],
            speakers(facts, hits),
            {"address": address or "127.0.0.1"},
        )
    elif address and ":" in address and not address.startswith("fe80"):
        yield Finding("ipv6-family-mismatch", hits[:4], speakers(facts, hits), words)
    elif address and is_container_address(address) and facts.has("bridge-address-as-own"):
        yield Finding(
            "container-bridge-ip-advertised",
            [*hits[:4], *facts.all("bridge-address-as-own")[:2]],
            speakers(facts, hits),
            words,
        )
    else:
        yield Finding("gloo-nic-selection", hits[:6], speakers(facts, hits), words)


def foreign(facts: Facts) -> Iterator[Finding]:
    """A stranger at NCCL's bootstrap socket: its bytes read as a magic number, a size, or a rank count."""
    hits = facts.all("nccl-foreign-magic")
    garbage = [h for h in facts.all("nccl-truncated") if "bootstrap" in h.text and int(h.groups["got"]) > 1 << 20]
    counts = [
        h
        for h in facts.all("world-size-differs")
        if not plausible_world(h.groups["a"]) or not plausible_world(h.groups["b"])
    ]
    strangers = [] if _initialised(facts) else [*hits, *_strangers(facts)]
    if strangers or garbage or counts:
        evidence = [*strangers, *garbage, *counts]
        victim = [Who(facts.node_of(h)) for h in evidence[:1]]
        words = {"node": str(victim[0])}
        if address := next((h.groups["address"] for h in strangers if h.get("address")), None):
            words["address"] = address
            victim.append(Who(address))
        yield Finding("nccl-bootstrap-foreign-connection", evidence, victim, words)


def _strangers(facts: Facts) -> list[Hit]:
    """Peers that closed a connection during bootstrap and whose address is none of the job's."""
    trails = {h.source for h in facts.all("nccl-bootstrap-trail")}
    job = set(interfaces(facts)) | set(facts.addresses)
    closed = [h for h in facts.all("nccl-peer-lost") if h.source in trails and _NUMERIC.match(h.get("address") or "")]
    return [h for h in closed if h.groups["address"] not in job]


def plausible_world(value: str) -> bool:
    """The largest jobs have some hundred thousand ranks; "GET " read as a number is 542393671."""
    return 0 < int(value) < 1_000_000
