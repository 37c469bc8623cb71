"""A run's record: a log a rank, plan, scripts, wires and result, in .torchrack/<rack>/<run>/."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO

from torchrack.model.rack import NodeFacts
from torchrack.model.result import RunResult
from torchrack.plan.plan import Plan
from torchrack.run.folder import disk_errors, write_json
from torchrack.run.supervised import Event

# torchrun names the first failure in a log line and every failure of its node in the summary at the end.
_FIRST = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")
_SUMMARY_RANK = re.compile(r"^\s+rank\s+: \d+ \(local_rank: (\d+)\)")
_SUMMARY_EXIT = re.compile(r"^\s+exitcode\s+: (-?\d+) \(pid")


class RunLogs:
    """The log files of one run: logs/<node>/<local_rank>.log for a rank, logs/<node>/agent.log for its torchrun.

    The first line of each tells what it is, so that `torchrack diagnose` can read the folder on its own.
    """

    def __init__(self, folder: Path, run: str, plan: Plan) -> None:
        self.folder, self.run, self.plan = folder / "logs", run, plan
        self._files: dict[tuple[str, str], IO[str]] = {}
        self._attempt: dict[tuple[str, str], int] = {}
        self._ranks = {(p.node, str(p.local_rank)): p.rank for p in plan.ranks}

    def saw_rank(self, node: str, event: Event) -> None:
        """The rank that torchrun really gave; it may differ from the plan after an elastic restart."""
        self._ranks[node, str(event["local_rank"])] = int(str(event["rank"]))
        self._file(node, str(event["local_rank"]))

    def write(self, node: str, event: Event) -> None:
        source = str(event["source"])
        file = self._file(node, source)
        attempt = int(str(event.get("attempt") or 0))
        if attempt != self._attempt.get((node, source), 0):
            self._attempt[node, source] = attempt
            print(f"# torchrack attempt={attempt}", file=file)
        print(event["text"], file=file)

    def note(self, node: str, source: str, text: str) -> None:
        """Add a comment line that is not the program's own."""
        print(text, file=self._file(node, source))

    def exited(self, node: str, event: Event) -> None:
        fields = ("code", "signal", "reason", "seconds")
        code, signal, reason, seconds = ("null" if event.get(f) is None else event[f] for f in fields)
        line = f"# torchrack exit={code} signal={signal} reason={reason} seconds={float(str(seconds)):.1f}"
        print(line, file=self._file(node, "agent"))

    def close(self) -> None:
        for file in self._files.values():
            with disk_errors(str(self.folder)):
                file.close()

    def rank(self, node: str, local_rank: int) -> int:
        return self._ranks[node, str(local_rank)]

    def path(self, node: str, source: str) -> str:
        """Relative to the run's folder."""
        return f"logs/{node}/{source}.log"

    def _file(self, node: str, source: str) -> IO[str]:
        if (node, source) not in self._files:
            path = self.folder / node / f"{source}.log"
            with disk_errors(str(path)):
                path.parent.mkdir(parents=True, exist_ok=True)
                file = path.open("w", encoding="utf-8", errors="backslashreplace", buffering=1)
            self._files[node, source] = file
            print(self._header(node, source), file=file)
        return self._files[node, source]

    def _header(self, node: str, source: str) -> str:
        job = self.plan.job
        if source == "agent":
            at = ",".join(nic.address for nic in self.plan.node(node).nics.values())
            head = f"# torchrack run={self.run} node={node} agent nnodes={len(self.plan.nodes)} nproc={job.nproc}"
            return f"{head} at={at}"
        rank = self._ranks.get((node, source), "unknown")
        world = len(self.plan.nodes) * job.nproc
        return f"# torchrack run={self.run} node={node} rank={rank} local_rank={source} world={world}"


def rank_exits(agent_lines: Iterable[str]) -> dict[int, int]:
    """Exit code by local rank (negative: killed by that signal) as torchrun's own output tells them."""
    exits: dict[int, int] = {}
    local_rank: int | None = None
    for line in agent_lines:
        if first := _FIRST.search(line):
            exits.setdefault(int(first[2]), int(first[1]))
        elif named := _SUMMARY_RANK.match(line):
            local_rank = int(named[1])
        elif local_rank is not None and (ended := _SUMMARY_EXIT.match(line)):
            exits[local_rank] = int(ended[1])
            local_rank = None
    return exits


def write_plan(folder: Path, plan: Plan, scripts: Mapping[str, Mapping[str, bytes]]) -> None:
    """plan.json and scripts/<node>/: what the run was told, before it starts."""
    write_json(folder / "plan.json", plan_json(plan))
    for node, files in scripts.items():
        for path, content in files.items():
            target = folder / "scripts" / node / path
            with disk_errors(str(target)):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)


def plan_json(plan: Plan) -> dict[str, object]:
    """The plan as plain data, each setting with its reason."""
    return {
        "rack": plan.rack.model_dump(),
        "job": plan.job.model_dump(),
        "endpoint": plan.endpoint,
        "ranks": [asdict(rank) for rank in plan.ranks],
        "nodes": [
            {
                "node": node.node,
                "node_rank": node.node_rank,
                "nics": {net: nic.model_dump() for net, nic in node.nics.items()},
                "settings": [asdict(setting) for setting in node.settings],
            }
            for node in plan.nodes
        ],
    }


def write_result(folder: Path, result: RunResult) -> None:
    write_json(folder / "wires.json", [row.model_dump() for row in result.wires])
    write_json(folder / "result.json", result.model_dump())


def read_result(folder: Path) -> RunResult | None:
    """The result of a finished run, or None where it never finished."""
    try:
        return RunResult.model_validate(json.loads((folder / "result.json").read_text()))
    except (FileNotFoundError, ValueError):
        return None


def versions(facts: Iterable[NodeFacts]) -> dict[str, str]:
    """Of what ran: torch and python as the nodes tell them (all of them, where they differ), the kernel, torchrack."""
    nodes = tuple(facts)
    told = {name: sorted({getattr(node, name) or "?" for node in nodes}) for name in ("torch", "python")}
    ours = {"kernel": platform.release(), "torchrack": importlib.metadata.version("torchrack")}
    return {name: ", ".join(found) for name, found in told.items()} | ours
