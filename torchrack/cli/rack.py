"""torchrack up, status, exec, logs, down: a rack to play with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from torchrack.cli import options as o

if TYPE_CHECKING:
    from torchrack.run.folder import RackFolder

DOWN_WAIT = 60.0  # seconds; a `docker compose up` that a killed CLI left behind may still be at work


def register(app: typer.Typer) -> None:
    for command in (up, status, logs, down):
        app.command()(command)
    app.command("exec", context_settings={"allow_interspersed_args": False})(exec_)


def up(
    nodes: o.Nodes = None,
    runtime: o.Runtime = None,
    rack: o.RackName = None,
    shm: o.Shm = None,
    file: o.RackFile = None,
    json: o.AsJson = False,
) -> None:
    """Bring a rack up and leave it up."""
    from torchrack.cli import asked
    from torchrack.cli.console import progress
    from torchrack.run.folder import RackFolder
    from torchrack.run.lifecycle import bring_up

    wanted = asked.rack(file, name=rack, nodes=nodes, runtime=runtime, shm=shm)
    folder = RackFolder(wanted.name)
    with folder.lock("up") as fd:
        bring_up(wanted, 1, progress(json), folder, fd)
    _print_status([folder], json)
    print(
        f"  Next: make lab-cpu NODES={wanted.nodes}{_rack(wanted.name)}   make down{_rack(wanted.name)}",
        file=sys.stderr,
    )


def _rack(name: str) -> str:
    return "" if name == "lab" else f" RACK={name}"


def status(rack: o.RackName = None, json: o.AsJson = False) -> None:
    """The nodes of every rack of this checkout, or of one."""
    from torchrack.run.folder import RackFolder

    folders = [RackFolder(rack)] if rack else RackFolder.all()
    _print_status(folders, json)


def _print_status(folders: list[RackFolder], json: bool) -> None:
    from torchrack.cli import tables
    from torchrack.model.rack import size_text
    from torchrack.run.lifecycle import node_rows

    rows = [row for folder in folders for row in node_rows(folder)]
    if json:
        tables.show_json([row.model_dump() for row in rows])
        return
    if not rows:
        one = folders[0].name if len(folders) == 1 else ""
        flag = "" if one in ("", "lab") else f" RACK={one}"
        named = f"rack {one} is not up" if one else "no rack is up"
        print(f"{named}: make up NODES=2{flag}, or on rented machines make deploy HOSTS=…{flag}", file=sys.stderr)
        return
    table = tables.boxed("RACK", "NODE", "STATE", "ADDRESS(fabric)", "NIC", "SHM", "RUNTIME", "LAST RUN")
    for row in rows:
        where = (row.address or "–", row.nic or "–", size_text(row.shm))
        table.add_row(row.rack, row.node, row.state, *where, row.runtime, row.last_run or "–")
    tables.show(table)
    for folder in folders:
        _tell_work(folder, rented=any(row.rack == folder.name and row.runtime == "ssh" for row in rows))


def _tell_work(folder: RackFolder, rented: bool) -> None:
    """What is at work on a rack now: a command of ours, or a run that was left to itself."""
    if held := folder.holder():
        print(f"rack {folder.name}: {held[1]} is at work (process {held[0]})", file=sys.stderr)
    if not rented:
        return
    from torchrack.run.detached import detached

    for run in folder.runs():
        if detached(run):
            print(
                f"rack {folder.name}: run {run.name} was left to itself: make collect RACK={folder.name}",
                file=sys.stderr,
            )


def exec_(
    node: Annotated[str, typer.Argument(help="node0, node1, …")],
    command: Annotated[list[str], typer.Argument(help="The command and its arguments.")],
    rack: o.RackName = None,
    root: Annotated[
        bool, typer.Option("--root", help="As uid 0 of the node: may shape, firewall, change addresses.")
    ] = False,
) -> None:
    """Run a command on a node, with its streams; exits with the command's own status."""
    from torchrack.model.errors import NotFound
    from torchrack.run.lifecycle import attach
    from torchrack.run.passthrough import passthrough

    live = attach(rack or "lab")
    if node not in live.rack.node_names:
        raise NotFound(f"rack {live.rack.name} has no {node!r}", f"node0 to node{live.rack.nodes - 1}")
    raise typer.Exit(passthrough(live.place.spawn(node, command, root=root)))


