"""The supervisor, as its other end sees it: real processes on this machine, no root, no place."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrack.node import supervisor

FILE = Path(supervisor.__file__)
PYTHON = os.environ.get("SUPERVISOR_PYTHON", sys.executable)  # to try an older one, as rented hosts have
BOUND = 20.0  # seconds that any single wait of these tests may take
Event = dict[str, Any]
SLEEP = ("bash", "-c", "exec sleep 60")  # a run's id is added as one more argument, so a bare sleep would fail
TRUE = ("bash", "-c", "true")


class Run:
    """One supervisor and the events that came from it; `run` stands in the job's environment and command lines."""

    def __init__(self, folder: Path, *argv: str, go: bool = True, read: bool = True, **spec: Any) -> None:
        self.run = spec.get("run", f"run-{uuid.uuid4().hex}")
        self.folder, self.logs = folder, folder / "logs"
        self.spec = {
            "run": self.run,
            "node": f"node-{self.run}",
            "argv": [*argv, self.run],
            "cwd": str(folder / "work"),
            "env": {},
            "logs": str(self.logs),
            "nproc": 1,
            "deadline": BOUND,
            "grace": 0.3,
            "lease": 90.0,  # nothing beats here unless a test says so
            "detach": False,
            "expect": {},
            **spec,
        }
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([PYTHON, "-I", str(FILE)], stdin=pipe, stdout=pipe, stderr=pipe)
        self.events: list[Event] = []
        self.say(json.dumps(self.spec))
        self.reader = threading.Thread(target=self._read)
        if read:
            self.reader.start()
        if go:
            self.say("go")

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def say(self, line: str) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError, ValueError):  # gone; or closed by close()
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    def lines(self, source: str = "agent", stream: str = "out", attempt: int = 0) -> list[str]:
        key = (source, stream, attempt)
        return [e["text"] for e in self.of("line") if (e["source"], e["stream"], e["attempt"]) == key]

    def wait(self, what: Callable[[], Any], bound: float = BOUND) -> None:
        """Beats meanwhile, as a client does."""

        def seen() -> Any:
            self.say("beat")
            return what()

        until(seen, bound)

    def wait_for(self, kind: str) -> None:
        self.wait(lambda: self.of(kind))

    def wait_line(self, text: str) -> None:
        self.wait(lambda: any(text in event["text"] for event in self.of("line")))

    def finish(self, bound: float = BOUND) -> Event:
        """Wait for the end, and return the exited event."""
        try:
            assert self.process.wait(bound) == 0
        except subprocess.TimeoutExpired:
            pytest.fail(f"the supervisor still runs after {bound} s; seen: {self.events[-20:]}")
        self.reader.join(BOUND)
        assert self.of("done") == [{"event": "done", "left": []}]
        assert self.alive() == []
        assert not any(Path(f"/proc/{pid}").exists() for pid in self.stubborn())
        (exited,) = self.of("exited")
        return exited

    def clean(self) -> None:
        self.process.kill()
        if self.reader.is_alive():
            self.reader.join(BOUND)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError):
                if stream:
                    stream.close()
        self.process.wait()

    def stop_reading(self) -> None:
        assert self.process.stdout
        self.process.stdout.close()
        self.process.stdout = None

    def stubborn(self) -> list[int]:
        """Pids that nasty.py told, some of which alive() cannot find."""
        told = (re.fullmatch(rf"({'|'.join(WORDS)}) (\d+)", line) for line in self.lines())
        return [int(match[2]) for match in told if match]

    def alive(self) -> list[int]:
        return having(self.run)


