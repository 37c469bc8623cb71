"""torchrun whose ranks are forked from its agent: torch is imported once a node, not once a rank. CPU only.

    python forked.py TORCHRUN-OPTIONS --no-python bash rank.sh script.py ARGS    the same command line as torchrun's
    python forked.py --loopback                                                  jobs on stdin, JSON, one a line

Everything but the birth of a rank is torchrun's own: agent, rendezvous, environment, logs, restarts, exit codes. Two
ranks of lab 01 took 0.57x the wall time and 0.40x the CPU time of torchrun's (median of four alternated runs, torch
2.13.0, two cores). `elastic_launch(start_method="fork")` would not reach into torch for it, but there a rank that has
ended keeps its connections until all have, and an early exit, which the labs teach, looks like a hang (torch 2.13,
multiprocessing/api.py: queue_finished_reading_event).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from subprocess import TimeoutExpired
from types import TracebackType

POLL = 0.01  # seconds
TOLD = ("TORCHRACK_RUN", "TORCHRACK_NODE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")


class Forked:
    """What torchrun and the loopback runner need of subprocess.Popen, for a process that is forked."""

    def __init__(self, script: str, args: Sequence[str], env: Mapping[str, str], out: int, err: int, cwd: str) -> None:
        self.returncode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the child would print it again
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                code = _become(script, args, env, out, err, cwd)
            finally:
                os._exit(code)  # nothing of the agent's may run here: its threads are gone, its store is not ours

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + timeout if timeout is not None else None
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise TimeoutExpired("rank", timeout or 0.0)
            time.sleep(POLL)
        return code


def _become(script: str, args: Sequence[str], env: Mapping[str, str], out: int, err: int, cwd: str) -> int:
    """Run the script as `python script args` would, in this process; returns its exit code."""
    os.setsid()
    for ending in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ending, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((null, out, err)):
        os.dup2(source, target)
    # Let go of the agent's sockets, or its port stays taken. The numbers must stay taken: objects of the agent's that
    # are collected here close theirs, which by then could be a pipe of ours (a DataLoader hung on that).
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            os.dup2(null, number, inheritable=False) if number > 2 and number != null else None
    os.chdir(cwd)
    for name in set(os.environ) - set(env):
        del os.environ[name]
    os.environ.update(env)
    _show_environment(env)
    # What the agent does at its end (its temporary folders go) is not for the rank to do; its own children are.
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    sys.argv[:] = [script, *args]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:  # what the interpreter does at the top of a script
        traceback.print_exception(type(error), error, _own(error.__traceback__, script))
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _own(frames: TracebackType | None, script: str) -> TracebackType | None:
    """The traceback from the script on, without ours."""
    found = frames
    while found and found.tb_frame.f_code.co_filename != script:
        found = found.tb_next
    return found or frames


def _show_environment(env: Mapping[str, str]) -> None:
    """Overwrite what /proc/PID/environ shows, which is the agent's: ranks are found there, and told from each other."""
    block = b"".join(f"{name}={env[name]}\0".encode() for name in TOLD if name in env)
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[47:49])  # env_start and env_end, man 5 proc
    if len(block) <= end - start:
        for name, value in list(os.environ.items()):
            os.environ[name] = value  # a copy on the heap: until now libc's pointers led into the block
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, block, len(block))


def torchrun() -> None:
    """torchrun's own main, with ranks made by Forked."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.run import main

    def popen(self: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Forked:
        _bash, _rank_sh, script, *rest = args
        out = os.path.join(env.get("OUT") or os.path.join(os.getcwd(), "out"), f"rank{env['RANK']}")
        os.makedirs(out, exist_ok=True)  # as rank.sh does
        rest = [arg.replace("{OUT}", out) for arg in rest]
        to = self._stdout.fileno() if self._stdout else 1
        to_err = self._stderr.fileno() if self._stderr else 2
        return Forked(script, rest, {**env, "OUT": out}, to, to_err, os.getcwd())

    SubprocessHandler._popen = popen
    main()


def loopback() -> None:
    """Run jobs one after another, each as `world` ranks on 127.0.0.1: {"script", "args", "world", "limit"} in,
    {"codes", "output", "seconds"} out; a code of null: the rank was killed at the limit (seconds)."""
    import torch._dynamo  # what DDP and optimizers import when first used, 2.6 s: once, before the first fork
    import torch.distributed  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(_on_loopback(job["script"], job["args"], job["world"], job["limit"])), flush=True)


def _on_loopback(script: str, args: list[str], world: int, limit: float) -> dict[str, object]:
    started = time.monotonic()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "loopback"}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        ranks = []
        for rank in range(world):
            out = os.path.join(folder, f"rank{rank}")
            os.mkdir(out)
            log = files.enter_context(open(os.path.join(folder, f"{rank}.log"), "wb"))
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OUT": out, "GROUP_RANK": "0"}
            own |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
            given = [arg.replace("{OUT}", out) for arg in args]
            ranks.append(Forked(script, given, common | own, log.fileno(), log.fileno(), out))
        codes = [_wait(one, started + limit) for one in ranks]
        for one in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)  # and what it started
            one.wait()
        texts = []
        for rank in range(world):
            with open(os.path.join(folder, f"{rank}.log"), errors="replace") as file:
                texts.append(file.read())
    return {"codes": codes, "output": texts, "seconds": round(time.monotonic() - started, 2)}


def _wait(rank: Forked, end: float) -> int | None:
    with contextlib.suppress(TimeoutExpired):
        return rank.wait(max(0.0, end - time.monotonic()))
    return None


if __name__ == "__main__":
    loopback() if sys.argv[1:] == ["--loopback"] else torchrun()
