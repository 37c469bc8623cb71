"""Where does each rank of a run stand? One JSON line a rank, from the node's side of a job that may hang.

    python3 autopsy.py RUN NODE

{"rank", "local_rank", "pid", "state", "frames": [{"name", "file", "line", "text"}, ...], "flight", "error"}; frames are
the main thread's, innermost first, `text` the source line. `flight` is the last collective that PyTorch's flight
recorder has of the rank, {"call", "seq", "done"}, where it can be asked: NCCL's watchdog dumps it when its pipe is
written to. Nothing is stopped: py-spy reads the memory of a living process.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import pickle
import re
import subprocess
import sys
import time

WITHIN = 15  # seconds for one process
DUMPED = 5.0  # seconds for all flight recorders; the watchdog looks at the pipe once a second
PIPE, DUMP = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"  # stems: <rank>.pipe and <rank> follow


def environment(pid: str) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            items = file.read().split(b"\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (os.fsdecode(item).partition("=") for item in items)}


def stat(pid: str) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def ranks(run: str, node: str) -> list[tuple[str, dict[str, str]]]:
    """(pid, environment) of the run's ranks here: the topmost processes with LOCAL_RANK, not what they started."""
    tag = {"TORCHRACK_RUN": run, "TORCHRACK_NODE": node}.items()
    found = {pid: env for pid in os.listdir("/proc") if pid.isdigit() and tag <= (env := environment(pid)).items()}
    inside = {pid for pid, env in found.items() if "LOCAL_RANK" in env}
    return [(pid, found[pid]) for pid in sorted(inside, key=int) if (stat(pid) or ["", ""])[1] not in inside]


def frames(pid: str) -> list[dict[str, object]]:
    """The main thread's Python frames; raises OSError or ValueError with the reason where they cannot be read."""
    py_spy = os.path.join(os.path.dirname(sys.executable), "py-spy")
    argv = [py_spy, "dump", "--nonblocking", "--full-filenames", "--json", "--pid", pid]
    done = subprocess.run(argv, capture_output=True, timeout=WITHIN, check=False)
    if done.returncode:
        raise ValueError(done.stderr.decode(errors="replace").strip()[-300:])
    threads = json.loads(done.stdout)
    main = next((thread for thread in threads if thread.get("os_thread_id") == int(pid)), threads[0])
    return [
        {k: frame[k] for k in ("name", "line")}
        | {"file": frame["filename"], "text": linecache.getline(frame["filename"], frame["line"]).strip()}
        for frame in main["frames"]
    ]


class Plain(pickle.Unpickler):
    """Lists, texts and numbers: a dump has nothing else, and nothing else is let in."""

    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"{module}.{name} in a dump")


def ask(env: dict[str, str]) -> bool:
    """Have the rank's flight recorder dumped; False where nobody listens."""
    try:
        file = os.open(f"{env.get(PIPE)}{env['RANK']}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        with os.fdopen(file, "wb") as pipe:
            pipe.write(b"1")
    except OSError:
        return False
    return True


def flight(env: dict[str, str], asked: float) -> dict[str, object]:
    """What was dumped since `asked`; {} where nothing comes within DUMPED seconds of it."""
    dump = f"{env.get(DUMP)}{env['RANK']}"
    while True:
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):  # not there yet, or half of it
            if os.stat(dump).st_mtime > asked - 1:
                with open(dump, "rb") as written:
                    return last(Plain(written).load())
        if time.time() > asked + DUMPED:
            return {}
        time.sleep(0.1)


def last(dump: dict[str, list[dict[str, object]]]) -> dict[str, object]:
    """The youngest collective of a dump (version 2.10 of its format, torch 2.13); sends and receives do not count."""
    entries = [entry for entry in dump.get("entries", []) if not entry.get("is_p2p")]
    if not entries:
        return {}
    entry = entries[-1]
    call = re.sub(r"\s", "_", str(entry["profiling_name"]).split(":")[-1])
    done = bool(entry.get("retired")) or entry.get("state") == "completed"
    return {"call": call, "seq": entry["collective_seq_id"], "done": done}


def main(run: str, node: str) -> None:
    found, asked = ranks(run, node), time.time()
    listening = {pid for pid, env in found if ask(env)}  # all at once: they share the DUMPED seconds
    for pid, env in found:
        row: dict[str, object] = {"rank": int(env["RANK"]), "local_rank": int(env["LOCAL_RANK"]), "pid": int(pid)}
        row |= {"state": (stat(pid) or ["X"])[0], "frames": [], "flight": {}, "error": ""}
        try:
            row["frames"] = frames(pid)
            row["flight"] = flight(env, asked) if pid in listening else {}
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            row["error"] = str(error)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
