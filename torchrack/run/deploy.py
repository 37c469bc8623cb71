"""deploy: facts → plan → render → push → verify, on every host or on none; and what launch needs of it.

The data network is preflight's and launch's to look at: it must be in order when a job starts, and no file needs it.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from torchrack.model.errors import Lacking, NotFound, TorchrackError, UsageError
from torchrack.model.hosts import Host, parse_hosts
from torchrack.model.job import Job
from torchrack.model.rack import NodeFacts, Rack
from torchrack.places.ssh import Ssh
from torchrack.places.ssh_connect import HostKeys, Trust
from torchrack.places.ssh_push import Payload, Pushed, compare, push
from torchrack.plan.plan import Plan, check_job, plan
from torchrack.plan.render import constant_files, node_files
from torchrack.run.folder import RackFolder, RackRecord, write_json
from torchrack.run.lifecycle import LiveRack
from torchrack.run.phases import HostPhase, Phase, Progress
from torchrack.run.preflight import Outcome, network, nics_of, preflight
from torchrack.run.start import summary
from torchrack.run.torch_there import TorchFrom, make_them, needed

T = TypeVar("T")
REMOTE = "remote"
DEPLOYED = "deployed.json"
SHOWN = 4


@dataclass(frozen=True)
class Rented:
    """Hosts by name, whether or not something is deployed on them yet."""

    place: Ssh
    folder: RackFolder

    @property
    def rack(self) -> Rack:
        return Rack(name=self.folder.name, nodes=len(self.place.hosts), runtime="ssh")


def rented(
    hosts: str | None, rack: str | None, host_keys: HostKeys = "known", known_hosts: Path | None = None
) -> Rented:
    """The hosts that are named, or those of a rack that was deployed. Raises UsageError, or parse_hosts' errors."""
    name = rack or REMOTE
    folder = RackFolder(name)
    recorded = folder.read_rack()
    if recorded and recorded.runtime != "ssh":
        raise UsageError(f"rack {name} is one of this machine ({recorded.runtime})", "RACK=another-name for the hosts")
    named: tuple[Host, ...] = parse_hosts(hosts) if hosts else ()
    file = known_hosts.resolve() if known_hosts else None
    trust = Trust(host_keys, file) if file or host_keys != "known" else None
    place = Ssh(name, folder.place, named, trust)
    if not place.hosts:
        raise UsageError("no hosts are given", "HOSTS='user@a,user@b:2222', or HOSTS=inventory.yml")
    return Rented(place, folder)


@dataclass(frozen=True)
class Deployment:
    """What a deploy decided, and per node how it went (`pushed` is empty where it only planned)."""

    outcome: Outcome
    plan: Plan
    payloads: dict[str, Payload]
    pushed: dict[str, Pushed]
    differs: dict[str, list[str]]


def deploy(
    hosts: Rented,
    job: Job,
    shared: Mapping[str, bytes],
    progress: Progress,
    *,
    allow_public: bool = False,
    only_plan: bool = False,
    torch: TorchFrom = "python",
) -> Deployment | Outcome:
    """Put constant and node files on every host; an Outcome where a check failed and nothing was done.

    `torch` says how torch gets there (torch_there.py); what was brought stays, also where a check then fails.
    `shared` are files beside the scripts (the labs). With `only_plan` nothing is changed anywhere. The caller holds the
    folder's lock.
    """
    check_job(hosts.rack, job)
    outcome = preflight(hosts.place, hosts.rack, job, progress, allow_public=allow_public, probes=False)
    complete = len(outcome.reports) == len(hosts.place.hosts)
    wanted = needed(hosts.place, outcome.reports, torch) if complete else {}
    for node, need in wanted.items():
        progress.console.note(f"{node} {'would get' if only_plan else 'gets'} {need}")
    if only_plan:  # what would be put right first is no obstacle
        about = [row for row in outcome.rows if not (row.check.startswith("torch") and row.node in wanted)]
        outcome = replace(outcome, rows=tuple(about))
    elif wanted:
        make_them(hosts.place, wanted, progress)
        outcome = preflight(hosts.place, hosts.rack, job, progress, allow_public=allow_public, probes=False)
    if outcome.bad() or outcome.rack is None:
        return outcome
    with progress.phase(Phase.PLAN) as said:
        made = plan(outcome.rack, outcome.facts, job)
        loads = payloads(made, shared)
        said.append(summary(made))
    if only_plan:
        hosts.place.learn(outcome.reports)
        return Deployment(outcome, made, loads, {}, compare(hosts.place, loads))
    # Where these very files are in force already, the facts were all the words that had to be said.
    as_is = all(outcome.reports[node].health.deployed == load.digest for node, load in loads.items())
    with progress.phase(HostPhase.PUSH) as said:
        hosts.folder.make()
        hosts.place.learn(outcome.reports)
        hosts.place.remember()  # before anything is there: after a crash, down must know where to look
        if as_is:
            pushed = {node: Pushed(load.digest, load.digest, same=True) for node, load in loads.items()}
        else:
            pushed = push(hosts.place, loads, who())
        record(hosts.folder, made.rack, outcome.facts, pushed)
        said.append(told(pushed))
    return Deployment(outcome, made, loads, pushed, {})


