"""torchrack nic: which NIC gloo, NCCL and torchrun would each take on every node, and why."""

from __future__ import annotations

import typer

from torchrack.cli import options as o


def register(app: typer.Typer) -> None:
    app.command()(nic)


def nic(rack: o.RackName = None, pin: o.Pin = None, env: o.EnvOption = None, json: o.AsJson = False) -> None:
    """Ask the real libraries on every node of the rack that is up, without pins and with the plan's pins."""
    from torchrack.cli import asked, tables
    from torchrack.run.nics import choices

    rows = choices(rack or "lab", asked.job(env, pin=pin))
    if json:
        tables.show_json([row.model_dump() for row in rows])
        return
    table = tables.boxed("node", "library", "setting", "NIC", "net", "address", "why")
    for row in rows:
        table.add_row(row.node, row.library, row.setting, row.nic or "–", row.net or "–", row.address or "–", row.why)
    tables.show(table)
