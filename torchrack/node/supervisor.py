"""Own one job on this node: start it, stream it, end it. One file, standard library only, Python 3.9 or later.

    python3 -I supervisor.py                     spec, then control lines on stdin; events on stdout, JSON, one a line
    python3 -I supervisor.py --reap RUN NODE     end what a supervisor that was itself killed has left behind

Why it must exist (measured): torchrun starts every rank in a session of its own, so killing the agent's process group
left 4 of 4 ranks alive; killing the client (nsenter, docker exec, ssh) leaves everything inside alive; SIGTERM to an
agent whose rank ignores it takes 31 s. So a job is ended from beside it, and by what it cannot shed: the tag in its
first environment, and descent from this process, which adopts every orphan (it is a subreaper).

One loop that never blocks keeps deadline and lease, also while nobody reads the events. Output is read only while the
queue of events has room: the job is slowed down (agent) or waits in its log (ranks), and nothing is dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import json
import os
import select
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from subprocess import DEVNULL, PIPE, Popen
from typing import IO, NamedTuple

TICK = 0.05  # seconds between reads of the ranks' logs; the longest that a passed deadline or lease goes unnoticed
BIRTH, LIFE = 0.1, 0.5  # seconds between looks for logs and ranks: while an attempt's ranks are awaited; afterwards
GRACE = 2.0  # seconds from SIGTERM to SIGKILL under --reap (DESIGN.md); a run's spec brings its own
STUBBORN = 3.0  # seconds of SIGKILL after which what is still there (a process in state D) is reported instead
SPEC_WAIT = 20.0  # seconds for the spec to arrive
CHUNK = 1 << 14  # bytes of one read: bounds what is added to a queue that still had room
QUEUE = 1 << 20  # bytes of unread events from which on no more output is read
PIECE = 1 << 16  # bytes of text in one event; a longer line is cut
RUN, NODE = "TORCHRACK_RUN", "TORCHRACK_NODE"  # the tag; the node counts: a netns rack's nodes share a PID namespace


class Spec(NamedTuple):
    run: str
    node: str
    argv: list[str]
    cwd: str
    env: dict[str, str]
    logs: str
    nproc: int
    deadline: float
    grace: float
    lease: float
    detach: bool
    expect: dict[str, str]

    def prepare(self) -> None:
        """Make the folders; refuse (ValueError) files other than those deployed, and a node with another run's rest."""
        for folder in (self.cwd, self.logs):
            os.makedirs(folder, exist_ok=True)
        for path, deployed in self.expect.items():
            with open(path, "rb") as file:
                found = hashlib.sha256(file.read()).hexdigest()
            if found != deployed:
                raise ValueError(f"{path}: its sha256 is {found}, but {deployed} was deployed")
        until, net = time.monotonic() + self.grace + STUBBORN, "/proc/{}/ns/net".format  # one just orphaned is ending
        here = os.readlink(net("self"))  # in another network namespace it is another rack's node of that name
        while left := [p for p, *_ in job_processes({NODE: self.node}) if os.path.realpath(net(p)).endswith(here)]:
            if time.monotonic() > until:
                run = environment(left[0]).get(RUN)
                raise ValueError(f"run {run} is still alive on {self.node}: pids {', '.join(map(str, left))}")
            time.sleep(TICK)


class Process(NamedTuple):
    pid: int
    parent: int
    start: int  # clock ticks since boot: with another start, the pid is another's by now


def slurp(path: str) -> bytes:
    """A file of /proc; b"" if the process is gone, or another user's."""
    with contextlib.suppress(OSError), open(path, "rb", 0) as file:
        return file.read()
    return b""


def process(pid: int) -> Process:
    """Start 0: it is gone. A "zombie" with threads isn't: it has lost its main thread, and only SIGKILL ends it."""
    fields = slurp(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    gone = not fields or (fields[0] in (b"Z", b"X") and int(fields[17]) < 2)
    return Process(pid, 0, 0) if gone else Process(pid, int(fields[1]), int(fields[19]))


def environment(pid: int) -> dict[str, str]:
    pairs = (os.fsdecode(item).partition("=") for item in slurp(f"/proc/{pid}/environ").split(b"\0"))
    return {name: value for name, _, value in pairs}


def pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}


def descendants(root: int, table: dict[int, Process]) -> list[int]:
    """Nearest first. Each list of children is used once: pids reused during the scan may have made a circle."""
    children = defaultdict(list)
    for found in table.values():
        children[found.parent].append(found.pid)
    line = [root]
    for pid in line:  # grows as it is walked
        line += children.pop(pid, [])
    return line[1:]


