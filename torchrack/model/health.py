"""What preflight judges: a host's own word on its limits, clock, GPUs, versions, links and leftovers."""

from __future__ import annotations

from torchrack.model.rack import Model, NodeFacts


class Gpu(Model):
    name: str
    used_mib: int
    total_mib: int


class Link(Model):
    """`mtu` in bytes, `speed` in Mbit/s (0: not told)."""

    name: str
    mtu: int
    speed: int


class RdmaPort(Model):
    device: str
    state: str
    rate: str


class AliveRun(Model):
    run: str
    rack: str = ""
    pids: tuple[int, ...]


class Health(Model):
    """Sizes in bytes, times in seconds since 1970, limits as of `ulimit` in bytes or numbers with -1 for none.

    `clock` is the host's own; it was told between `asked` and `answered` of our clock. `deployed` names what the files
    are that a deploy put there, by their content.
    """

    host: str
    asked: float
    answered: float
    clock: float
    user: str
    python: str
    missing: tuple[str, ...]
    folder: str
    deployed: str
    disk_free: int
    memlock: int
    nofile: int
    stack: int
    nccl: str
    own_name: tuple[str, ...]
    ssh_address: str
    default_nic: str
    links: tuple[Link, ...]
    rdma: tuple[RdmaPort, ...]
    rdma_usable: bool
    listening: tuple[int, ...]
    port_range: tuple[int, ...]
    runs: tuple[AliveRun, ...]
    gpus: tuple[Gpu, ...]
    driver: str
    gpu_error: str

    def link(self, nic: str) -> Link | None:
        return next((link for link in self.links if link.name == nic), None)


class Report(NodeFacts):
    """Facts with the health of the same moment."""

    health: Health

    def facts(self) -> NodeFacts:
        return NodeFacts.model_validate(self.model_dump(exclude={"health"}))
