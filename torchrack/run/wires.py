"""From the supervisors' counters to the wires table: which wire carried the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchrack.model.job import Pin
from torchrack.model.result import WireRow
from torchrack.plan.plan import NodePlan

Counters = Mapping[str, Sequence[Mapping[str, object]]]
_ORDER = {"fabric": 0, "mgmt": 1, "lo": 3}


def wire_rows(nodes: Iterable[NodePlan], counters: Counters) -> tuple[WireRow, ...]:
    """One row a node and NIC, fabric first, lo last. A NIC on neither network is called by its own name."""
    rows = []
    for node in nodes:
        nets: dict[str, str] = {nic.name: net for net, nic in node.nics.items()}
        totals: dict[str, tuple[int, int]] = {}  # a node that came back was counted once in each life
        for nic in counters.get(node.node, ()):
            name, (tx, rx) = str(nic["nic"]), totals.get(str(nic["nic"]), (0, 0))
            totals[name] = tx + int(str(nic["tx_bytes"])), rx + int(str(nic["rx_bytes"]))
        for name, (tx, rx) in totals.items():
            rows.append(WireRow(node=node.node, nic=name, net=nets.get(name, name), tx_bytes=tx, rx_bytes=rx))
    known = [row for row in rows if row.net in _ORDER or row.tx_bytes or row.rx_bytes]
    return tuple(sorted(known, key=lambda row: (_node_number(row.node), _ORDER.get(row.net, 2))))


def pinned_share(rows: Iterable[WireRow], pin: Pin) -> float | None:
    """Bytes sent on the pinned network divided by bytes sent on all NICs but lo, summed over nodes.

    None when the job pinned nothing or nothing was sent.
    """
    wires = [row for row in rows if row.net != "lo"]
    total = sum(row.tx_bytes for row in wires)
    if pin == "none" or not total:
        return None
    return sum(row.tx_bytes for row in wires if row.net == pin) / total


def _node_number(node: str) -> int:
    digits = node.lstrip("abcdefghijklmnopqrstuvwxyz-_")
    return int(digits) if digits.isdigit() else 0
