"""torchrack lab: run, break, list, grade."""

from __future__ import annotations

from typing import Annotated

import typer

from torchrack.cli import options as o

app = typer.Typer(no_args_is_help=True, help="Labs: run one, break one, list them, grade them all.")
LabName = Annotated[str, typer.Argument(help="A lab's number or name.")]


@app.command("run")
def run(
    lab: LabName = "01",
    nodes: o.Nodes = None,
    nproc: o.Nproc = None,
    runtime: o.Runtime = None,
    rack: o.RackName = None,
    shm: o.Shm = None,
    file: o.RackFile = None,
    pin: o.Pin = None,
    mode: o.Mode = None,
    launcher: o.Launcher = None,
    env: o.EnvOption = None,
    deadline: o.Deadline = None,
    args: Annotated[str | None, typer.Option("--args", help="Arguments for lab.py in place of the lab's own.")] = None,
    json: o.AsJson = False,
) -> None:
    """Set up what is missing, bring the rack up, run the lab, compare with its golden reference, show the wires."""
    import shlex

    from torchrack.cli import asked, report, tables
    from torchrack.cli.console import progress
    from torchrack.plan.plan import check_job
    from torchrack.run.folder import RackFolder
    from torchrack.run.lifecycle import bring_up
    from torchrack.teach.catalogue import find
    from torchrack.teach.labrun import run_lab

    chosen = find(lab)
    job = asked.job(env, nproc=nproc or str(chosen.lab.nproc), pin=pin, mode=mode, launcher=launcher)
    own = {"nodes": chosen.lab.nodes} | chosen.rack()
    wanted = asked.rack(file, own, name=rack, nodes=nodes, runtime=runtime, shm=shm)
    chosen.check_world(wanted.nodes, job.nproc)
    check_job(wanted, job)
    say = progress(json)
    folder = RackFolder(wanted.name)
    with folder.lock(f"lab run {chosen.number}") as fd:
        live = bring_up(wanted, job.nproc, say, folder, fd)
        typed = tuple(shlex.split(args)) if args is not None else None
        result = run_lab(live, chosen, job, say, args=typed, deadline=deadline)
    if json:
        tables.show_json(result.model_dump())
    else:
        variant = next(iter(chosen.lab.variants), None)
        follow = f"make break LAB={chosen.number} VARIANT={variant}{report.rack(result)}" if variant else "make labs"
        report.report(result, job.pin, f"{follow}   (the rack stays up: make down{report.rack(result)})")
    raise typer.Exit(report.exit_code(result, job.pin))


@app.command("break")
def break_(
    lab: LabName,
    variant: Annotated[str | None, typer.Argument(help="The broken side; left out, they are listed.")] = None,
    nodes: o.Nodes = None,
    nproc: o.Nproc = None,
    runtime: o.Runtime = None,
    rack: o.RackName = None,
    json: o.AsJson = False,
) -> None:
    """Run a lab's broken side, say what happened, show the fix. Exit 0 if it failed in its named way."""
    from torchrack.cli import asked, report, tables
    from torchrack.cli.console import progress
    from torchrack.run.folder import RackFolder
    from torchrack.run.lifecycle import bring_up
    from torchrack.teach.catalogue import find
    from torchrack.teach.grade import Side, grade
    from torchrack.teach.labrun import run_lab

    chosen = find(lab)
    if variant is None:
        table = tables.boxed("variant", "what is broken", "must give")
        for name, broken in chosen.lab.variants.items():
            table.add_row(name, broken.title, broken.expect)
        tables.show(table)
        return
    side = Side(chosen, variant, chosen.variant(variant))
    job = asked.job(nproc=nproc or str(side.nproc))
    wanted = asked.rack(None, side.rack, name=rack, nodes=nodes, runtime=runtime)
    say = progress(json)
    folder = RackFolder(wanted.name)
    with folder.lock(f"lab break {chosen.number} {variant}") as fd:
        live = bring_up(wanted, job.nproc, say, folder, fd)
        result = run_lab(live, chosen, job, say, side.variant)
    row = grade(side, folder.path / result.run)
    if json:
        tables.show_json(row.model_dump())
    else:
        report.tables_of(result, job.pin)
        report.broken(row, result, chosen.variant(variant))
    raise typer.Exit(0 if row.ok else 1)


@app.command("list")
def list_(json: o.AsJson = False) -> None:
    """The labs: what each teaches, its usual size, how long it takes, its broken sides."""
    from torchrack.cli import tables
    from torchrack.teach.catalogue import labs

    found = labs()
    if json:
        tables.show_json([{"lab": lab.number, "name": lab.name, **lab.lab.model_dump()} for lab in found])
        return
    table = tables.boxed("lab", "title", "nodes", "min", "teaches", "broken sides")
    for lab in found:
        size = f"{lab.lab.nodes}×{lab.lab.nproc}"
        table.add_row(
            lab.number, lab.lab.title, size, str(lab.lab.minutes), lab.lab.teaches, " ".join(lab.lab.variants)
        )
    tables.show(table)


@app.command("grade")
def grade_(
    lab: Annotated[str | None, typer.Argument(help="A lab; or --all.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every lab.")] = False,
    variant: Annotated[str | None, typer.Option("--variant", help="One side only; healthy is one.")] = None,
    runtime: o.Runtime = None,
    rack: Annotated[
        str, typer.Option("--rack", help="The rack used for grading; it is taken down at the end.")
    ] = "grade",
    launcher: Annotated[
        str, typer.Option("--launcher", help="fork: faster, for labs that do not teach launching; or torchrun for all.")
    ] = "fork",
    json: o.AsJson = False,
) -> None:
    """Run every side of a lab, or of all labs, and hold each against what it must give."""
    from torchrack.cli import asked, report, tables
    from torchrack.cli.console import progress
    from torchrack.model.errors import UsageError
    from torchrack.run.folder import RackFolder
    from torchrack.run.lifecycle import take_down
    from torchrack.teach.catalogue import find, labs
    from torchrack.teach.evidence import write_evidence
    from torchrack.teach.grade import all_ok, grade_sides, sides

    if bool(lab) == all_:
        raise UsageError("name a lab or give --all", "torchrack lab grade 05, or torchrack lab grade --all")
    chosen = labs() if all_ else [find(str(lab))]
    wanted = [side for each in chosen for side in sides(each) if variant in (None, side.name)]
    if not wanted:
        raise UsageError(f"no side named {variant!r}", "torchrack lab list shows them")
    say = progress(json)
    quick = asked.job(launcher=launcher).launcher
    request = asked.rack(None, name=rack, runtime=runtime)
    folder = RackFolder(request.name)
    with folder.lock("lab grade") as fd:
        try:
            rows = list(grade_sides(wanted, request, quick, folder, fd, say))
        finally:
            take_down(folder)
    if all_:
        say.console.note(f"  evidence: {write_evidence(rows)}")
    if json:
        tables.show_json([row.model_dump() for row in rows])
    else:
        report.grades(rows)
    raise typer.Exit(0 if all_ok(rows) else 1)
