"""torchrack preflight, deploy, launch, stop: rented machines, by HOSTS."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchrack.cli import options as o

if TYPE_CHECKING:
    from torchrack.model.checks import Check
    from torchrack.model.job import Job
    from torchrack.model.result import RunResult
    from torchrack.run.deploy import Deployment
    from torchrack.run.lifecycle import LiveRack
    from torchrack.run.phases import Progress
    from torchrack.run.preflight import Outcome
    from torchrack.run.target import Target

DEFAULT_DEADLINE = 1800.0


def register(app: typer.Typer) -> None:
    for command in (preflight, deploy, stop, collect, provision):
        app.command()(command)
    app.command("launch", context_settings={"allow_interspersed_args": False})(launch)


def preflight(
    hosts: o.Hosts = None,
    rack: o.RackName = None,
    host_keys: o.HostKeysOption = "known",
    known_hosts: o.KnownHosts = None,
    allow_public: o.AllowPublic = False,
    deep: Annotated[bool, typer.Option("--deep", help="All pairs of nodes, and a real import of torch.")] = False,
    nproc: o.Nproc = None,
    port: o.Port = None,
    json: o.AsJson = False,
) -> None:
    """Look at every host, and let them look at each other, before anything is there. Exit 1: a check failed."""
    from torchrack.cli import asked
    from torchrack.cli.console import progress
    from torchrack.run import preflight as run
    from torchrack.run.deploy import hosts_flag, rented
    from torchrack.run.lifecycle import attach

    job, say = asked.job(nproc=nproc, port=port), progress(json)
    if hosts:
        named = rented(hosts, rack, asked.host_keys(host_keys), known_hosts)
        outcome = run.preflight(named.place, named.rack, job, say, allow_public=allow_public, deep=deep)
    else:
        live = attach(rack or "lab")
        outcome = run.preflight(live.place, live.rack, job, say, allow_public=allow_public, deep=deep)
    code = _show(outcome, json)
    if hosts and not json and code in (0, 3):
        print(f"  Next: make deploy{hosts_flag(named.folder.name)}", file=sys.stderr)
    raise typer.Exit(code)


def _show(outcome: Outcome, json: bool) -> int:
    """The table, or all rows as data; returns the exit code that they mean."""
    from torchrack.cli import tables
    from torchrack.model.checks import worst
    from torchrack.run.preflight_rules import collapse

    rows = collapse(outcome.rows, outcome.nodes)
    if json:
        tables.show_json([row.model_dump() for row in outcome.rows])
    else:
        tables.show(tables.checks(rows))
        _tell_fixes(rows)
    return {"ok": 0, "warn": 3, "could not run": 4, "fail": 1}[worst(outcome.rows)]


def _tell_fixes(rows: tuple[Check, ...]) -> None:
    """Below the table, why each row that stands out matters and what to do: too long for a cell."""
    sys.stdout.flush()
    for row in rows:
        if row.state != "ok":
            print(f"{_mark(row)} {row.node} {row.check}: {row.value}", file=sys.stderr)
            print(f"  why       {row.why}", file=sys.stderr)
            print(f"  fix       {row.fix}", file=sys.stderr)


def _mark(row: Check) -> str:
    return {"warn": "!", "fail": "✗"}.get(row.state, "?")


def deploy(
    hosts: o.Hosts = None,
    rack: o.RackName = None,
    host_keys: o.HostKeysOption = "known",
    known_hosts: o.KnownHosts = None,
    allow_public: o.AllowPublic = False,
    nproc: o.Nproc = None,
    pin: o.Pin = None,
    mode: o.Mode = None,
    port: o.Port = None,
    env: o.EnvOption = None,
    only_plan: Annotated[bool, typer.Option("--plan", help="Print what would happen; change nothing.")] = False,
    torch: o.TorchOption = "python",
    json: o.AsJson = False,
) -> None:
    """Put the same scripts on every host, or on none: checked, pushed, verified, switched at once."""
    from torchrack.cli import asked, tables
    from torchrack.cli.console import progress
    from torchrack.model.errors import Lacking
    from torchrack.run import deploy as run
    from torchrack.run.preflight import Outcome
    from torchrack.run.preflight_rules import collapse

    job, source = asked.job(env, nproc=nproc, pin=pin, mode=mode, port=port), asked.torch_from(torch)
    named = run.rented(hosts, rack, asked.host_keys(host_keys), known_hosts)
    say = progress(json)
    with named.folder.lock("deploy"):
        done = run.deploy(named, job, _labs(), say, allow_public=allow_public, only_plan=only_plan, torch=source)
    if isinstance(done, Outcome):
        _show(done, json)
        bad = sorted({row.node for row in done.bad()})
        again = ",".join(str(named.place.host(node)) for node in bad if node in done.nodes)
        hint = (
            f"what the rows say, then make preflight HOSTS='{again}' for just those" if again else "what the rows say"
        )
        if hosts and Path(hosts).is_file():  # keys and more are in there
            hint = f"what the rows say, then make preflight HOSTS={hosts}"
        raise Lacking(f"nothing was deployed: {', '.join(bad)} did not pass", hint)
    if json:
        tables.show_json(_deployment(done, only_plan))
    elif only_plan:
        _show_plan(done, job)
    else:
        code = 3 if any(row.state == "warn" for row in done.outcome.rows) else 0
        _tell_fixes(collapse(done.outcome.rows, done.outcome.nodes))
        print(f"  Next: make launch{run.hosts_flag(named.folder.name)} LAB=01", file=sys.stderr)
        raise typer.Exit(code)


def _labs() -> dict[str, bytes]:
    """Every lab's files, under the paths that a run starts them from."""
    from torchrack.teach.catalogue import labs

    return {path: content for lab in labs() for path, content in lab.target().placed.items()}


