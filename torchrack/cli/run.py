"""torchrack run: your own torchrun script on the rack, with its folder."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from torchrack.cli import options as o

DEFAULT_DEADLINE = 1800.0


def register(app: typer.Typer) -> None:
    app.command("run", context_settings={"allow_interspersed_args": False})(run)


def run(
    script: Annotated[Path, typer.Argument(help="Your script; the folder it lies in goes along.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments for the script.")] = None,
    nodes: o.Nodes = None,
    nproc: o.Nproc = None,
    runtime: o.Runtime = None,
    rack: o.RackName = None,
    shm: o.Shm = None,
    file: o.RackFile = None,
    pin: o.Pin = None,
    mode: o.Mode = None,
    launcher: o.Launcher = None,
    elastic: o.Elastic = None,
    max_restarts: o.Restarts = None,
    env: o.EnvOption = None,
    deadline: o.Deadline = None,
    args_text: Annotated[
        str | None, typer.Option("--args", help="Arguments as one text, split as a shell would.")
    ] = None,
    json: o.AsJson = False,
) -> None:
    """Run your own torchrun script on the rack: same plan, wires and verdict; what it writes to $OUT is kept.

    Options go before the script, the script's own arguments after it.
    """
    from torchrack.cli import asked, report, tables
    from torchrack.cli.console import progress
    from torchrack.plan.plan import check_job
    from torchrack.run.folder import RackFolder
    from torchrack.run.lifecycle import bring_up
    from torchrack.run.start import start
    from torchrack.run.target import check_imports, script_target

    own = (*shlex.split(args_text or ""), *(args or ()))
    job = asked.job(env, nproc=nproc, pin=pin, mode=mode, launcher=launcher, elastic=elastic, max_restarts=max_restarts)
    wanted = asked.rack(file, name=rack, nodes=nodes, runtime=runtime, shm=shm)
    check_job(wanted, job)
    script_target(script, "check")  # refused before a rack is made for nothing
    say = progress(json)
    folder = RackFolder(wanted.name)
    with folder.lock(f"run {script.name}") as fd:
        live = bring_up(wanted, job.nproc, say, folder, fd)
        check_imports(script_target(script, "check"), live.place, live.rack.node_names[0])
        record = folder.new_run()
        target = script_target(script, record.name)
        result = start(live, job, target, own, deadline or DEFAULT_DEADLINE, record, say)
    if json:
        tables.show_json(result.model_dump())
    else:
        written = any(path.is_file() for path in (record / "out").rglob("*"))
        look = f"ls -R {result.record}/out" if written else f"make logs{report.rack(result)}"
        report.report(result, job.pin, f"{look}   (the rack stays up: make down{report.rack(result)})")
    raise typer.Exit(report.exit_code(result, job.pin))