def payloads(made: Plan, shared: Mapping[str, bytes]) -> dict[str, Payload]:
    constant = {f"scripts/{name}": content for name, content in constant_files().items()} | dict(shared)
    return {
        node: Payload(constant, {f"scripts/{name}": content for name, content in files.items()})
        for node, files in node_files(made).items()
    }


def record(folder: RackFolder, rack: Rack, facts: tuple[NodeFacts, ...], pushed: Mapping[str, Pushed]) -> None:
    folder.write_rack(RackRecord(runtime="ssh", asked=rack, rack=rack, facts=facts))
    write_json(folder.place / DEPLOYED, {node: one.digest for node, one in pushed.items()})


def told(pushed: Mapping[str, Pushed]) -> str:
    """Which digest each node has now, and how many files went there."""
    words = [
        f"{node} {one.digest} {'unchanged' if one.same else f'{one.sent} files'}"
        for node, one in list(pushed.items())[:SHOWN]
    ]
    return "  ".join([*words, *(["…"] if len(pushed) > SHOWN else [])])


def who() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"


def deployed(hosts: Rented) -> LiveRack:
    """The rack as it was deployed from here. Raises NotFound, or UsageError where HOSTS are others than those."""
    folder, place = hosts.folder, hosts.place
    recorded = folder.read_rack()
    if recorded is None or recorded.rack is None:
        raise NotFound(f"nothing is deployed for rack {folder.name}", f"make deploy{hosts_flag(folder.name)}")
    if len(recorded.facts) != len(place.hosts) or not place.there:
        those = ", ".join(map(str, place.recorded))
        hint = f"make deploy with these HOSTS first; make launch without HOSTS{rack_flag(folder.name)} means those"
        raise UsageError(f"HOSTS are not those that were deployed to: {those}", hint)
    return LiveRack(recorded.rack, recorded.facts, place, folder)


def ready_for(live: LiveRack, job: Job, shared: Mapping[str, bytes], progress: Progress) -> None:
    """See to it that the hosts hold the files of this very job: another job may need other node files.

    Raises Lacking where a file is not the one that was deployed: somebody changed it there.
    """
    assert isinstance(live.place, Ssh)
    loads = payloads(plan(live.rack, live.facts, job), shared)
    have = json.loads((live.folder.place / DEPLOYED).read_text())
    with progress.phase(HostPhase.PUSH) as said:
        if all(load.digest == have.get(node) for node, load in loads.items()):
            changed = {node: paths for node, paths in compare(live.place, loads, idle=True).items() if paths}
            if changed:
                what = "; ".join(f"{', '.join(paths[:3])} on {node}" for node, paths in list(changed.items())[:SHOWN])
                raise Lacking(f"not as it was deployed: {what}", f"make deploy{hosts_flag(live.rack.name)}")
            said.append("as deployed")
        else:
            pushed = push(live.place, loads, who())
            record(live.folder, live.rack, live.facts, pushed)
            said.append(f"this job's node files: {told(pushed)}")


def look(live: LiveRack, job: Job, progress: Progress) -> Outcome:
    """Whether the hosts reach each other now as the job will want to: firewalls and routes change after a deploy."""
    found = Outcome((), tuple(fact.node for fact in live.facts), facts=live.facts, nics=nics_of(live.rack, live.facts))
    return network(live.place, found, job, progress)


def rack_flag(rack: str) -> str:
    return "" if rack == REMOTE else f" RACK={rack}"


def hosts_flag(rack: str) -> str:
    return f" HOSTS=…{rack_flag(rack)}"


def stop(hosts: Rented, progress: Progress) -> dict[str, list[str]]:
    """End every run of this rack on every host, also one started elsewhere; node to the runs ended. Raises Lacking."""
    place = hosts.place
    with progress.phase(HostPhase.STOP) as said:
        place.know()
        ended = {node: sure(answer) for node, answer in place.each(place.end_runs).items()}
        runs = sorted({run for own in ended.values() for run in own})
        said.append(f"ended {', '.join(runs)}" if runs else "nothing was running")
    return ended


def sure(answer: T | TorchrackError) -> T:
    if isinstance(answer, TorchrackError):
        raise answer
    return answer
