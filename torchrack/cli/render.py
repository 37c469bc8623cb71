"""torchrack render: the scripts of a plan, shown or written, without running anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from torchrack.cli import options as o


def register(app: typer.Typer) -> None:
    app.command()(render)


def render(
    nodes: o.Nodes = None,
    nproc: o.Nproc = None,
    rack: o.RackName = None,
    file: o.RackFile = None,
    pin: o.Pin = None,
    mode: o.Mode = None,
    launcher: o.Launcher = None,
    elastic: o.Elastic = None,
    max_restarts: o.Restarts = None,
    env: o.EnvOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Each variable: value, reason, reader, pitfall.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the files there, a folder a node.")] = None,
    json: o.AsJson = False,
) -> None:
    """Show the scripts each node gets, or write them. Uses the rack that is up, else what one on netns would be."""
    from torchrack.cli import asked, tables
    from torchrack.model.errors import UsageError
    from torchrack.plan.render import constant_files, node_files
    from torchrack.run.preview import preview
    from torchrack.run.record import plan_json

    job = asked.job(env, nproc=nproc, pin=pin, mode=mode, launcher=launcher, elastic=elastic, max_restarts=max_restarts)
    made = preview(asked.rack(file, name=rack, nodes=nodes), job, os.cpu_count() or 1)
    if json:
        tables.show_json(plan_json(made))
    elif explain:
        tables.show(_reasons(made))
    elif out:
        constant = constant_files()
        try:
            for node, files in node_files(made).items():
                (out / node).mkdir(parents=True, exist_ok=True)
                for name, content in (constant | files).items():
                    (out / node / name).write_bytes(content)
        except OSError as error:
            raise UsageError(f"cannot write to {out}: {error.strerror}", "OUT=a-folder-of-yours") from error
        print(f"wrote {len(made.nodes)} folders to {out}")
    else:
        for node, files in node_files(made).items():
            for name, content in files.items():
                print(f"# ── {node}/{name} " + "─" * 60)
                print(content.decode())


def _reasons(made: Any) -> Any:
    from torchrack.cli import tables

    table = tables.boxed("node", "where", "name", "value", "why", "read by", "prevents")
    where = {"env": "env.sh", "nccl": "nccl.conf", "flag": "torchrun"}
    common = [{(s.kind, s.name, s.value) for s in node.settings} for node in made.nodes]
    shared = set.intersection(*common)
    for node in made.nodes:
        for s in node.settings:
            same = (s.kind, s.name, s.value) in shared
            if not same or node is made.nodes[0]:
                who = "every" if same else node.node
                name = f"--{s.name}" if s.kind == "flag" else s.name
                table.add_row(who, where[s.kind], name, s.value or "", s.why, s.reader, s.prevents)
    return table