def logs(
    run: Annotated[str | None, typer.Argument(help="A run id; left out, the last run.")] = None,
    rack: o.RackName = None,
    node: Annotated[str | None, typer.Option("--node", help="Only this node.")] = None,
) -> None:
    """The logs of a run, in node and rank order, each line with its node/rank."""
    from torchrack.model.errors import NotFound
    from torchrack.run.deploy import hosts_flag
    from torchrack.run.detached import detached
    from torchrack.run.folder import RackFolder

    folder = RackFolder(rack or "lab")
    runs = [path for path in folder.runs() if run in (None, path.name)]
    if not runs:
        known = ", ".join(path.name for path in folder.runs()[-3:]) or "none yet: make lab-cpu NODES=2"
        raise NotFound(f"rack {folder.name} has no run {run or ''}".rstrip(), f"runs: {known}")
    files = sorted((runs[-1] / "logs").glob(f"{node or '*'}/*.log"))
    if not files and detached(runs[-1]):
        why = f"run {runs[-1].name} was left to itself: its logs are on the hosts"
        raise NotFound(why, f"make collect{hosts_flag(folder.name)} shows how it stands, or fetches them if it is over")
    if not files:
        there = ", ".join(path.name for path in sorted((runs[-1] / "logs").glob("*"))) or "none: it never started"
        raise NotFound(f"run {runs[-1].name} has no logs of {node or 'any node'}", f"nodes with logs: {there}")
    for path in files:
        prefix = f"{path.parent.name}/{path.stem}"
        for line in path.read_text(errors="replace").splitlines():
            print(f"{prefix:<10} {line}")


def down(
    rack: o.RackName = None,
    all_: Annotated[bool, typer.Option("--all", help="Every rack of this checkout.")] = False,
    discard: Annotated[bool, typer.Option("--discard", help="Also what detached runs left on hosts.")] = False,
) -> None:
    """Take a rack down: every node, network and process of it. Run records stay."""
    from torchrack.model.errors import Lacking, Remains, UsageError
    from torchrack.run.detached import detached
    from torchrack.run.folder import RackFolder

    if rack and all_:
        raise UsageError("--rack and --all exclude each other", "make down ALL=1")
    folders = RackFolder.all() if all_ else [RackFolder(rack or "lab")]
    left: list[str] = []
    up = [folder for folder in folders if folder.read_rack()]
    kept = [f"run {run.name} of rack {folder.name}" for folder in up for run in folder.runs() if detached(run)]
    if kept and not discard:
        why = f"{', '.join(kept)} was left to itself and is not collected: its logs and $OUT are only on the hosts"
        raise Lacking(why, "make collect HOSTS=… first, or make down DISCARD=1 to lose them")
    for folder in folders:
        left += _down_one(folder)
    if left:
        raise Remains(left, "make down again; if it stays, see the record named above")
    if not folders:
        print("no rack of this checkout has ever been up", file=sys.stderr)


def _down_one(folder: RackFolder) -> list[str]:
    from torchrack.model.errors import Remains
    from torchrack.run.lifecycle import take_down

    try:
        with folder.lock("down", wait=DOWN_WAIT if folder.orphaned() else 3.0):
            held = take_down(folder)
    except Remains as remains:
        print(f"error: rack {folder.name}: {remains}", file=sys.stderr)
        return list(remains.what)
    print(f"rack {folder.name}: {'taken down (' + ', '.join(held) + ')' if held else 'was not up'}", file=sys.stderr)
    return []
