"""Autopsy of a run that does not end: shortly before its deadline, ask every node where each of its ranks stands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import Any

from torchrack.model.errors import NotPermitted, TorchrackError
from torchrack.places.base import Output, Place
from torchrack.plan.render import PACKAGE

SCRIPT = (PACKAGE / "node" / "autopsy.py").read_text()
BEFORE = 8.0  # seconds before the deadline; a dump takes about one a rank
WITHIN = 30.0
Stacks = dict[str, list[dict[str, Any]]]


@contextmanager
def autopsy(place: Place, run: str, nodes: Sequence[str], deadline: float, taken: Stacks) -> Iterator[None]:
    """Fill `taken` (node to rows of node/autopsy.py) if the block is not left BEFORE seconds ahead of the deadline."""

    def take() -> None:
        with ThreadPoolExecutor(8) as pool:
            taken.update(zip(nodes, pool.map(lambda node: _rows(place, run, node), nodes), strict=True))

    timer = Timer(max(deadline - BEFORE, deadline / 2), take)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join(WITHIN)


def _rows(place: Place, run: str, node: str) -> list[dict[str, Any]]:
    argv = [place.python(node), "-I", "-c", SCRIPT, run, node]
    done = Output(1, b"", b"")
    with suppress(TorchrackError):
        try:  # where ptrace is restricted, only root may look at a process that it did not start
            done = place.run(node, argv, root=True, timeout=WITHIN)
        except NotPermitted:
            done = place.run(node, argv, timeout=WITHIN)
    return [json.loads(line) for line in done.stdout.splitlines()]


def flight_recorder(place: Place, folder: str) -> dict[str, str]:
    """Variables by which NCCL's watchdog dumps its last collectives into `folder`, on a time-out and when asked.

    Switched on for rented machines alone: gloo would record as well, a Python stack for each call, and nobody asks it.
    """
    stems = dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"), f"{folder}/flight_")
    return stems | ({"TORCH_FR_BUFFER_SIZE": "2000"} if place.kind == "ssh" else {})


def reduced(row: Mapping[str, Any]) -> str:
    """One line for the rank's log, which diagnose reads: its state, the call it is in, the line that made it."""
    call, place, text = "none", "unknown", ""
    for frame in row["frames"]:  # innermost first: the last match is the outermost, the function that was called
        path = str(frame["file"])
        if "torch/distributed/distributed_c10d.py" in path:
            call = str(frame["name"])
        elif "torch/utils/data/" in path:
            call = "data-loader"
        elif call == "none" and "torch/autograd/" in path:
            call = "backward"  # DDP waits for its all-reduces in there, out of Python's sight
    for frame in row["frames"]:
        if not any(part in str(frame["file"]) for part in ("/site-packages/", "/lib/python", "<")):
            place, text = f"{Path(frame['file']).name}:{frame['line']}", str(frame["text"])
            break
    flown = row.get("flight") or {}
    flight = f" flight={flown['call']}:{flown['seq']}:{'done' if flown['done'] else 'doing'}" if flown else ""
    return f"# torchrack autopsy rank={row['rank']} state={row['state']} call={call}{flight} place={place} line={text}"


def told(row: Mapping[str, Any]) -> str:
    """The whole stack as text, outermost call last, as py-spy prints it."""
    head = f"rank {row['rank']} (pid {row['pid']}, state {row['state']}) {row['error']}".rstrip()
    return "\n".join([head, *(f"    {f['name']} ({f['file']}:{f['line']})  {f['text']}" for f in row["frames"])])


__all__ = ["Stacks", "autopsy", "flight_recorder", "reduced", "told"]
