"""End all that one rack runs on this host: `stop.py HOME`. Runs there, standard library only.

Whatever torchrack starts on a host carries TORCHRACK_AT=HOME in its environment. A supervisor that is there ends its
own job, which it knows best; what is left after that is killed. Prints {"ended": [run], "left": [pid]}.
"""

import contextlib
import json
import os
import signal
import sys
import time

PATIENCE = 7.0  # seconds: the supervisor's grace, its kills, and some
STUBBORN = 3.0


def tagged(home: str) -> dict[int, dict[str, str]]:
    """Living processes of this rack with their environments."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError, IndexError):
            with open("/proc/%d/environ" % pid, "rb") as file:
                pairs = (item.decode(errors="replace").partition("=") for item in file.read().split(b"\0"))
                env = {name: value for name, _, value in pairs}
            with open("/proc/%d/stat" % pid, "rb") as file:
                zombie = file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
            if env.get("TORCHRACK_AT") == home and not zombie and pid != os.getpid():
                found[pid] = env
    return found


def supervises(pid: int) -> bool:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            return b"/supervisor.py" in file.read()
    except OSError:
        return False


def send(pids: object, number: int) -> None:
    for pid in pids:  # type: ignore[attr-defined]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def main(home: str) -> None:
    there = tagged(home)
    ended = sorted({env["TORCHRACK_RUN"] for env in there.values() if "TORCHRACK_RUN" in env})
    send([pid for pid in there if supervises(pid)] or there, signal.SIGTERM)
    began = time.monotonic()
    while there and time.monotonic() < began + PATIENCE + STUBBORN:
        if time.monotonic() > began + PATIENCE:
            send(there, signal.SIGKILL)
        elif not any(supervises(pid) for pid in there):
            send(there, signal.SIGTERM if time.monotonic() < began + 2 else signal.SIGKILL)
        time.sleep(0.05)
        there = tagged(home)
    json.dump({"ended": ended, "left": sorted(there)}, sys.stdout)


main(sys.argv[1])
