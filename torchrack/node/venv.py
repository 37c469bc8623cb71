"""Make a Python with torch on a host, in a virtual environment of the kit's own. Runs there, standard library only.

    venv.py FOLDER VERSION [pip options for torch's wheel]

FOLDER/venv-VERSION is made once, then FOLDER/python is switched to it: a link, so the one before works to the last
moment. Lines of JSON: {"step"} as it goes, {"python"} at the end or {"failed"}. The end of stdin ends it, and leaves
nothing half-made. The rest of the packages, and everything about proxies, is as the host's own pip is configured.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

BESIDE = ("numpy", "py-spy")
running: list[subprocess.Popen[str]] = []


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def run(*argv: str) -> None:
    """Raises OSError with the last words of a command that failed."""
    command = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    running.append(command)
    said = command.communicate()[0].strip().splitlines()
    running.remove(command)
    if command.returncode:
        raise OSError("\n".join(said[-3:]) or f"{argv[0]} ended with {command.returncode}")


def make(home: str, version: str, index: list[str]) -> None:
    shutil.rmtree(home, ignore_errors=True)
    say(step="making a virtual environment")
    run(sys.executable, "-m", "venv", home)
    pip = (f"{home}/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input")
    say(step=f"installing torch {version}")
    run(*pip, *index, "--no-deps", f"torch=={version}")  # alone: an index of torch's own lacks other packages
    say(step="installing what torch needs")
    run(*pip, f"torch=={version}", *BESIDE)
    open(f"{home}/complete", "w").close()


def main(folder: str, version: str, *index: str) -> None:
    home = f"{folder}/venv-{version}"
    threading.Thread(target=until_told_no_more, args=(home,), daemon=True).start()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with open(f"{folder}/python.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(failed="another deployer is making it")
            return
        try:
            if not os.path.exists(f"{home}/complete"):
                make(home, version, list(index))
            link = f"{folder}/python.new"
            if os.path.islink(link):
                os.unlink(link)
            os.symlink(os.path.basename(home), link)
            os.replace(link, f"{folder}/python")
        except OSError as error:
            if not os.path.exists(f"{home}/complete"):
                shutil.rmtree(home, ignore_errors=True)
            say(failed=str(error))
        else:
            say(python=f"{folder}/python/bin/python")


def until_told_no_more(home: str) -> None:
    """Whoever asked is gone: end pip too, then us, and take away what is not complete."""
    while os.read(0, 1 << 10):
        pass
    while not os.path.exists(f"{home}/complete"):
        for command in list(running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.pid, signal.SIGKILL)
        time.sleep(0.05)  # the main thread hears of it, takes away what is half-made, and ends


main(os.path.expanduser(sys.argv[1]), *sys.argv[2:])
