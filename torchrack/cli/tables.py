"""Table builders: data in, rich tables out. Tested without a terminal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchrack.model.checks import WORST, Check
from torchrack.model.result import RankResult, RunResult, WireRow

RANK_COLUMNS = 36  # what stands before the last line in the ranks' table


def show(table: Table) -> None:
    """Print a table on stdout, never cut: a pipe has no width of its own."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(table)


def show_json(data: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, indent=1, ensure_ascii=False))


def plain(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines; the columns named in `right` are right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=column != "why")
    return table


def wires(result: RunResult, pin: str) -> Table:
    """Bytes per node and NIC, with each wire's share of what its node sent on all wires but lo."""
    table = plain("node", "net", "NIC", "sent", "received", "share", "", right=("sent", "received", "share"))
    for node, rows in groupby(result.wires, key=lambda row: row.node):
        own = list(rows)
        total = sum(row.tx_bytes for row in own if row.net != "lo")
        for row in own:
            table.add_row(node, row.net, row.nic, *_traffic(row, total), _mark(row, pin))
    return table


def _traffic(row: WireRow, total: int) -> tuple[str, str, str]:
    share = "" if row.net == "lo" else f"{100 * row.tx_bytes / total:.0f} %" if total else "–"
    return size(row.tx_bytes), size(row.rx_bytes), share


def _mark(row: WireRow, pin: str) -> str:
    if row.net == "lo":
        return "inside the node"
    return "← pinned" if row.net == pin else ""


def size(count: int) -> str:
    """Bytes for people, in powers of ten: 84.1 MB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def ranks(rows: Iterable[RankResult], last_lines: dict[int, str]) -> Table:
    """The ranks in rank order: where each ran, how it ended, the last thing it said."""
    table = plain("rank", "node", "local", "ended", "last line", right=("rank", "local"))
    room = max(40, shutil.get_terminal_size((140, 24)).columns - RANK_COLUMNS)
    for row in sorted(rows, key=lambda row: (row.rank, row.node)):
        last = Text(last_lines.get(row.rank, "")[:room])
        table.add_row(str(row.rank), row.node, str(row.local_rank), ended(row), last)
    return table


def ended(row: RankResult) -> str:
    """How a rank ended, in words."""
    if row.signal:
        return f"signal {row.signal}"
    if row.exit is None:
        return "not told"
    return "ok" if row.exit == 0 else f"exit {row.exit}"


def checks(rows: Iterable[Check]) -> Table:
    """Preflight: what is not in order first, and told to be so in words."""
    table = boxed("", "node", "check", "state", "value")
    marks = {"ok": "✓", "warn": "!", "fail": "✗", "could not run": "?"}
    for row in sorted(rows, key=lambda row: WORST.index(row.state)):
        table.add_row(marks[row.state], row.node, row.check, row.state, row.value)
    return table


def boxed(*columns: str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
