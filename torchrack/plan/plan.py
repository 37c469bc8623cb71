"""plan(rack, facts, job): who is which rank, where they meet, over which NIC, each setting with its reason. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchrack.model.errors import UsageError
from torchrack.model.job import Job, NodeChange, Pin, RunSpec
from torchrack.model.rack import NETS, NetName, Nic, NodeFacts, Rack
from torchrack.plan.settings import CHANGED, ENV, FLAGS, GIVEN, NCCL, Reason, Setting

JOIN_BASE, JOIN_EACH = 30, 3  # seconds
RENDEZVOUS_FLAGS = ("rdzv-id",)


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs: rank = node_rank x nproc + local_rank."""

    rank: int
    node: str
    local_rank: int


@dataclass(frozen=True)
class NodePlan:
    """All that one node is told. `nics` maps a network to the NIC that has it here."""

    node: str
    node_rank: int
    nics: dict[NetName, Nic]
    settings: tuple[Setting, ...]
    change: NodeChange

    def of_kind(self, kind: str) -> tuple[Setting, ...]:
        return tuple(s for s in self.settings if s.kind == kind)

    @property
    def flags(self) -> tuple[str, ...]:
        """The node's own torchrun flags, as typed."""
        return tuple(_typed(s) for s in self.of_kind("flag"))


@dataclass(frozen=True)
class Plan:
    rack: Rack
    job: Job
    nodes: tuple[NodePlan, ...]
    join_bound: int
    """Seconds that agents wait for each other."""

    @property
    def present(self) -> tuple[NodePlan, ...]:
        """The nodes that start an agent: all but those a broken side leaves out."""
        return tuple(node for node in self.nodes if node.node not in self.job.absent)

    @property
    def ranks(self) -> tuple[RankPlace, ...]:
        """Every rank that should exist, in rank order."""
        n = self.job.nproc
        by_rank = sorted(self.nodes, key=lambda node: node.node_rank)
        return tuple(RankPlace(p.node_rank * n + i, p.node, i) for p in by_rank for i in range(n))

    @property
    def endpoint(self) -> str:
        """host:port of the rendezvous store: the first node's address on the network the job names."""
        return endpoint(self.nodes[0].nics, self.job)

    @property
    def hosts(self) -> tuple[tuple[str, str], ...]:
        """(mgmt address, name) of every node: what names resolve to on every node."""
        return tuple((node.nics["mgmt"].address, node.node) for node in self.nodes)

    def node(self, name: str) -> NodePlan:
        return next(node for node in self.nodes if node.node == name)


def endpoint(nics: Mapping[NetName, Nic], job: Job) -> str:
    return f"{nics[job.endpoint_net].address}:{job.port}"


def plan(rack: Rack, facts: Sequence[NodeFacts], job: Job) -> Plan:
    """Decide everything from the rack, what its nodes say of themselves, and the job.

    Raises UsageError where they contradict each other: a node without a NIC on one of the networks, a change for a
    node that does not exist, an elastic range that the rack cannot meet.
    """
    check_job(rack, job)
    nics = {fact.node: _nics(rack, fact) for fact in facts}
    meeting = endpoint(nics[facts[0].node], job)
    order = _node_ranks(job, nics)
    bound = join_bound(facts, job)
    nodes = tuple(
        NodePlan(
            node=fact.node,
            node_rank=order[fact.node],
            nics=nics[fact.node],
            settings=tuple(_settings(rack, job, fact, order[fact.node], nics[fact.node], bound, meeting)),
            change=job.change(fact.node),
        )
        for fact in facts
    )
    return Plan(rack, job, nodes, bound)


def torchrun_argv(node: NodePlan, run: RunSpec, nproc: int, logs: str, target: Sequence[str]) -> tuple[str, ...]:
    """What launch.sh is given on `node` for one run; env.sh holds the flags that belong to the node."""
    flags = {"nproc-per-node": str(nproc), "rdzv-id": run.id, "log-dir": logs, "redirects": "3"}
    flags |= {name: value for name, value in node.change.flags.items() if name in flags}
    kept = [f"--{name}={value}" for name, value in flags.items() if name not in node.change.drop]
    return (*kept, "--no-python", *target, *run.args)


def check_job(rack: Rack, job: Job) -> None:
    """Raise UsageError where a job asks for what the rack cannot be: known before any node is up."""
    named = {*job.absent, *job.nodes, *([job.occupy.node] if job.occupy else [])} - {"*"}
    unknown = sorted(named - set(rack.node_names))
    if unknown:
        raise UsageError(f"the job names {', '.join(unknown)}", f"this rack has node0 to node{rack.nodes - 1}")
    if job.elastic and job.elastic[0] > rack.nodes:
        raise UsageError(f"elastic {job.elastic[0]}:{job.elastic[1]} needs more nodes", f"NODES={job.elastic[0]}")
    if job.mode == "standalone" and rack.nodes > 1:
        raise UsageError("standalone mode is for one node: each node would run a job of its own", "NODES=1, or c10d")


