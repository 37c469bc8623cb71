"""The Typer app: each group of commands registers itself from a file of its own."""

from __future__ import annotations

import typer

from torchrack.cli import diagnose, export, images, lab, nic, rack, remote, render, run

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A rack of pretend nodes for learning and rehearsing multi-node PyTorch.",
)
app.add_typer(lab.app, name="lab")
for group in (rack, run, remote, export, render, nic, diagnose, images):
    group.register(app)
