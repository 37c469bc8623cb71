"""preflight: ask all hosts at once, judge what they say, then let them look at each other. Changes nothing anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torchrack.model.checks import Check, State
from torchrack.model.errors import CommandFailed, TorchrackError, Unreachable, UsageError
from torchrack.model.health import Report
from torchrack.model.job import Job
from torchrack.model.rack import NETS, NetName, Nic, NodeFacts, Rack
from torchrack.places.base import Place
from torchrack.places.ssh import Ssh
from torchrack.plan.networks import placed
from torchrack.run.phases import HostPhase, Progress
from torchrack.run.preflight_rules import Seen, judge
from torchrack.run.probe import probe

IMPORT_S = 120.0


@dataclass
class Outcome:
    """All rows, and what a deploy goes on with; `rack` is None where not every host told what a plan needs."""

    rows: tuple[Check, ...]
    nodes: tuple[str, ...]
    reports: dict[str, Report] = field(default_factory=dict)
    rack: Rack | None = None
    facts: tuple[NodeFacts, ...] = ()
    nics: dict[str, dict[NetName, Nic]] = field(default_factory=dict)

    def bad(self) -> tuple[Check, ...]:
        return tuple(row for row in self.rows if row.state in ("fail", "could not run"))


def preflight(
    place: Place,
    rack: Rack,
    job: Job,
    progress: Progress,
    *,
    allow_public: bool = False,
    deep: bool = False,
    probes: bool = True,
) -> Outcome:
    """`place` holds hosts, deployed to or not, or a local rack that is up."""
    with progress.phase(HostPhase.HOSTS) as said:
        answers = place.each(place.report)
        reports = {node: answer for node, answer in answers.items() if isinstance(answer, Report)}
        rows = [_reached(place, node, answer) for node, answer in answers.items()]
        said.append(f"{len(reports)} of {len(answers)} answer")
        said.ok = len(reports) == len(answers)
    with progress.phase(HostPhase.CHECKS) as said:
        made, facts, problem = _networks(place, rack, reports)
        nics = nics_of(made, facts)
        rows += [*problem, *judge(Seen(tuple(reports.values()), nics, job, rack.name, allow_public))]
        said.append(f"{len(rows)} on {len(reports)} hosts")
    complete = bool(facts) and len(facts) == len(answers)
    found = Outcome(tuple(rows), tuple(answers), reports, made if complete else None, facts if complete else (), nics)
    return network(place, found, job, progress, deep=deep) if probes and nics else found


def network(place: Place, found: Outcome, job: Job, progress: Progress, *, deep: bool = False) -> Outcome:
    """The second round: the hosts that answered look at each other. `found` with the rows of that."""
    with progress.phase(HostPhase.NETWORK) as said:
        fabric = {node: own["fabric"] for node, own in found.nics.items()}
        port = 0 if job.mode == "standalone" else job.port
        rows = [*probe(place, fabric, port, deep), *(_imports(place) if deep else ())]
        told = {(row.node, row.check) for row in found.rows}
        rows = [row for row in rows if (row.node, row.check) not in told]  # the facts told of a busy port already
        said.append("every node to every other" if deep else "each node to its peers")
    return replace(found, rows=(*found.rows, *rows))


def _reached(place: Place, node: str, answer: Report | TorchrackError) -> Check:
    why = "nothing can be started on a host that does not let us in"
    host = str(place.host(node)) if isinstance(place, Ssh) else node
    match answer:
        case Report():
            return Check(node=node, check="reachable", state="ok", value="yes", why=why)
        case Unreachable():
            fix = answer.hint or ""
            return Check(node=node, check=answer.check, state="fail", value=answer.message, why=why, fix=fix)
        case CommandFailed():
            value = f"{host}: {(answer.output.strip().splitlines() or ['no output'])[-1]}"
            return Check(node=node, check="python", state="fail", value=value, why=why, fix=answer.hint or "")
    return Check(node=node, check="reachable", state="fail", value=answer.message, why=why, fix=answer.hint or "")


def _networks(
    place: Place, rack: Rack, reports: Mapping[str, Report]
) -> tuple[Rack, tuple[NodeFacts, ...], list[Check]]:
    """The networks of the hosts that answered; a local rack's are given."""
    if not isinstance(place, Ssh):
        return rack, tuple(report.facts() for report in reports.values()), []
    if not reports:
        return rack, (), []
    try:
        return (*placed(rack, [place.host(node) for node in reports], tuple(reports.values())), [])
    except UsageError as error:
        why = "a plan needs to know which NIC carries the job"
        row = Check(node="all", check="data NIC", state="fail", value=error.message, why=why, fix=error.hint or "")
        return rack, (), [row]


def nics_of(rack: Rack, facts: tuple[NodeFacts, ...]) -> dict[str, dict[NetName, Nic]]:
    found = {fact.node: {net: nic for net in NETS if (nic := fact.nic_for(net, rack))} for fact in facts}
    return {node: nics for node, nics in found.items() if len(nics) == len(NETS)}


def _imports(place: Place) -> Iterator[Check]:
    """DEEP: torch is really imported, and says what it was built with."""
    say = "print(torch.__version__, torch.version.cuda, torch.cuda.device_count(), 'GPUs')"
    code = f"import site; site.main(); import torch; {say}"
    why = "every rank does it"

    def act(node: str) -> tuple[int, str]:
        with place.work(node, code) as process:
            stdout, stderr = process.communicate(b"", IMPORT_S)
            return process.wait(), ((stdout if process.wait() == 0 else stderr).decode(errors="replace").strip())

    for node, answer in place.each(act).items():
        status, text = answer if isinstance(answer, tuple) else (1, answer.message)
        last = (text.splitlines() or ["no output"])[-1]
        state: State = "fail" if status else "ok"
        fix = "reinstall torch there: the last line of its traceback says what is missing" if status else ""
        yield Check(node=node, check="import torch", state=state, value=last, why=why, fix=fix)