def _deployment(done: Deployment, only_plan: bool) -> dict[str, object]:
    from dataclasses import asdict

    nodes = {node: {"digest": load.digest, "files": sorted(load.files)} for node, load in done.payloads.items()}
    return {
        "planned_only": only_plan,
        "nodes": nodes,
        "pushed": {node: asdict(one) for node, one in done.pushed.items()},
        "differs": done.differs,
        "endpoint": done.plan.endpoint,
    }


def _show_plan(done: Deployment, job: Job) -> None:
    """What would happen, node by node: NICs, ports, files, command."""
    from torchrack.cli import tables

    table = tables.boxed("node", "host", "data NIC", "payload", "files", "would be sent")
    for node, load in done.payloads.items():
        report, nic = done.outcome.reports[node], done.plan.node(node).nics["fabric"]
        differs = done.differs.get(node, [])
        what = ", ".join(differs[:4]) + (f" and {len(differs) - 4} more" if len(differs) > 4 else "")
        data = f"{nic.name} {nic.address}"
        table.add_row(node, report.health.host, data, load.digest, str(len(load.files)), what or "nothing")
    tables.show(table)
    report = next(iter(done.outcome.reports.values()))
    print(
        f"ports      {job.port} on {done.plan.nodes[0].node}, and the kernel's {_span(report.health.port_range)} on all"
    )
    print(
        f"folder     {report.health.folder}/{done.plan.rack.name}/<node>/payload/<payload>, then `current` is switched"
    )
    print("command    bash scripts/launch.sh, from the supervisor, at `make launch`")
    print("nothing was changed", file=sys.stderr)


def _span(port_range: tuple[int, ...]) -> str:
    return "–".join(map(str, port_range)) or "ephemeral ports"


