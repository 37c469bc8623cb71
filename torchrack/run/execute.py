"""One run on a rack: put scripts, start the supervisors, stream, end everything by the deadline, keep the record."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torchrack.model.errors import Lacking, TorchrackError
from torchrack.model.job import RunSpec
from torchrack.model.result import RankResult, RunResult, Verdict
from torchrack.plan.plan import NodePlan, Plan, torchrun_argv
from torchrack.plan.render import constant_files, digest, node_files, sha256
from torchrack.run.autopsy import Stacks, autopsy, flight_recorder, reduced, told
from torchrack.run.folder import disk_errors
from torchrack.run.lifecycle import LiveRack
from torchrack.run.losses import Losses
from torchrack.run.occupy import occupied
from torchrack.run.outputs import collect_outputs
from torchrack.run.phases import Phase, Progress
from torchrack.run.record import RunLogs, rank_exits, read_result, versions, write_plan, write_result
from torchrack.run.supervised import LEASE, Event, Team
from torchrack.run.target import Target
from torchrack.run.wires import pinned_share, wire_rows

if TYPE_CHECKING:
    from torchrack.diagnose import Diagnosis

GRACE = 2.0  # seconds between SIGTERM and SIGKILL, and what other nodes get to write their errors after one failed
READY_WITHIN = 20.0
END_WITHIN = 10.0
STOPPED = "The supervisors of all nodes were told to end it: by make stop, or by whoever else sent them SIGTERM."
SHOWN_AGENTS, SHOWN_LINES = 2, 15
TAIL = 200  # agent lines kept in memory for the ranks' exit codes


class Execution:
    """The state of one run while it runs: which ranks were seen, which agents ended and how."""

    def __init__(
        self,
        live: LiveRack,
        plan: Plan,
        run: RunSpec,
        target: Target,
        folder: Path,
        progress: Progress,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        # They travel on the supervisors' stdin, never in a file or an argument, and are masked in all that is kept.
        self.secrets = dict(secrets or {})
        self.live, self.plan, self.run, self.target = live, plan, run, target
        self.folder, self.progress = folder, progress
        self.logs = RunLogs(folder, run.id, plan)
        self.waiting = {node.node for node in plan.present}
        self.ready: set[str] = set()
        self.seen: set[tuple[str, int]] = set()
        self.exits: dict[str, Event] = {}
        self.wires: dict[str, list[Mapping[str, object]]] = {}
        self.left: dict[str, list[int]] = {}
        self.agent_tail: dict[str, list[str]] = {}
        self.refusals: list[str] = []
        self.stacks: Stacks = {}
        self.started, self.interrupted, self.streams = False, False, True
        self.failed_at: float | None = None
        self.losses = Losses(plan.job, len(plan.present) * plan.job.nproc)
        self.scripts: dict[str, dict[str, bytes]] = {}
        self.began = time.monotonic()

    def execute(self) -> RunResult:
        """Run to the end and return the record that was written. Ctrl-C ends the job everywhere, then returns too.

        A run that could not be started leaves nothing, neither on the nodes nor here.
        """
        try:
            return self._execute()
        except BaseException:
            if not self.started:
                self.forget()
            raise

    def _execute(self) -> RunResult:
        self._put_scripts()
        nodes = [node.node for node in self.plan.present]
        with (
            Team(self.live.place) as team,
            occupied(self.plan, self.live.place),
            autopsy(self.live.place, self.run.id, nodes, self.run.deadline, self.stacks),
        ):
            try:
                self._start(team)
                self._join(team)
                with self.progress.phase(Phase.RUN) as said:
                    self._pump(team, lambda: not self.waiting, self.run.deadline + END_WITHIN)
                    said.append(self._endings())
                    said.ok = self._verdict() == "passed"
            except KeyboardInterrupt:
                self._interrupt(team)
        return self._finish()

    def prepare(self) -> dict[str, dict[str, object]]:
        """Put the scripts and return each node's spec: for a run that somebody else starts."""
        self._put_scripts()
        return {node.node: self._spec(node, self.run.deadline) for node in self.plan.present}

    def replay(self, told: Mapping[str, list[Event]]) -> RunResult:
        """The record of a run that is over, from the events of each node; its lines are not shown again."""
        self.streams = False
        for node, events in told.items():
            for event in events:
                self._handle(node, event)
            self._handle(node, {"event": "closed"})
        lasted = max((float(str(event["seconds"])) for event in self.exits.values()), default=0.0)
        self.began = time.monotonic() - lasted
        return self._finish()

    def _put_scripts(self) -> None:
        with self.progress.phase(Phase.SCRIPTS) as said:
            own = node_files(self.plan)
            constant = constant_files()
            self.scripts = scripts = {node: constant | files for node, files in own.items()}
            write_plan(self.folder, self.plan, scripts)
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda n: self._put(n.node, scripts[n.node]), self.plan.present))
            said.append("  ".join(f"{node} {digest(files)}" for node, files in list(scripts.items())[:4]))
            said.append("…" * (len(scripts) > 4))

    def _put(self, node: str, scripts: Mapping[str, bytes]) -> None:
        placed = {f"scripts/{path}": content for path, content in scripts.items()}
        self.live.place.put(node, placed | self.target.placed)

    def _start(self, team: Team) -> None:
        with self.progress.phase(Phase.READY) as said:
            for node in self.plan.present:
                team.start(node.node, self._spec(node, self.run.deadline))
            self._pump(team, lambda: self.waiting <= self.ready or bool(self.refusals), READY_WITHIN)
            if self.refusals or len(self.ready) < len(self.plan.present):
                raise self._not_started(team)
            said.append(f"{len(self.ready)} supervisors")
        self.started = True
        team.send_all("go")

    def _spec(self, node: NodePlan, deadline: float) -> dict[str, object]:
        home = self.live.place.home(node.node)
        mine = f"{home}/runs/{self.run.id}"
        target = ["bash", f"{home}/scripts/rank.sh", f"{home}/{self.target.path}"]
        logs = f"{mine}/logs{self.losses.lives[node.node] or ''}"  # its own in each life: a folder is read from the top
        argv = torchrun_argv(node, self.run, self.plan.job.nproc, logs, target)
        scripts = {f"scripts/{path}": content for path, content in self.scripts[node.node].items()}
        placed = scripts | self.target.placed
        return {
            "run": self.run.id,
            "node": node.node,
            "argv": ["bash", f"{home}/scripts/launch.sh", *argv],
            "cwd": f"{home}/{self.target.cwd}" if self.target.cwd else f"{mine}/work",
            "env": {"OUT": f"{mine}/out", **flight_recorder(self.live.place, logs), **self.secrets},
            "logs": logs,
            "nproc": self.plan.job.nproc,
            "deadline": deadline,
            "grace": GRACE,
            "lease": LEASE,
            "detach": False,
            "expect": {f"{home}/{path}": h for path, h in sha256(placed).items()},
        }

    def _join(self, team: Team) -> None:
        wanted = len(self.plan.present) * self.plan.job.nproc
        bound = self.plan.join_bound
        with self.progress.phase(Phase.JOINED) as said:
            self.progress.console.update(f"waiting at most {bound} s for {len(self.plan.nodes)} nodes to join")
            self._pump(team, lambda: len(self.seen) >= wanted or bool(self.exits), self.run.deadline + END_WITHIN)
            joined = {node for node, _ in self.seen}
            said.append(f"{len(joined)} of {len(self.plan.nodes)}")
            missing = [node.node for node in self.plan.nodes if node.node not in joined]
            said.ok = not missing
            if missing:
                said.append(f"not seen: {', '.join(missing)}")

    def _endings(self) -> str:
        clean = sum(event["code"] == 0 for event in self.exits.values())
        return f"{len(self.exits)} of {len(self.plan.present)} agents ended, {clean} with exit 0"

    def _pump(self, team: Team, done: Callable[[], bool], seconds: float) -> None:
        """Handle events until `done()`; past `seconds` the supervisors' deadline has failed: end the job from here."""
        until = time.monotonic() + seconds
        for node, event in team.events(until):
            self._handle(node, event)
            self._end_others(team)
            self._bring_back(team)
            if done():
                return
        team.send_all("end the CLI's own bound passed")

    def _handle(self, node: str, event: Event) -> None:
        match event["event"]:
            case "ready":
                self.ready.add(node)
            case "refused":
                self.refusals.append(f"{node}: {event['why']}")
            case "rank":
                self.seen.add((node, int(str(event["local_rank"]))))
                self.losses.saw_rank(int(str(event["world"])), int(str(event["attempt"])))
                self.logs.saw_rank(node, event)
            case "line":
                self._line(node, event)
            case "exited":
                self.exits[node] = event
                self.logs.exited(node, event)
                lost = self.losses.saw_exit(node, event["signal"] is not None and event["reason"] == "job")
                if (event["code"] or event["signal"]) and not lost and self.failed_at is None:
                    self.failed_at = time.monotonic()
            case "wires":
                self.wires.setdefault(node, []).extend(event["nics"])  # type: ignore[arg-type]
            case "done":
                self.left[node] = list(event["left"])  # type: ignore[call-overload]
            case "closed":
                self.waiting.discard(node)
                if node in self.ready and node not in self.exits:  # the node is lost, and with it the job
                    self.failed_at = self.failed_at or time.monotonic()

    def _line(self, node: str, event: Event) -> None:
        for name, value in self.secrets.items():  # before anything writes or shows it
            event["text"] = str(event["text"]).replace(value, f"<{name}>")
        self.logs.write(node, event)
        source = str(event["source"])
        if source == "agent":  # shown when the run did not pass: torchrun frets at length about exits that are in order
            tail = self.agent_tail.setdefault(node, [])
            tail.append(str(event["text"]))
            del tail[:-TAIL]
        else:
            self.losses.saw_line(int(str(event["attempt"])))
            if self.streams:
                self.progress.console.line(f"{node}/{source}", str(event["text"]))

    def _end_others(self, team: Team) -> None:
        if self.failed_at is not None and time.monotonic() - self.failed_at > GRACE:
            self.failed_at = float("inf")  # said once
            team.send_all("end another node failed", but=frozenset(self.exits))

    def _bring_back(self, team: Team) -> None:
        for node in self.losses.due(self.waiting):
            self.progress.console.note(f"{node} is started again")
            self.logs.write(node, {"source": "agent", "text": f"# torchrack {node} is started again"})
            self.waiting.add(node)
            team.start(node, self._spec(self.plan.node(node), self.began + self.run.deadline - time.monotonic()))
            team.members[node].send("go")

    def _interrupt(self, team: Team) -> None:
        self.interrupted = True
        self.progress.console.note("interrupted: ending the job on all nodes (at most 5 s)")
        team.send_all("end interrupted")
        self._pump(team, lambda: not self.waiting, END_WITHIN)

    def _not_started(self, team: Team) -> TorchrackError:
        silent = sorted({node.node for node in self.plan.present} - self.ready)
        seen = [*self.refusals, *(f"{node}: {line}" for node in silent for line in team.members[node].errors[-3:])]
        what = f"{len(self.ready)} of {len(self.plan.present)} supervisors are ready within {READY_WITHIN:.0f} s"
        head = "the nodes did not take the run" if self.refusals else f"{what}; not {', '.join(silent)}"
        fix = f"make down RACK={self.live.rack.name}, then again"
        if self.live.place.kind == "ssh":  # where down would remove what a run of the user's has written
            fix = "make collect HOSTS=… shows what runs there, make stop HOSTS=… ends it"
        return Lacking("\n  | ".join([head, *seen]), fix)

    def _finish(self) -> RunResult:
        with self.progress.phase(Phase.COLLECT) as said, suppress(KeyboardInterrupt):
            out = self.folder / "out"
            said.append(collect_outputs(self.live.place, self.plan, self.run.id, self.target, out))
            said += [f"in {shown(out)}"] if any(out.iterdir()) else []
        self.reap()
        self._show_agents()
        with self.progress.phase(Phase.RECORD) as said:
            self._write_stacks()
            self.logs.close()
            result = self._result()
            write_result(self.folder, result)
            said.append(shown(self.folder))
        return result

    def _show_agents(self) -> None:
        """The last words of the agents that failed by themselves, the first few of them."""
        failed = [node for node, event in self.exits.items() if event["code"] and node in self.agent_tail]
        for node in failed[:SHOWN_AGENTS]:
            for line in self.agent_tail[node][-SHOWN_LINES:]:
                self.progress.console.line(f"{node}/agent", line)

    def _write_stacks(self) -> None:
        """Where each rank stood, if the run had to be ended: a line in its log, and all of it in stacks.txt."""
        if self._verdict() != "timed_out" or not any(self.stacks.values()):
            return
        for node, rows in self.stacks.items():
            for row in rows:
                self.logs.note(node, str(row["local_rank"]), reduced(row))
        rows = sorted((row for rows in self.stacks.values() for row in rows), key=lambda row: row["rank"])
        with disk_errors(str(self.folder)):
            (self.folder / "stacks.txt").write_text("\n\n".join(map(told, rows)) + "\n")

    def forget(self) -> None:
        """Remove what this run has put on the nodes, and its folder here; a node that is gone keeps its part."""

        def act(node: NodePlan) -> None:
            with suppress(TorchrackError):
                place = self.live.place
                place.run(node.node, ["rm", "-rf", "--", f"{place.home(node.node)}/runs/{self.run.id}"], timeout=15)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(act, self.plan.present))
        self.logs.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def reap(self) -> None:
        """A supervisor that went without its `done` may have left ranks: end what carries the run's tag."""
        for node in {node.node for node in self.plan.present} - set(self.left):
            place = self.live.place
            supervisor = f"{place.home(node)}/scripts/supervisor.py"
            argv = [place.python(node), "-I", "-S", supervisor, "--reap", self.run.id, node]
            with suppress(TorchrackError):
                place.run(node, argv, timeout=15)

    def _result(self) -> RunResult:
        verdict = self._verdict()
        rows = wire_rows(self.plan.nodes, self.wires)
        found = self._diagnosis() if verdict in ("failed", "timed_out") else None
        return RunResult(
            run=self.run.id,
            rack=self.live.rack.name,
            runtime=self.live.place.kind,
            nodes=len(self.plan.nodes),
            nproc=self.plan.job.nproc,
            launcher=self.plan.job.launcher,
            target=self.target.title,
            verdict=verdict,
            kind=_kind(verdict, found),
            why=found.why if found else STOPPED if verdict == "interrupted" and not self.interrupted else None,
            evidence=_evidence(found),
            fix=found.fix if found else None,
            ranks=tuple(self._rank(place.rank, place.node, place.local_rank) for place in self.plan.ranks),
            wires=rows,
            pinned_share=pinned_share(rows, self.plan.job.pin),
            seconds=round(time.monotonic() - self.began, 2),
            versions=versions(self.live.facts),
            record=shown(self.folder),
        )

    def _diagnosis(self) -> Diagnosis:
        from torchrack.diagnose import diagnose_folder  # its rules take 0.2 s to load, which most runs need not pay

        return diagnose_folder(self.folder / "logs")

    def _verdict(self) -> Verdict:
        present = {node.node for node in self.plan.present}
        reasons = {str(event["reason"]) for event in self.exits.values()}
        if self.interrupted or (reasons == {"signal"} and set(self.exits) == present):  # make stop, from anywhere
            return "interrupted"
        if "deadline" in reasons:
            return "timed_out"
        clean = all(event["code"] == 0 for event in self.exits.values())
        return "passed" if clean and set(self.exits) == present == set(self.live.rack.node_names) else "failed"

    def _rank(self, rank: int, node: str, local_rank: int) -> RankResult:
        event = self.exits.get(node)
        code = 0 if event and event["code"] == 0 else rank_exits(self.agent_tail.get(node, ())).get(local_rank)
        with suppress(KeyError):
            rank = self.logs.rank(node, local_rank)
        return RankResult(
            rank=rank,
            node=node,
            local_rank=local_rank,
            exit=code if code is None or code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            log=self.logs.path(node, str(local_rank)),
        )


def _kind(verdict: Verdict, found: Diagnosis | None) -> str | None:
    if found is None:
        return None
    if found.verdict == "fault":
        return found.kind
    return "hang" if verdict == "timed_out" else "unknown"


def _evidence(found: Diagnosis | None) -> str | None:
    if not found or not found.evidence:
        return None
    first = found.evidence[0]
    return f"logs/{first.file}:{first.line}"


def shown(path: Path) -> str:
    """A path as the user would type it: relative to where they stand, if that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


__all__ = ["Execution", "read_result", "shown"]
