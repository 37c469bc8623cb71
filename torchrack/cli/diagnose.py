"""torchrack diagnose and lookup: from logs to the cause; no rack is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchrack.cli import options as o


def register(app: typer.Typer) -> None:
    app.command()(diagnose)
    app.command()(lookup)


def diagnose(
    logs: Annotated[Path, typer.Argument(help="A folder of logs, one file, or - for stdin.")],
    json: o.AsJson = False,
) -> None:
    """Read the logs of all ranks and say what went wrong, where, and what to do. Exit 0 healthy, 1 fault, 3 unknown."""
    from torchrack.cli import tables
    from torchrack.diagnose import diagnose_folder

    found = diagnose_folder(logs)
    if json:
        tables.show_json(found.to_json())
    else:
        print(found)
    raise typer.Exit(found.exit_code)


def lookup(
    line: Annotated[str, typer.Argument(help="A line of a log, as it was printed.")],
    json: o.AsJson = False,
) -> None:
    """Say what one pasted line means, by the rules that diagnose uses. Exit 3 if no rule knows it."""
    from dataclasses import asdict

    from torchrack.cli import tables
    from torchrack.diagnose import lookup as explain

    found = explain(line)
    if json:
        tables.show_json([asdict(one) for one in found])
    for one in [] if json else found:
        print(f"{one.kind or one.role}: {one.why}")
        if one.fix:
            print(f"  fix     {one.fix}")
        print(f"  source  {one.source}")
    if not found and not json:
        print("no rule knows this line by itself; all logs together may tell: make diagnose LOGS=folder")
    raise typer.Exit(0 if found else 3)