def launch(
    script: Annotated[Path | None, typer.Argument(help="Your script; the folder it lies in goes along.")] = None,
    args: Annotated[list[str] | None, typer.Argument(help="Arguments for the script.")] = None,
    hosts: o.Hosts = None,
    lab: Annotated[str | None, typer.Option("--lab", help="A lab in place of a script.")] = None,
    rack: o.RackName = None,
    host_keys: o.HostKeysOption = "known",
    known_hosts: o.KnownHosts = None,
    nproc: o.Nproc = None,
    pin: o.Pin = None,
    mode: o.Mode = None,
    port: o.Port = None,
    env: o.EnvOption = None,
    deadline: o.Deadline = None,
    args_text: Annotated[
        str | None, typer.Option("--args", help="Arguments as one text, split as a shell would.")
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option("--secret", help="A variable of yours for every rank, which no log shows."),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running; collect makes its record later.")] = False,
    json: o.AsJson = False,
) -> None:
    """Run a lab or your script on the hosts that were deployed to: streamed, bounded, ended everywhere on Ctrl-C."""
    from torchrack.cli import asked, report, tables
    from torchrack.cli.console import progress
    from torchrack.model.errors import UsageError
    from torchrack.run.deploy import deployed, rented
    from torchrack.run.start import start
    from torchrack.run.target import check_imports, script_target
    from torchrack.teach.catalogue import find
    from torchrack.teach.labrun import changed, run_lab

    if (lab is None) == (script is None):
        raise UsageError("name a lab or a script", "make launch HOSTS=… LAB=01, or SCRIPT=train.py")
    chosen = find(lab) if lab else None
    own = (*shlex.split(args_text or ""), *(args or ()))
    secrets = asked.secrets(secret or [])
    if secrets and (lab or detach):
        why = "a secret is never in a file there, as a detached run would need it; labs need none"
        raise UsageError(why, "SCRIPT=… SECRET=… without DETACH")
    named = rented(hosts, rack, asked.host_keys(host_keys), known_hosts)
    job = asked.job(env, nproc=nproc or (str(chosen.lab.nproc) if chosen else None), pin=pin, mode=mode, port=port)
    say = progress(json)
    deployed(named)  # before a lock makes a folder for a rack that is not there
    with named.folder.lock(f"launch {lab or script}"):
        live = deployed(named)
        if chosen:
            chosen.check_world(live.rack.nodes, job.nproc)
            job = changed(job, chosen.lab.job)
            _ready(live, job, say, json)
            if detach:
                words, limit = own or chosen.lab.args, deadline or chosen.lab.deadline
                _leave(live, job, chosen.target(), words, limit, live.folder.new_run(), say)
                return
            result = run_lab(live, chosen, job, say, args=own or None, deadline=deadline)
        else:
            assert script
            check_imports(script_target(script, "check"), live.place, live.rack.node_names[0])
            _ready(live, job, say, json)
            record = live.folder.new_run()
            target = script_target(script, record.name)
            if detach:
                _leave(live, job, target, own, deadline or DEFAULT_DEADLINE, record, say)
                return
            result = start(live, job, target, own, deadline or DEFAULT_DEADLINE, record, say, secrets)
    if json:
        tables.show_json(result.model_dump())
    else:
        report.report(result, job.pin, f"make logs RACK={result.rack}")
    raise typer.Exit(report.exit_code(result, job.pin))


def _ready(live: LiveRack, job: Job, say: Progress, json: bool) -> None:
    """The hosts hold the job's files, and reach each other; else the rows that say why not, and Lacking."""
    from torchrack.model.errors import Lacking
    from torchrack.run.deploy import look, ready_for

    ready_for(live, job, _labs(), say)
    seen = look(live, job, say)
    if seen.bad():
        _show(seen, json)
        nodes = ", ".join(sorted({row.node for row in seen.bad()}))
        raise Lacking(f"nothing was started: {nodes} did not pass", "what the rows say, then the same command again")


def _leave(
    live: LiveRack, job: Job, target: Target, args: tuple[str, ...], deadline: float, folder: Path, say: Progress
) -> None:
    from torchrack.run.deploy import hosts_flag
    from torchrack.run.detached import start_detached

    start_detached(live, job, target, args, deadline, folder, say)
    rack = hosts_flag(live.rack.name)
    print(f"run {folder.name} goes on without us, for at most {deadline:.0f} s")
    print(f"  Next: make collect{rack}   its logs and record   ·   make stop{rack}   end it", file=sys.stderr)


def provision(
    hosts: o.Hosts = None,
    rack: o.RackName = None,
    host_keys: o.HostKeysOption = "known",
    known_hosts: o.KnownHosts = None,
    port: o.Port = None,
    check: Annotated[bool, typer.Option("--check", help="Say what would change; change nothing.")] = False,
    variables: Annotated[
        list[str] | None, typer.Option("--var", help="NAME=VALUE for the playbook; ansible/README.md lists them.")
    ] = None,
) -> None:
    """Make hosts ready with Ansible: limits, clocks, sysctls, firewall, nccl.conf. The one command that needs root."""
    from torchrack.cli import asked
    from torchrack.cli.console import progress
    from torchrack.run.deploy import rented
    from torchrack.run.provision import provision as run

    named = rented(hosts, rack, asked.host_keys(host_keys), known_hosts)
    extra = dict(asked.pair(item, "--var") for item in variables or ())
    code = run(named, hosts or "", asked.job(port=port), progress(), check=check, extra=extra)
    if code:
        print("error: Ansible did not get to the end on every host: its words are above", file=sys.stderr)
        print("  fix: it needs root there: ansible_user=root, or sudo without a password; then again", file=sys.stderr)
    raise typer.Exit(1 if code else 0)


def collect(
    hosts: o.Hosts = None,
    rack: o.RackName = None,
    host_keys: o.HostKeysOption = "known",
    known_hosts: o.KnownHosts = None,
    json: o.AsJson = False,
) -> None:
    """Bring home how the hosts stand (logs, stacks, sockets, kernel, GPUs, RAS), and the record of a detached run."""
    from torchrack.cli import asked, report, tables
    from torchrack.cli.console import progress
    from torchrack.run.collect import collect as gather
    from torchrack.run.deploy import deployed, rented
    from torchrack.run.detached import Gone, Standing, detached, finish

    named, say = rented(hosts, rack, asked.host_keys(host_keys), known_hosts), progress(json)
    folder, missing = gather(named, say)
    left = [run for run in named.folder.runs() if detached(run)]
    live = deployed(named) if left else None
    results: dict[str, RunResult | None] = {}
    for run in left if live else ():
        assert live
        try:
            result = finish(live, run, say)
        except Gone as gone:
            say.console.warn(f"{gone.message}: {gone.hint}")
            continue
        results[run.name] = None if isinstance(result, Standing) else result
        if isinstance(result, Standing):
            say.console.note(f"run {run.name} still runs: make collect again, or make stop")
            for source, text in sorted(result.last.items()):
                say.console.line(source, text)
        elif not json:
            report.report(result, "fabric", f"make logs RACK={result.rack}")
    if json:
        done = {run: result.model_dump() if result else None for run, result in results.items()}
        tables.show_json({"folder": str(folder), "missing": missing, "runs": done})
    else:
        print(folder)
    bad = any(result is not None and result.verdict != "passed" for result in results.values())
    raise typer.Exit(4 if missing else 1 if bad else 0)


def stop(
    hosts: o.Hosts = None,
    rack: o.RackName = None,
    host_keys: o.HostKeysOption = "known",
    known_hosts: o.KnownHosts = None,
    json: o.AsJson = False,
) -> None:
    """End every run on the hosts, whoever started it and from wherever; exits non-zero if a process remains."""
    from torchrack.cli import asked, tables
    from torchrack.cli.console import progress
    from torchrack.run.deploy import hosts_flag, rented
    from torchrack.run.deploy import stop as end_all

    named = rented(hosts, rack, asked.host_keys(host_keys), known_hosts)
    ended = end_all(named, progress(json))
    if json:
        tables.show_json(ended)
    elif any(ended.values()):
        print(f"  Next: make collect{hosts_flag(named.folder.name)}   (their logs and records)", file=sys.stderr)
