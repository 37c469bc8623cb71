"""A command behind a raw ssh channel, with the face of subprocess.Popen.

Not Fabric's run(): its in_stream sends a character per 10 ms, and its timeout leaves the remote command running. The
remote command sees the end of its stdin when the channel, the connection or this process goes.
"""

from __future__ import annotations

import io
import subprocess
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

from torchrack.model.errors import Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable

    from paramiko import Channel, Transport

CHUNK = 1 << 15  # bytes; what one ssh packet carries
START_S = 10.0
# What a login shell's own files print (~/.bashrc, ForceCommand) comes before this, and is not the command's output.
MARK = b"torchrack-from-here-on\n"
BEFORE = 2000  # bytes of it that are kept: a host that lets nobody in says here why
LOST, SIGNALLED = 255, -9  # as the ssh command says of a lost connection; paramiko tells not which signal it was


class RemoteProcess:
    """One exec on its own channel of a connection. `command` is text for the user's login shell.

    Raises Unreachable where the host does not start it within START_S seconds: it is gone, or it hangs.
    """

    def __init__(self, transport: Transport, command: str) -> None:
        self.args, self._transport, self.patience = command, transport, float("inf")
        self._channel: Channel = _started(transport, f"echo {MARK.decode().strip()}; {command}")
        self.stdin: IO[bytes] = io.BufferedWriter(_Sink(self._channel), CHUNK)  # type: ignore[type-var]
        self._output = _Marked(self._channel.recv)
        self.stdout: IO[bytes] = io.BufferedReader(self._output, CHUNK)
        self.stderr: IO[bytes] = io.BufferedReader(_Source(self._channel.recv_stderr), CHUNK)

    def bound(self, seconds: float) -> None:
        """From now on a read that gets nothing, or a write that nobody takes, for so long raises TimeoutError."""
        self.patience = seconds
        self._channel.settimeout(seconds)

    def poll(self) -> int | None:
        return self._code() if self._channel.status_event.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._channel.status_event.wait(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._code()

    def _code(self) -> int:
        code: int = self._channel.exit_status
        if code >= 0:
            return code
        return SIGNALLED if self._transport.is_active() else LOST

    def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
        """As Popen's: give `input`, read both streams to their ends, wait."""
        until = None if timeout is None else time.monotonic() + timeout
        seen: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        threads = [threading.Thread(target=_feed, args=(self.stdin, input or b""), daemon=True)]
        for name, file in (("stdout", self.stdout), ("stderr", self.stderr)):
            threads.append(threading.Thread(target=_drain, args=(file, seen[name]), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(None if until is None else max(0, until - time.monotonic()))
        stdout, stderr = (b"".join(seen[name]) for name in ("stdout", "stderr"))
        if any(thread.is_alive() for thread in threads):
            raise subprocess.TimeoutExpired(self.args, timeout or 0, stdout, stderr)
        self.wait(None if until is None else max(0.1, until - time.monotonic()))
        return stdout, stderr

    def kill(self) -> None:
        """Close the channel: the command's stdin ends and its output breaks. sshd offers no more than that."""
        self._channel.close()

    def end(self) -> tuple[int, str]:
        """The exit status of a command that has closed its output, and its last words or those of the host's shell.

        One that does not end is let go of.
        """
        text = self.stderr.read().decode(errors="replace")
        if not self._channel.status_event.wait(START_S):
            self.kill()
        return self._code(), text if self._output.marked else self._output.before.decode(errors="replace") + text

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        _close(self.stdin)
        if error is None:
            self.wait()
        self._channel.close()
        for file in (self.stdout, self.stderr):
            _close(file)


def _started(transport: Transport, command: str) -> Channel:
    from paramiko import SSHException

    channel = None
    try:
        channel = transport.open_session(timeout=START_S)
        bound = threading.Timer(START_S, channel.close)  # paramiko itself would wait for ever
        bound.daemon = True
        bound.start()
        channel.exec_command(command)
        bound.cancel()
    except (SSHException, EOFError, OSError) as error:
        if channel is not None:
            channel.close()
        why = f"the host starts no command any more ({str(error).strip() or type(error).__name__})"
        raise Unreachable("reachable", why, "is it up? a machine that swaps or hangs looks like this") from error
    return channel


class _Source(io.RawIOBase):
    """One of a channel's two streams from the remote command."""

    def __init__(self, receive: Callable[[int], bytes]) -> None:
        self._receive = receive

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._more(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _more(self, size: int) -> bytes:
        return self._receive(size)


class _Marked(_Source):
    """The same from the MARK on; without one there is nothing, and `before` has the end of what came instead."""

    before = rest = b""
    marked = False

    def _more(self, size: int) -> bytes:
        while not self.marked and (data := self._receive(CHUNK)):
            self.before, mark, self.rest = (self.before + data).partition(MARK)
            self.marked = bool(mark)
            self.before = self.before[-BEFORE:]
        data, self.rest = self.rest[:size], self.rest[size:]
        return data or (self._receive(size) if self.marked else b"")


class _Sink(io.RawIOBase):
    """The remote command's stdin; closing it is the end of file there."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            sent: int = self._channel.send(bytes(data[:CHUNK]))
        except EOFError as error:  # the connection went while this was on its way
            raise BrokenPipeError("the ssh connection is closed") from error
        if sent == 0:
            raise BrokenPipeError("the ssh channel is closed")
        return sent

    def close(self) -> None:
        if not self.closed:
            super().close()
            if not self._channel.closed:
                self._channel.shutdown_write()


def _feed(file: IO[bytes], data: bytes) -> None:
    try:
        file.write(data)
    except OSError:
        pass  # the command ended without reading all of it, which is its affair
    finally:
        _close(file)


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):  # what was still buffered may find nobody
        file.close()


def _drain(file: IO[bytes], chunks: list[bytes]) -> None:
    while data := file.read1(CHUNK):  # type: ignore[attr-defined]
        chunks.append(data)
