"""What a run leaves: the verdict, what became of each rank, and the bytes each NIC carried."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torchrack.model.rack import Model

Verdict = Literal["passed", "failed", "timed_out", "interrupted", "not_run"]


class RankResult(Model):
    """One rank. `exit` and `signal` are both null where torchrun ended it after another failed: it tells not how."""

    rank: int
    node: str
    local_rank: int
    exit: int | None
    signal: int | None
    log: str


class WireRow(Model):
    """Bytes that one NIC of one node sent and received during the run; net "lo" is inside the node."""

    node: str
    nic: str
    net: str
    tx_bytes: int
    rx_bytes: int


class RunResult(Model):
    """The run's record, result.json. `pinned_share` is null when nothing was sent or nothing was pinned."""

    run: str
    rack: str
    runtime: str
    nodes: int
    nproc: int
    launcher: str = "torchrun"
    target: str
    verdict: Verdict
    kind: str | None
    why: str | None = None
    evidence: str | None = None
    fix: str | None = None
    ranks: tuple[RankResult, ...]
    wires: tuple[WireRow, ...]
    pinned_share: float | None
    seconds: float
    versions: dict[str, str] = Field(default_factory=dict)
    """Of what ran: torch and python as the nodes tell them, the kernel, torchrack."""
    record: str