def having(run: str) -> list[int]:
    """Pids with the run's id in the environment or the command line; zombies have neither."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if run.encode() in (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def until(what: Callable[[], Any], bound: float = BOUND) -> Any:
    end = time.monotonic() + bound
    while not (found := what()):
        assert time.monotonic() < end, f"not within {bound} s"
        time.sleep(0.02)
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs; whatever they leave behind is ended, and fails the test."""
    runs: list[Run] = []

    def start(*argv: str, **spec: Any) -> Run:
        runs.append(Run(tmp_path / str(len(runs)), *argv, **spec))
        return runs[-1]

    yield start
    for run in runs:
        run.clean()
    left = [pid for run in runs for pid in run.alive()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


# ---------------------------------------------------------------- a run, from ready to done


def test_events_come_in_order(start: Callable[..., Run]) -> None:
    run = start("bash", "-c", "echo out; echo err >&2; exit 7", go=False)
    run.wait_for("ready")
    run.say("go")
    assert run.finish() == {
        "event": "exited", "code": 7, "signal": None, "reason": "job", "detail": "",
        "seconds": run.of("exited")[0]["seconds"],
    }  # fmt: skip
    kinds = [event["event"] for event in run.events]
    assert kinds == ["ready", "started", "line", "line", "exited", "wires", "done"]
    assert run.of("ready")[0]["pid"] == run.process.pid
    assert run.lines(stream="out") == ["out"]
    assert run.lines(stream="err") == ["err"]
    assert 0 < run.of("exited")[0]["seconds"] < 5


def test_the_spec_reaches_the_job(start: Callable[..., Run]) -> None:
    weird = "a b;$(touch x)'\"\n\u20ac\udc80"
    code = "import os, sys; print(ascii([os.environ['W'], sys.argv[1], os.getcwd(), sys.stdin.read()]));"
    code += "print(os.environ['TORCHRACK_RUN'], os.environ['TORCHRACK_NODE'], sys.flags.isolated, os.getsid(0) == os.getpid())"
    run = start(*python(code), weird, env={"W": weird})
    assert run.finish()["code"] == 0
    assert run.lines() == [ascii([weird, weird, run.spec["cwd"], ""]), f"{run.run} {run.spec['node']} 0 True"]


def test_command_not_found(start: Callable[..., Run]) -> None:
    run = start("/nowhere/launch.sh")
    assert run.finish()["code"] == 127
    assert "/nowhere/launch.sh" in run.lines(stream="err")[0]
    assert not run.of("started")


def test_command_not_executable(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("text")
    assert start(str(tmp_path / "plain")).finish()["code"] == 126


def test_death_by_signal_is_told(start: Callable[..., Run]) -> None:
    exited = start("bash", "-c", "kill -SEGV $$").finish()
    assert (exited["code"], exited["signal"], exited["reason"]) == (None, signal.SIGSEGV, "job")


def test_an_inherited_sigchld_ignore_loses_no_status(tmp_path: Path) -> None:
    code = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    spec = {
        "run": f"run-{uuid.uuid4().hex}", "node": "node0", "argv": ["bash", "-c", "exit 9"], "cwd": str(tmp_path), "env": {},
        "logs": str(tmp_path / "logs"), "nproc": 1, "deadline": 9, "grace": 1, "lease": 9, "detach": True, "expect": {},
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, PYTHON, "-I", str(FILE)],
        input=json.dumps(spec) + "\ngo\n", capture_output=True, text=True, timeout=BOUND,
    )  # fmt: skip
    assert '"code": 9' in done.stdout


def test_wires_count_loopback(start: Callable[..., Run]) -> None:
    code = """
import socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
other, _ = server.accept()
for _ in range(100):
    client.sendall(bytes(20000))
    got = 0
    while got < 20000:
        got += len(other.recv(20000))
"""
    run = start(*python(code))
    assert run.finish()["code"] == 0
    rows = {row["nic"]: row for row in run.of("wires")[0]["nics"]}
    assert set(rows["lo"]) == {"nic", "tx_bytes", "rx_bytes"}
    assert rows["lo"]["tx_bytes"] >= 2_000_000
    assert rows.keys() >= set(os.listdir("/sys/class/net")) - {"bonding_masters"}  # noqa: PTH208


# ---------------------------------------------------------------- refusals


def refusal(run: Run) -> str:
    assert run.process.wait(BOUND) == 3
    run.reader.join(BOUND)
    (event,) = run.events
    assert event["event"] == "refused"
    assert run.alive() == []
    return str(event["why"])


@pytest.mark.parametrize("text", ["", "go\n", "not json\n", "5\n", '{"run": "x"}\n'])
def test_a_bad_spec_is_refused(text: str) -> None:
    done = subprocess.run([PYTHON, "-I", str(FILE)], input=text, capture_output=True, text=True, timeout=BOUND)
    assert (done.returncode, done.stderr) == (3, "")
    assert json.loads(done.stdout)["event"] == "refused"


def test_other_files_than_deployed_are_refused(start: Callable[..., Run], tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text("echo ran")
    good = hashlib.sha256(script.read_bytes()).hexdigest()
    assert start("bash", str(script), expect={str(script): good}).finish()["code"] == 0
    script.write_text("echo changed")
    assert good in (why := refusal(start("bash", str(script), expect={str(script): good}))) and str(script) in why
    script.unlink()
    assert str(script) in refusal(start("bash", str(script), expect={str(script): good}))


def test_a_node_with_another_run_is_refused(start: Callable[..., Run]) -> None:
    first = start(*SLEEP, node="node-busy-test")
    first.wait(lambda: first.of("started"))
    why = refusal(start(*TRUE, node="node-busy-test"))
    assert first.run in why
    assert str(first.of("started")[0]["pid"]) in why
    first.say("end")
    first.finish()


def test_a_run_whose_client_was_just_killed_is_given_time_to_end(start: Callable[..., Run]) -> None:
    """It ignores SIGTERM, so its own supervisor needs all of the grace."""
    first = start(*python("import signal, time; signal.signal(15, signal.SIG_IGN); print(1); time.sleep(60)"), node="n")
    first.wait(first.lines)
    first.process.stdin.close()
    assert start(*TRUE, node="n").finish()["code"] == 0


def test_a_folder_that_cannot_be_made_is_refused(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in refusal(start(*TRUE, cwd=str(tmp_path / "file" / "work")))


# ---------------------------------------------------------------- endings

NASTY = """
import ctypes, os, signal, subprocess, sys, threading, time

def ignoring():
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)

def headless():
    threading.Thread(target=time.sleep, args=(600,)).start()
    ctypes.CDLL(None).pthread_exit(None)  # what is left is shown as a zombie

def start(name, **how):
    return subprocess.Popen([sys.executable, __file__, name, sys.argv[-1]], start_new_session=True, **how)

if sys.argv[1] == "job":
    ignoring_, stopped_, headless_ = map(start, ("ignoring", "stopped", "headless"))  # sessions, as torchrun's ranks
    subprocess.run([sys.executable, __file__, "between", sys.argv[-1]])
    exec(os.environ.get("THEN", "time.sleep(600)"))
elif sys.argv[1] == "between":
    start("escaped", env={name: os.environ[name] for name in os.environ.get("KEEP", "").split()})
else:
    os.write(1, f"{sys.argv[1]} {os.getpid()}".encode() + bytes([10]))
    {"ignoring": ignoring, "escaped": ignoring, "stopped": stopped, "headless": headless}[sys.argv[1]]()
    time.sleep(600)
"""
WORDS = ("ignoring", "stopped", "headless", "escaped")


def nasty(start: Callable[..., Run], tmp_path: Path, *, then: str = "time.sleep(600)", **spec: Any) -> Run:
    """A job whose five processes do all they can to stay."""
    (tmp_path / "nasty.py").write_text(NASTY)
    env = {"THEN": then, **spec.pop("env", {})}
    run = start(sys.executable, str(tmp_path / "nasty.py"), "job", env=env, **spec)
    if spec.get("read", True):
        run.wait(lambda: len(run.stubborn()) == len(WORDS))
    return run


def by_eof(run: Run) -> None:
    run.close()


def by_end(run: Run) -> None:
    run.say("end because I say so")


def by_signal(run: Run) -> None:
    run.process.send_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("trigger", "reason", "detail"),
    [
        (by_eof, "lease", "stdin was closed"),
        (by_end, "end", "because I say so"),
        (by_signal, "signal", "SIGINT"),
    ],
)
def test_everything_is_gone_after(
    start: Callable[..., Run], tmp_path: Path, trigger: Callable[[Run], None], reason: str, detail: str
) -> None:
    run = nasty(start, tmp_path, grace=2.0)
    begun = time.monotonic()
    trigger(run)
    exited = run.finish(5.0)
    assert time.monotonic() - begun < 5.0
    assert (exited["reason"], exited["detail"]) == (reason, detail)
    assert exited["signal"] == signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_job(start: Callable[..., Run], number: signal.Signals) -> None:
    run = start(*SLEEP)
    run.wait_for("started")
    run.process.send_signal(number)
    exited = run.finish(3.0)
    assert (exited["reason"], exited["detail"], exited["signal"]) == ("signal", number.name, signal.SIGTERM)


def test_a_gentle_job_may_say_goodbye(start: Callable[..., Run]) -> None:
    run = start("bash", "-c", "trap 'echo bye; exit 4' TERM; echo up; while :; do sleep 0.05; done", grace=BOUND)
    run.wait_line("up")
    run.say("end")
    exited = run.finish(3.0)
    assert (exited["code"], run.lines()) == (4, ["up", "bye"])


def test_the_deadline_ends_the_job(start: Callable[..., Run], tmp_path: Path) -> None:
    begun = time.monotonic()
    exited = nasty(start, tmp_path, deadline=4.0).finish(4.0 + 5)
    assert (exited["reason"], exited["code"]) == ("deadline", None)
    assert 4.0 <= exited["seconds"] < 5.0
    assert time.monotonic() - begun < 4.0 + 5


def test_silence_ends_the_job_and_beats_prevent_it(start: Callable[..., Run], tmp_path: Path) -> None:
    run = nasty(start, tmp_path, lease=2.0)
    begun = time.monotonic()
    run.wait(lambda: time.monotonic() > begun + 3.0)
    assert not run.of("exited")
    exited = run.finish(2.0 + 5)
    assert (exited["reason"], exited["detail"]) == ("lease", "nothing was heard for 2 s")


def test_a_reader_that_is_gone_ends_the_job(start: Callable[..., Run], tmp_path: Path) -> None:
    run = nasty(start, tmp_path, then="while True: print('tick', flush=True); time.sleep(0.05)", read=False)
    until(lambda: len(run.alive()) > len(WORDS))
    run.stop_reading()
    run.process.wait(5.0)
    assert run.alive() == []


def test_what_the_job_leaves_behind_ends_with_it(start: Callable[..., Run], tmp_path: Path) -> None:
    run = nasty(start, tmp_path, then="time.sleep(0.7); sys.exit(5)")
    exited = run.finish(5.0)
    assert (exited["code"], exited["reason"]) == (5, "job")


def test_an_end_before_go(start: Callable[..., Run]) -> None:
    for trigger, reason in ((by_eof, "lease"), (by_end, "end"), (by_signal, "signal")):
        run = start(*TRUE, go=False, detach=True)
        run.wait_for("ready")
        trigger(run)
        exited = run.finish(3.0)
        assert (exited["reason"], exited["code"], exited["seconds"]) == (reason, None, 0)
        assert not run.of("started")


def test_a_detached_job_outlives_its_client(start: Callable[..., Run]) -> None:
    run = start("bash", "-c", "sleep 1; echo still here", detach=True, lease=0.3)
    run.wait_for("started")
    run.close()
    assert run.finish()["reason"] == "job"
    assert run.lines() == ["still here"]


def test_a_detached_job_outlives_its_reader(start: Callable[..., Run], tmp_path: Path) -> None:
    code = "import time; [print(n) or time.sleep(0.1) for n in range(10)]; open('finished', 'w')"
    run = start(*python(code), detach=True, read=False)
    until(run.alive)
    run.close()
    run.stop_reading()
    assert run.process.wait(BOUND) == 0
    assert (Path(run.spec["cwd"]) / "finished").exists()


def reap(run: Run) -> Event:
    argv = [PYTHON, "-I", str(FILE), "--reap", run.run, run.spec["node"]]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_reap_ends_what_a_killed_supervisor_left(start: Callable[..., Run], tmp_path: Path) -> None:
    run = nasty(start, tmp_path, env={"KEEP": "TORCHRACK_RUN TORCHRACK_NODE"})  # an adopted process has but its tag
    run.process.kill()
    run.process.wait()
    assert all(Path(f"/proc/{pid}").exists() for pid in run.stubborn())
    begun = time.monotonic()
    assert reap(run) == {"event": "done", "left": []}
    assert time.monotonic() - begun < 5
    assert run.alive() == []
    # Nobody adopts for us here, so what hides its environment (an exited main thread, or a cleared one) is out of reach:
    # taking the node down ends those.
    (headless,) = (int(line.split()[1]) for line in run.lines() if line.startswith("headless"))
    os.kill(headless, signal.SIGKILL)
    assert reap(run) == {"event": "done", "left": []}


def test_one_node_ends_and_the_other_stays(start: Callable[..., Run]) -> None:
    name = f"run-{uuid.uuid4().hex}"
    one = start(*SLEEP, run=name, node=f"{name}-0")
    two = start(*SLEEP, run=name, node=f"{name}-1")
    for run in (one, two):
        run.wait_for("started")
    one.say("end")
    one.process.wait(5.0)
    assert one.alive() == [two.of("started")[0]["pid"]]
    assert reap(one) == {"event": "done", "left": []}
    assert one.alive() == [two.of("started")[0]["pid"]]
    two.say("end")
    two.finish()


def test_orphans_are_reaped_while_the_job_runs(start: Callable[..., Run]) -> None:
    run = start("bash", "-c", "for i in $(seq 20); do (sleep 0.01 &) ; done; echo up; sleep 60")
    run.wait_line("up")
    children = Path(f"/proc/{run.process.pid}/task")

    def zombies() -> list[str]:
        stats = [p.read_text() for p in Path("/proc").glob("[0-9]*/stat") if p.exists()]
        return [s for s in stats if s.rpartition(")")[2].split()[:2] == ["Z", str(run.process.pid)]]

    assert children.exists()
    until(lambda: not zombies(), 3.0)
    run.say("end")
    run.finish()


# ---------------------------------------------------------------- output


def expected(data: bytes) -> list[str]:
    """The contract, in the plainest words: split at newlines, a \\r before one belongs to it, cut what is too long."""
    *lines, rest = data.split(b"\n")
    whole = [line[:-1] if line.endswith(b"\r") else line for line in lines] + ([rest] if rest else [])
    texts = []
    for line in whole:
        while len(line) > 65536:
            end = 65536
            while 65536 - end < 3 and line[end] & 0xC0 == 0x80:
                end -= 1
            end = end if line[end] & 0xC0 != 0x80 else 65536
            texts.append(line[:end])
            line = line[end:]
        texts.append(line)
    return [text.decode("utf-8", "backslashreplace") for text in texts]


PARTS = st.one_of(
    st.text().map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.binary(max_size=50),
    st.sampled_from([b"\n", b"\r\n", b"\r", b"\r\r\n", b"\xe2\x82", "\u20ac".encode(), b"50%\r100%\r\n", b"\0"]),
    st.builds(
        lambda unit, size, end: (unit * 70000)[:size] + end,
        st.sampled_from([b"x", "\u20ac".encode(), "\U0001f600".encode(), b"\x80", b"\xff"]),
        st.integers(65530, 65545) | st.integers(131068, 131080),
        st.sampled_from([b"", b"\n", b"\r\n", b"\r"]),
    ),
)
DATA = st.lists(PARTS, max_size=8).map(b"".join)


@settings(max_examples=60, deadline=None)
@given(DATA, st.lists(st.integers(0, 70000), max_size=6))
def test_lines_survive_however_they_arrive(data: bytes, cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stdout.log"
        path.write_bytes(b"")
        source = supervisor.Source(path.open("rb", buffering=0), "0", "out")
        lines: list[bytes] = []
        bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        for begin, end in itertools.pairwise(bounds):
            with path.open("ab") as file:
                file.write(data[begin:end])
            while (more := source.read()) is not None:
                lines += more
        source.final = True
        while not source.file.closed:
            lines += source.read() or []
    assert [line.decode("utf-8", "backslashreplace") for line in lines] == expected(data)


@settings(max_examples=6, deadline=None)
@given(DATA, DATA)
def test_output_of_agent_and_rank_arrives_unchanged(printed: bytes, logged: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "printed").write_bytes(printed)
        (Path(folder) / "logged").write_bytes(logged)
        script = (
            "cat ../printed; mkdir -p ../logs/id_x/attempt_0/3; cat ../logged > ../logs/id_x/attempt_0/3/stderr.log"
        )
        run = Run(Path(folder), "bash", "-c", script)
        try:
            assert run.finish()["code"] == 0
            assert run.lines() == expected(printed)
            assert run.lines("3", "err") == expected(logged)
        finally:
            run.clean()


def test_output_is_live(start: Callable[..., Run]) -> None:
    script = (
        "d=../logs/id_x/attempt_0/0; mkdir -p $d; echo one > $d/stdout.log; printf half; read -t 600 < <(sleep 600)"
    )
    run = start("bash", "-c", script)
    run.wait(lambda: run.lines("0") == ["one"], 2.0)
    assert run.lines() == []  # not before its newline
    run.say("end")
    run.finish()
    assert run.lines() == ["half"]


def test_a_folder_made_anew_is_followed_anew(start: Callable[..., Run]) -> None:
    script = """
d=../logs/id_x/attempt_0/0
for text in one two; do
    rm -rf ../logs/id_x/attempt_0; mkdir -p $d; echo $text > $d/stdout.log; sleep 0.6
done
for n in 1 2 3; do mkdir -p ../logs/id_x/attempt_$n/0; echo again$n > ../logs/id_x/attempt_$n/0/stdout.log; sleep 0.3; done
"""
    run = start("bash", "-c", script)
    run.finish()
    assert run.lines("0") == ["one", "two"]
    assert [run.lines("0", attempt=n) for n in (1, 2, 3)] == [["again1"], ["again2"], ["again3"]]


LOUD = "for n in range({count}): sys.stdout.write(f'{{n:07}} ' + 'x' * 90 + '\\n')"


def peak(pid: int) -> int:
    """Bytes of memory that a process has used at most."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def test_a_flood_is_bounded_by_its_reader(start: Callable[..., Run]) -> None:
    """A reader that stops keeps neither the deadline from ending the job, nor a line from arriving later."""
    count = 80_000
    code = f"""
import os, sys
os.makedirs("../logs/id_x/attempt_0/0")
sys.stdout = open("../logs/id_x/attempt_0/0/stdout.log", "w", buffering=1000)
{LOUD.format(count=count)}
sys.stdout = sys.__stdout__
{LOUD.format(count=count)}
"""
    run = start(*python(code), deadline=2.5, read=False)
    pid = run.process.pid
    until(run.alive, 10)
    until(lambda: not run.alive() and run.process.poll() is None and time.monotonic(), 2.5 + 10)
    assert peak(pid) < 64 << 20
    run.reader.start()
    exited = run.finish(60)
    assert exited["reason"] == "deadline"
    for lines in (run.lines("0")[:-1], run.lines()[:-1]):  # the last one may have been cut by the kill
        assert [int(line.split()[0]) for line in lines] == list(range(len(lines)))
    assert len(run.lines("0")) * 100 > 2 * supervisor.QUEUE


def test_a_client_that_vanished_while_blocked_does_not_hold_the_supervisor(start: Callable[..., Run]) -> None:
    run = start(*python("import sys\n" + LOUD.format(count=100_000)), lease=0.5, read=False)
    assert run.process.wait(0.5 + 0.3 + 5) == 0
    assert run.alive() == []
    run.reader.start()


# ---------------------------------------------------------------- ranks


RANK = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[-1]]); time.sleep(600)"


def test_a_rank_is_told_once_and_not_its_children(start: Callable[..., Run]) -> None:
    code = f"""
import os, subprocess, sys, time
for rank in (0, 1):
    env = dict(os.environ, RANK=str(rank + 2), LOCAL_RANK=str(rank), WORLD_SIZE="4", TORCHELASTIC_RESTART_COUNT="1")
    child = subprocess.Popen([sys.executable, "-c", {RANK!r}, sys.argv[-1]], env=env, start_new_session=True)
    print(child.pid)
time.sleep(600)
"""
    run = start(*python(code), nproc=2)
    run.wait(lambda: len(run.of("rank")) == 2)
    found = {event["pid"]: event for event in run.of("rank")}
    for local_rank, pid in enumerate(map(int, run.lines())):
        assert found[pid] == {
            "event": "rank", "local_rank": local_rank, "rank": local_rank + 2, "world": 4, "attempt": 1, "pid": pid,
        }  # fmt: skip
    until(lambda: len(run.alive()) == 5)
    run.say("end")
    run.finish()
    assert len(run.of("rank")) == 2


TORCHRUN = Path(sys.executable).parent / "torchrun"
needs_torchrun = pytest.mark.skipif(not TORCHRUN.exists(), reason="torchrun is not installed beside this Python")


def torchrun(start: Callable[..., Run], tmp_path: Path, script: str, *flags: str) -> Run:
    (tmp_path / "script.py").write_text(script)
    logs = tmp_path / "0" / "logs"
    argv = [str(TORCHRUN), "--standalone", "--nproc-per-node=2", f"--log-dir={logs}", "--redirects=3", *flags]
    env = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return start(*argv, str(tmp_path / "script.py"), nproc=2, deadline=60.0, env=env)


@pytest.mark.slow
@needs_torchrun
def test_torchrun(start: Callable[..., Run], tmp_path: Path) -> None:
    script = """
import os, sys, time
print("hello", os.environ["RANK"])
print("oops", os.environ["RANK"], file=sys.stderr)
time.sleep(1)
"""
    run = torchrun(start, tmp_path, script)
    assert run.finish(60)["code"] == 0
    assert sorted((e["local_rank"], e["rank"], e["world"], e["attempt"]) for e in run.of("rank")) == [
        (0, 0, 2, 0),
        (1, 1, 2, 0),
    ]
    for rank in ("0", "1"):
        assert run.lines(rank) == [f"hello {rank}"]
        assert run.lines(rank, "err") == [f"oops {rank}"]
    kinds = [event["event"] for event in run.events]
    assert kinds.index("rank") < next(n for n, event in enumerate(run.events) if event.get("source") in ("0", "1"))


@pytest.mark.slow
@needs_torchrun
def test_torchrun_with_a_failing_rank(start: Callable[..., Run], tmp_path: Path) -> None:
    script = """
import os, sys, time
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    sys.exit("rank 1 fails")
time.sleep(600)
"""
    run = torchrun(start, tmp_path, script, "--max-restarts=1")
    assert run.finish(60)["code"] == 1
    assert sorted((e["attempt"], e["local_rank"]) for e in run.of("rank")) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({event["pid"] for event in run.of("rank")}) == 4
    for attempt in (0, 1):
        assert run.lines("1", "out", attempt) == [f"attempt {attempt}"]
        assert run.lines("1", "err", attempt) == ["rank 1 fails"]
    assert any("ChildFailedError" in line for line in run.lines(stream="err"))


@pytest.mark.slow
@needs_torchrun
def test_torchrun_with_ranks_that_ignore_sigterm_is_ended(start: Callable[..., Run], tmp_path: Path) -> None:
    run = torchrun(
        start, tmp_path, "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up')\ntime.sleep(600)"
    )
    run.wait(lambda: run.lines("0") == run.lines("1") == ["up"], 60)
    run.say("end")
    assert run.finish(5.0)["reason"] == "end"


# ---------------------------------------------------------------- what it is


def test_it_is_one_small_file_that_runs_alone_on_python_3_9() -> None:
    text = FILE.read_text()
    tree = ast.parse(text, feature_version=(3, 9))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= set(sys.stdlib_module_names) | {"__future__"}
    assert len(text.splitlines()) <= 400
