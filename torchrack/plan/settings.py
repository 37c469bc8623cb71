"""Every variable and flag that a plan may set, each with its reason, its reader and the pitfall it prevents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["env", "nccl", "flag"]


@dataclass(frozen=True)
class Setting:
    """One variable (`env`: env.sh, `nccl`: nccl.conf) or one torchrun flag; a flag of value None stands alone."""

    kind: Kind
    name: str
    value: str | None
    why: str
    reader: str
    prevents: str


@dataclass(frozen=True)
class Reason:
    why: str
    reader: str
    prevents: str

    def setting(self, kind: Kind, name: str, value: str | None) -> Setting:
        return Setting(kind, name, value, self.why, self.reader, self.prevents)


ENV: dict[str, Reason] = {
    "GLOO_SOCKET_IFNAME": Reason(
        "gloo connects ranks over this NIC; exact names only, none of NCCL's = or ^ syntax",
        "gloo",
        "unset, gloo takes the address its hostname resolves to: the slow mgmt network",
    ),
    "TP_SOCKET_IFNAME": Reason(
        "TensorPipe (torch.distributed.rpc) picks its NIC by a variable of its own",
        "TensorPipe",
        "RPC traffic on mgmt although gloo and NCCL are pinned",
    ),
    "OMP_NUM_THREADS": Reason(
        "this node's cores divided by its ranks (the nodes of a local rack share the machine's)",
        "OpenMP in torch",
        "every rank opens a thread per core: so slow that it looks hung",
    ),
    "TORCHRACK_LAUNCHER": Reason(
        "fork: ranks are forked from an agent that has imported torch, for CPU racks only",
        "launch.sh",
        "every rank imports torch anew, which is most of the time of a short lab",
    ),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": Reason(
        "ranks that may be started again get a store of their own each time, not the agent's (pytorch#135712)",
        "torchrun",
        "a restarted rank reads its peers' addresses of before, or a node that comes back never learns MASTER_ADDR",
    ),
    "PYTHONUNBUFFERED": Reason(
        "a rank's output goes to a file, where Python would hold it back in blocks",
        "python",
        "the last lines before a crash or a kill are lost",
    ),
}

NCCL: dict[str, Reason] = {
    "NCCL_SOCKET_IFNAME": Reason(
        "NCCL's sockets use this NIC; '=' asks for the exact name, without it eth1 also means eth10",
        "NCCL",
        "NCCL picks by its own order, which lets docker compose bridges (br-*) and veth in",
    ),
    "NCCL_SOCKET_FAMILY": Reason(
        "the rack's networks are IPv4",
        "NCCL",
        "a link-local IPv6 address is advertised and no peer can reach it",
    ),
    "NCCL_DEBUG": Reason(
        "NCCL says why it fails; it is silent by default",
        "NCCL",
        "a bare 'unhandled system error' with no cause",
    ),
}

FLAGS: dict[str, Reason] = {
    "nnodes": Reason("how many agents meet", "torchrun", "agents wait for another number of nodes and never start"),
    "rdzv-backend": Reason(
        "c10d: agents meet in a store on one node, ranks are agreed there",
        "torchrun",
        "the default is static: an endpoint alone does not select c10d",
    ),
    "rdzv-endpoint": Reason("where the store is, the same text on every node", "torchrun", "agents meet elsewhere"),
    "rdzv-conf": Reason(
        "is_host=1 on the one node that hosts the store, and a bound on the wait for the others",
        "torchrun",
        "an address that torchrun does not recognise as its own is hosted by nobody",
    ),
    "local-addr": Reason(
        "the address this agent tells its peers; that of rank 0's node becomes MASTER_ADDR",
        "torchrun",
        "MASTER_ADDR is what the hostname resolves to, at worst localhost: peers dial themselves",
    ),
    "node-rank": Reason(
        "static mode counts on each node being told its number",
        "torchrun",
        "forgotten, it is 0 on every node, and all wait as node 0",
    ),
    "master-addr": Reason("static mode's meeting point", "torchrun", "the default is 127.0.0.1: nobody else finds it"),
    "master-port": Reason("static mode's port", "torchrun", "two jobs on one port"),
    "max-restarts": Reason("restarts of all ranks after one fails", "torchrun", "a restart hides the first error"),
    "standalone": Reason("one node, a store of its own on a free port", "torchrun", "port clashes on one machine"),
}

GIVEN = Reason("given with this job", "the job", "—")
CHANGED = Reason("changed on purpose, to show what goes wrong", "torchrun", "—")