def job_processes(tag: dict[str, str]) -> list[Process]:
    """Every living process that descends from us or carries the tag."""
    table = {pid: process(pid) for pid in pids()}
    mine = table.keys() & descendants(os.getpid(), table)  # not by environ: to read that of a stuck one can block
    mine |= {pid for pid in table.keys() - mine if tag.items() <= environment(pid).items()}
    return [table[pid] for pid in sorted(mine)]


def reap(agent: Popen[bytes] | None) -> bool:
    """Reap every child that has died; False when none is left: the kernel's word, where a scan may miss a hasty one."""
    with contextlib.suppress(ChildProcessError):
        while died := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            agent.poll() if agent and agent.pid == died.si_pid else os.waitpid(died.si_pid, 0)
        return True
    return False


def end(tag: dict[str, str], grace: float, wait: Callable[[], None], agent: Popen[bytes] | None = None) -> list[int]:
    """SIGTERM, after `grace` seconds SIGKILL, until none is left or STUBBORN more have passed; returns who is left."""
    kill_at = time.monotonic() + grace
    while ((found := job_processes(tag)) or reap(agent)) and time.monotonic() < kill_at + STUBBORN:
        for one in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or by now another user's
                if process(one.pid).start == one.start:
                    os.kill(one.pid, signal.SIGTERM if time.monotonic() < kill_at else signal.SIGKILL)
        wait()
        while time.monotonic() < kill_at and any(process(one.pid).start == one.start for one in found):
            wait()  # nobody is asked twice, and no scan takes CPU time from their farewell
    return [one.pid for one in found]


def counters() -> dict[str, dict[str, int]]:
    rows = [line.partition(":") for line in slurp("/proc/self/net/dev").decode().splitlines()[2:]]
    return {nic.strip(): {"tx_bytes": int(row.split()[8]), "rx_bytes": int(row.split()[0])} for nic, _, row in rows}


class Client:
    """Whoever asked for the run: lines come on stdin, events go to stdout; its silence or end tells that it is gone."""

    def __init__(self) -> None:
        self.lines, self.events = deque[bytes](), deque[bytes]()
        self.rest, self.eof, self.heard = b"", False, time.monotonic()
        self.size, self.broken, self.moved = 0, False, self.heard  # bytes of events; stdout closed; last write

    def read(self) -> None:
        data = b""
        with contextlib.suppress(OSError):  # a socket with sshd at its other end is reset when events were unread
            data = os.read(0, 1 << 16)
        *lines, self.rest = (self.rest + data).split(b"\n")
        self.lines += lines
        self.eof, self.heard = not data, time.monotonic() if lines else self.heard

    def first(self) -> bytes:
        while not (self.lines or self.eof) and select.select([0], [], [], SPEC_WAIT)[0]:
            self.read()
        if not self.lines:
            raise ValueError("no spec came on stdin")
        return self.lines.popleft()

    def put(self, event: str, **fields: object) -> None:
        self.put_json(json.dumps({"event": event, **fields}))

    def put_json(self, event: str) -> None:
        if not self.broken:
            self.events.append(event.encode() + b"\n")
            self.size += len(self.events[-1])
            self.flush()

    def flush(self) -> None:
        """One write a line; only a line longer than PIPE_BUF (4096 bytes) may take more, when the reader is slow."""
        try:
            while self.events:
                written = os.write(1, self.events[0])
                self.size, self.moved = self.size - written, time.monotonic()
                if rest := self.events.popleft()[written:]:
                    self.events.appendleft(rest)
        except BlockingIOError:
            return
        except OSError:
            self.broken, self.size = True, 0
            self.events.clear()


def pieces(line: bytes, keep: int = PIECE) -> Iterator[bytes]:
    """Cut a line at PIECE bytes, never inside a UTF-8 character, until at most `keep` bytes remain; those come last."""
    while len(line) > keep:
        end = next((end for end in range(PIECE, PIECE - 4, -1) if line[end] & 0xC0 != 0x80), PIECE)
        yield line[:end]
        line = line[end:]
    yield line


