"""A run that goes on without us (DETACH=1): started on every host, left to its supervisors, recorded by collect.

Each supervisor reads its spec from a file and writes its events to another; the deadline alone ends it. Its record is
made later from those events, exactly as from live ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torchrack.model.errors import Lacking, NotFound, TorchrackError
from torchrack.model.job import Job, RunSpec
from torchrack.model.result import RunResult
from torchrack.places.ssh import Ssh
from torchrack.plan.plan import plan
from torchrack.run.execute import Execution
from torchrack.run.folder import write_json
from torchrack.run.lifecycle import LiveRack
from torchrack.run.phases import Phase, Progress
from torchrack.run.supervised import Event
from torchrack.run.target import Target

MARK, LOST = "detached.json", "detached-lost.json"
SPEC, EVENTS, ERRORS = "spec.jsonl", "events.jsonl", "errors.txt"
# A session of its own and no stream of ours: sshd may hang up, the job stays. Then wait for its first words.
START = """
cd "$1" && setsid "$2" -I scripts/supervisor.py < "$3/spec.jsonl" > "$3/events.jsonl" 2> "$3/errors.txt" &
for _ in $(seq 200); do
  grep -q -E '"event": "(started|refused|exited)"' "$1/$3/events.jsonl" 2>/dev/null && exit 0
  sleep 0.1
done
exit 3
"""


def start_detached(
    live: LiveRack, job: Job, target: Target, args: tuple[str, ...], deadline: float, folder: Path, progress: Progress
) -> None:
    """Start on every host or on none; raises Lacking, after which nothing runs. The record is made by `finish`."""
    place = live.place
    assert isinstance(place, Ssh)
    run = RunSpec(id=folder.name, target=target.path, args=args, deadline=deadline, title=target.title)
    execution = Execution(live, plan(live.rack, live.facts, job), run, target, folder, progress)
    try:
        specs = execution.prepare()
    except BaseException:
        execution.forget()
        raise
    write_json(
        folder / MARK,
        {"job": job.model_dump(), "run": run.model_dump(), "title": target.title, "folder": target.folder,
         "script": target.script, "cwd": target.cwd, "files": sorted(target.files)},
    )  # fmt: skip
    with progress.phase(Phase.READY) as said:
        answers = place.each(lambda node: _start(place, node, run.id, specs[node]))
        failed = {node: answer for node, answer in answers.items() if isinstance(answer, TorchrackError)}
        if failed:
            execution.reap()  # of this run alone: another may be at work there
            execution.forget()
            raise Lacking("\n".join(f"{node}: {error.message}" for node, error in failed.items()), "as the lines say")
        said.append(f"{len(answers)} supervisors, on their own for at most {deadline:.0f} s")


def _start(place: Ssh, node: str, run: str, spec: dict[str, object]) -> None:
    own = f"runs/{run}"
    place.put(node, {f"{own}/{SPEC}": json.dumps(spec | {"detach": True}).encode() + b"\ngo\n"})
    output = place.run(node, ["sh", "-c", START, "sh", place.home(node), place.python(node), own], timeout=40)
    events = events_of(place, node, run)
    refused = [str(event["why"]) for event in events if event["event"] == "refused"]
    if output.code or refused or not any(event["event"] == "started" for event in events):
        errors = place.read(node, f"{own}/{ERRORS}").decode(errors="replace").strip().splitlines()[-3:]
        raise Lacking(f"did not start: {'; '.join([*refused, *errors]) or 'no word from its supervisor'}")


class Gone(NotFound):
    """No host has a run's files any more."""


@dataclass(frozen=True)
class Standing:
    """A detached run that is not over: the last line of each rank so far, by node/local rank."""

    last: dict[str, str]


def events_of(place: Ssh, node: str, run: str) -> list[Event]:
    """What a node's supervisor has said so far; the line that it is writing now is left out. Raises Gone."""
    try:
        text = place.read(node, f"runs/{run}/{EVENTS}").decode(errors="replace")
    except FileNotFoundError:
        why = f"run {run} was left to itself, and its files are no longer on {node}"
        raise Gone(why, "make collect before make down keeps them") from None
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def detached(folder: Path) -> bool:
    """Whether this run was left to itself and has no record yet."""
    return (folder / MARK).exists() and not (folder / "result.json").exists()


def finish(live: LiveRack, folder: Path, progress: Progress) -> RunResult | Standing:
    """The record of a detached run from its events, or how it stands while it still runs somewhere.

    Raises Gone, once: from then on the run does not count as one to be collected.
    """
    place = live.place
    assert isinstance(place, Ssh)
    mark = json.loads((folder / MARK).read_text())
    job, run = Job.model_validate(mark["job"]), RunSpec.model_validate(mark["run"])
    target = Target(mark["title"], mark["folder"], mark["script"], dict.fromkeys(mark["files"], b""), mark["cwd"])
    answers = place.each(lambda node: events_of(place, node, run.id))
    told = {node: answer for node, answer in answers.items() if isinstance(answer, list)}
    gone = [answer for answer in answers.values() if isinstance(answer, Gone)]
    if gone and len(gone) == len(answers):
        (folder / MARK).rename(folder / LOST)
        raise gone[0]
    if any(events[-1:] and events[-1]["event"] != "done" for events in told.values()):
        lines = [(f"{node}/{e['source']}", str(e["text"])) for node, own in told.items() for e in own if "text" in e]
        return Standing({source: text for source, text in lines if not source.endswith("/agent")})
    execution = Execution(live, plan(live.rack, live.facts, job), run, target, folder, progress)
    return execution.replay(told)
