"""A plan without a run: from the rack that is up, or from what one on network namespaces would be."""

from __future__ import annotations

from torchrack.model.job import Job
from torchrack.model.rack import NETS, Nic, NodeFacts, Rack
from torchrack.plan.plan import Plan, plan
from torchrack.run.folder import RackFolder

SUBNETS = {"mgmt_subnet": "10.79.0.0/24", "fabric_subnet": "10.78.0.0/24"}


def preview(rack: Rack, job: Job, cores: int) -> Plan:
    """The plan for `job` on `rack`; nothing is started, nothing is changed."""
    recorded = RackFolder(rack.name).read_rack()
    if recorded and recorded.rack and recorded.rack.nodes == rack.nodes:
        return plan(recorded.rack, recorded.facts, job)
    assumed = rack.model_copy(update={k: v for k, v in SUBNETS.items() if getattr(rack, k) is None})
    assumed = Rack.model_validate(assumed.model_dump())
    return plan(assumed, [_facts(assumed, node, cores) for node in assumed.node_names], job)


def _facts(rack: Rack, node: str, cores: int) -> NodeFacts:
    nics = tuple(Nic(name=net, address=rack.address(node, net), prefix=rack.subnet(net).prefixlen) for net in NETS)
    return NodeFacts(node=node, hostname=node, nics=nics, cores=cores, shared_by=rack.nodes, shm=rack.shm)