class Source:
    """One stream of output: bytes in, whole lines out."""

    def __init__(self, file: IO[bytes], source: str, stream: str, attempt: int = 0) -> None:
        self.file, self.pipe, self.attempt, self.rest = file, source == "agent", attempt, b""
        # An event but for its text: of 14 us a line, half went into encoding the same words again.
        self.head = json.dumps({"event": "line", "source": source, "stream": stream, "attempt": attempt})[:-1]
        self.final = False  # nobody writes any more: what is not there now will not come

    def read(self) -> list[bytes] | None:
        """The lines of the next chunk; None: nothing there now."""
        data = self.file.read(CHUNK)  # None: an empty pipe
        if data or not (self.final or (self.pipe and data == b"")):
            return self.split(data) if data else None
        self.file.close()
        return [*pieces(self.rest)] if self.rest else []

    def split(self, data: bytes) -> list[bytes]:
        *lines, rest = (self.rest + data).split(b"\n")
        whole = [piece for line in lines for piece in pieces(line[:-1] if line.endswith(b"\r") else line)]
        *cut, self.rest = pieces(rest, PIECE + 1)  # one byte more is kept: it may be the \r of \r\n
        return whole + cut


class Supervisor:
    def __init__(self, spec: Spec, client: Client) -> None:
        self.spec, self.client, self.tag = spec, client, {RUN: spec.run, NODE: spec.node}
        os.set_blocking(1, False)
        self.woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)  # signals end the wait in turn(), and are read there
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # SIGCHLD: an inherited SIG_IGN would lose exit statuses
        self.agent: Popen[bytes] | None = None
        self.before, self.started, self.next_look = counters(), 0.0, 0.0
        self.outcome: dict[str, object] = {"code": None, "signal": None}  # it has a "reason" once the end has come
        self.sources, self.busy = deque[Source](), False  # busy: a source may have more at once
        self.followed: set[tuple[str, int]] = set()  # (path, inode) of logs; either alone may come back
        self.ranks: set[tuple[int, int]] = set()  # (attempt, local rank) that were seen
        self.strangers: set[int] = set()  # pids that do not descend from the agent and so never will

    def run(self) -> None:
        self.client.put("ready", pid=os.getpid())
        while "reason" not in self.outcome:
            self.turn()
        left = end(self.tag, self.spec.grace, self.turn, self.agent)
        was, now = self.before, counters()
        nics = [{"nic": nic, **{k: n - was.get(nic, {}).get(k, 0) for k, n in row.items()}} for nic, row in now.items()]
        self.find_logs()
        for source in self.sources:
            source.final = True
        self.drain(lambda: self.sources and not self.client.broken)
        self.client.put("exited", **self.outcome)
        self.client.put("wires", nics=nics)
        self.client.put("done", left=left)
        self.drain(lambda: self.client.events)

    def drain(self, pending: Callable[[], object]) -> None:
        """Wait for a slow client as long as it is heard of, or takes something: the job is over, so nothing presses."""
        since, client = time.monotonic(), self.client
        while pending() and time.monotonic() < max(since, client.heard, client.moved) + self.spec.lease:
            self.turn()

    def turn(self) -> None:
        """Wait for something to do, at most TICK, and do it."""
        reads = [self.woken] if self.client.eof else [self.woken, 0]
        reads += [source.file.fileno() for source in self.sources if source.pipe and self.client.size < QUEUE]
        ready = select.select(reads, [1] if self.client.events else [], [], 0 if self.busy else TICK)[0]
        if 0 in ready:
            self.client.read()
        self.obey(os.read(self.woken, 1 << 16) if self.woken in ready else b"")
        self.client.flush()
        self.busy = self.pump()
        reap(self.agent)
        if self.agent and (code := self.agent.returncode) is not None:
            self.outcome.update({"code": code} if code >= 0 else {"signal": -code})
            self.end("job")
        if self.agent and "reason" not in self.outcome and time.monotonic() > self.next_look:
            self.find_logs()
            self.find_ranks(self.agent.pid)

    def obey(self, signals: bytes) -> None:
        """What ends a job from outside: a signal, a line, time, silence."""
        for number in set(signals) - {signal.SIGCHLD}:
            self.end("signal", signal.Signals(number).name)
        while self.client.lines:
            word, _, rest = self.client.lines.popleft().decode("utf-8", "replace").strip().partition(" ")
            if word == "end":
                self.end("end", rest)
            elif word == "go" and not self.started and "reason" not in self.outcome:
                self.start()
        now, spec = time.monotonic(), self.spec
        if self.started and now > self.started + spec.deadline:
            self.end("deadline", f"{spec.deadline:g} s")
        lost = "stdin was closed" if self.client.eof else "nobody reads the events" if self.client.broken else ""
        lost = lost or (f"nothing was heard for {spec.lease:g} s" if now > self.client.heard + spec.lease else "")
        if lost and not (spec.detach and self.started):  # before "go", even if detached: nobody else could ever say it
            self.end("lease", lost)

    def end(self, reason: str, detail: str = "") -> None:
        if "reason" not in self.outcome:
            seconds = round(time.monotonic() - self.started, 3) if self.started else 0.0
            self.outcome.update(reason=reason, detail=detail, seconds=seconds)

    def start(self) -> None:
        spec, env = self.spec, {**os.environ, **self.spec.env, **self.tag}
        self.before, self.started = counters(), time.monotonic()
        try:
            self.agent = Popen(
                spec.argv, 0, cwd=spec.cwd, env=env, start_new_session=True, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
            )
        except (OSError, ValueError) as error:  # codes as a shell gives them: 127 not found, 126 cannot be executed
            self.outcome["code"] = 127 if isinstance(error, FileNotFoundError) else 126
            self.client.put("line", source="agent", stream="err", attempt=0, text=f"{spec.argv[0]}: {error}")
            self.end("job")
        else:
            self.client.put("started", pid=self.agent.pid)
            for file, stream in ((self.agent.stdout, "out"), (self.agent.stderr, "err")):
                if file:
                    os.set_blocking(file.fileno(), False)
                    self.sources.append(Source(file, "agent", stream))

    def pump(self) -> bool:
        """Read a chunk of each source in turn while the reader keeps up; True when there may be more at once."""
        more = False
        for _ in range(len(self.sources)):
            if self.client.size >= QUEUE:
                return False
            source = self.sources.popleft()
            lines = source.read()
            for line in lines or ():
                text = json.dumps(line.decode("utf-8", "backslashreplace"))
                self.client.put_json(f'{source.head}, "text": {text}}}')
            more = more or lines is not None
            if not source.file.closed:
                self.sources.append(source)
        return more

    def find_logs(self) -> None:
        """Follow new logs, as torchrun 2.13 lays them out; known by inode, as an attempt's folder may be made anew."""
        for path in sorted(glob.glob(glob.escape(self.spec.logs) + "/*/attempt_*/*/std*.log")):
            *_, attempt, local_rank, name = path.split("/")
            with contextlib.suppress(OSError, ValueError):  # just removed, or too many are open, or not torchrun's
                if (key := (path, os.stat(path).st_ino)) in self.followed:
                    continue
                source = Source(open(path, "rb", 0), local_rank, name[3:-4], int(attempt[8:]))  # noqa: SIM115
                self.followed.add(key)
                for older in self.sources:  # closed at their end from now on, or descriptors would run out
                    older.final = older.final or (not older.pipe and older.attempt < source.attempt)
                self.sources.append(source)

    def find_ranks(self, agent: int) -> None:
        """Tell new ranks: the topmost with LOCAL_RANK, as what they start (DataLoader workers) inherits it."""
        now = pids()  # only new ones are read: a scan of 140 processes takes 6 ms, and 32 nodes may share a machine
        table = {pid: process(pid) for pid in now - self.strangers}
        family = [pid for pid in (agent, *descendants(agent, table)) if pid in table]
        self.strangers = now - set(family)
        below: set[int] = set()  # ranks, and what they have started
        for pid in family:
            env = {} if table[pid].parent in below else environment(pid)
            if table[pid].parent in below or "LOCAL_RANK" in env:
                below.add(pid)
            with contextlib.suppress(KeyError, ValueError):  # a job may set what it likes
                attempt, local_rank = int(env.get("TORCHELASTIC_RESTART_COUNT", 0)), int(env["LOCAL_RANK"])
                about = {"rank": int(env["RANK"]), "world": int(env["WORLD_SIZE"]), "attempt": attempt, "pid": pid}
                if (attempt, local_rank) not in self.ranks and self.tag.items() <= env.items():
                    self.ranks.add((attempt, local_rank))
                    self.client.put("rank", local_rank=local_rank, **about)
        awaited = not self.ranks or len(self.ranks) % max(1, self.spec.nproc)
        self.next_look = time.monotonic() + (BIRTH if awaited else LIFE)


def main(args: list[str]) -> int:
    client = Client()
    if args[:1] == ["--reap"]:
        client.put("done", left=end({RUN: args[1], NODE: args[2]}, GRACE, lambda: time.sleep(TICK)))
        return 0
    try:
        spec = Spec(**json.loads(client.first()))
        spec.prepare()
        if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0):  # PR_SET_CHILD_SUBREAPER
            raise OSError("this kernel lets orphans escape (it has no child subreaper)")
    except (ValueError, TypeError, OSError) as error:
        client.put("refused", why=str(error))
        return 3
    try:
        Supervisor(spec, client).run()
    except BaseException:  # whatever broke here, the job must not stay without an owner
        end({RUN: spec.run, NODE: spec.node}, GRACE, lambda: time.sleep(TICK))
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