def _nics(rack: Rack, fact: NodeFacts) -> dict[NetName, Nic]:
    found: dict[NetName, Nic] = {}
    for net in NETS:
        nic = fact.nic_for(net, rack)
        if nic is None:
            seen = ", ".join(f"{n.name} {n.address}/{n.prefix}" for n in fact.nics)
            wanted = fact.nets.get(net) or rack.subnet(net)
            raise UsageError(f"{fact.node} has no NIC on {net} {wanted}; it has {seen}", "make down, then make up")
        found[net] = nic
    return found


def _node_ranks(job: Job, nics: dict[str, dict[NetName, Nic]]) -> dict[str, int]:
    # c10d sorts agents by the text of the address each tells (dynamic_rendezvous.py), not by who came first.
    if job.mode != "c10d":
        return {node: i for i, node in enumerate(nics)}
    tells = {
        node: node if "local-addr" in job.change(node).drop else nics[node][job.endpoint_net].address for node in nics
    }
    return {node: i for i, node in enumerate(sorted(nics, key=lambda node: tells[node]))}


def join_bound(facts: Sequence[NodeFacts], job: Job) -> int:
    """Seconds that agents wait for each other: 30 + 3 × (ranks + agents) ÷ cores, as importing torch is CPU-bound."""
    cores = sum(fact.cores / fact.shared_by for fact in facts)
    return job.join_timeout or round(JOIN_BASE + JOIN_EACH * len(facts) * (job.nproc + 1) / cores)


def _settings(
    rack: Rack, job: Job, fact: NodeFacts, rank: int, nics: dict[NetName, Nic], join_bound: int, meeting: str
) -> Iterator[Setting]:
    change = job.change(fact.node)
    values = _pins(change.pin or job.pin, nics) | _usual(job, fact)
    given = job.env | change.env
    kept = {name: value for name, value in (values | given).items() if name not in change.drop}
    for name, value in kept.items():
        table = NCCL if name.startswith("NCCL_") else ENV
        reason = table[name] if name not in given else _given(table.get(name))
        yield reason.setting("nccl" if table is NCCL else "env", name, value)
    flags = _flags(rack, job, fact, rank, nics, join_bound, meeting)
    changed = {n: v for n, v in change.flags.items() if n not in RENDEZVOUS_FLAGS}
    for name, flag in (flags | changed).items():
        if name not in change.drop:
            yield (CHANGED if name in changed else FLAGS[name]).setting("flag", name, flag)


def _given(usual: Reason | None) -> Reason:
    return GIVEN if usual is None else Reason(f"given with this job ({usual.why})", usual.reader, usual.prevents)


def _pins(pin: Pin, nics: dict[NetName, Nic]) -> dict[str, str]:
    if pin == "none":
        return {}
    nic = nics[pin].name
    return {"GLOO_SOCKET_IFNAME": nic, "TP_SOCKET_IFNAME": nic, "NCCL_SOCKET_IFNAME": f"={nic}"}


def _usual(job: Job, fact: NodeFacts) -> dict[str, str]:
    threads = max(1, fact.cores // (job.nproc * fact.shared_by))
    sometimes = {"TORCHRACK_LAUNCHER": "fork"} if job.launcher == "fork" else {}
    if job.max_restarts or job.elastic:
        sometimes["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "NCCL_SOCKET_FAMILY": "AF_INET",
        "NCCL_DEBUG": "WARN",
    } | sometimes


def _flags(
    rack: Rack, job: Job, fact: NodeFacts, rank: int, nics: dict[NetName, Nic], join_bound: int, meeting: str
) -> dict[str, str | None]:
    if job.mode == "standalone":
        return {"standalone": None, "max-restarts": str(job.max_restarts)}
    nnodes = f"{job.elastic[0]}:{job.elastic[1]}" if job.elastic else str(rack.nodes)
    host, port = meeting.split(":")
    own = nics[job.endpoint_net].address
    common: dict[str, str | None] = {"nnodes": nnodes, "max-restarts": str(job.max_restarts), "local-addr": own}
    if job.mode == "static":
        return common | {"node-rank": str(rank), "master-addr": host, "master-port": port}
    conf = f"is_host={int(fact.node == rack.node_names[0])},join_timeout={join_bound}"
    return common | {"rdzv-backend": "c10d", "rdzv-endpoint": f"{host}:{port}", "rdzv-conf": conf}


def _typed(flag: Setting) -> str:
    return f"--{flag.name}" if flag.value is None else f"--{flag.name}={flag.value}"
