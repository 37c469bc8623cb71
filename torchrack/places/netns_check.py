"""Can this machine hold a rack of namespaces? One trial (about 20 ms) tells; where it fails, what to change."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from torchrack.model.errors import Lacking, NotInstalled, NotPermitted

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # ordinary users' own often lacks sbin
PACKAGES = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setsid": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
    "env": "coreutils",
    "timeout": "coreutils",
}
UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child")
JOB_USER = ("unshare", "--user", "--map-user=1000", "--map-group=1000", "--")

# What a rack does, in the order that blames best; the exit code says which step failed.
STEPS = (
    "mount -t proc proc /proc",
    "mount -t tmpfs none /dev/shm",
    "ip link add bridge type bridge",
    "ip link add left type veth peer name right",
    "tc qdisc add dev left root tbf rate 100mbit burst 64kb latency 100ms",
    f"{' '.join(JOB_USER)} true",
    "env -i -C / true",
)
FIRST_CODE = 100
CONTAINER = " ".join(f"--security-opt {what}=unconfined" for what in ("seccomp", "apparmor", "systempaths"))
HINTS = {
    0: f"a container that masks /proc? start it with {CONTAINER}",
    1: f"sudo mkdir -p /dev/shm; in a container, start it with {CONTAINER}",
    2: "sudo modprobe bridge",
    3: "sudo modprobe veth",
    4: "sudo modprobe sch_tbf",
    5: "util-linux 2.36 or newer is needed: sudo apt-get install --only-upgrade util-linux",
    6: "coreutils 8.28 or newer is needed: sudo apt-get install --only-upgrade coreutils",
}

# (file under /proc, the value that forbids, the command that allows)
SYSCTLS = (
    ("kernel/unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=15000"),
    ("user/max_net_namespaces", "0", "sudo sysctl -w user.max_net_namespaces=15000"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)


def check(path: str = PATH, proc: Path = Path("/proc")) -> None:
    """Raise NotInstalled or NotPermitted unless a rack of namespaces can be made here."""
    for tool, package in PACKAGES.items():
        if shutil.which(tool, path=path) is None:
            raise NotInstalled(f"netns needs `{tool}`, which is not installed", f"sudo apt-get install {package}")
    script = "".join(f"{step} || exit {FIRST_CODE + index}\n" for index, step in enumerate(STEPS))
    trial = subprocess.run(
        [*UNSHARE, "sh", "-c", script], capture_output=True, text=True, env={"PATH": path}, check=False
    )
    if trial.returncode:
        raise blame(trial.returncode - FIRST_CODE, trial.stderr, proc)


def blame(step: int, said: str, proc: Path) -> Lacking:
    """The error for a trial that failed at `step` of STEPS (negative: the namespaces themselves were refused)."""
    words = " ".join(said.split())
    if step < 2 and (command := forbidden(proc)):
        return NotPermitted(f"this machine does not allow user namespaces ({words})", command)
    if step in HINTS:
        return NotPermitted(f"netns: `{STEPS[step]}` failed in a trial namespace: {words}", HINTS[step])
    if confined(proc):
        hint = f"start it with {CONTAINER}"
        return NotPermitted(f"this container does not allow user namespaces ({words})", hint)
    return NotPermitted(f"user namespaces are refused here: {words}", f"see what fails: {' '.join(UNSHARE)} true")


def forbidden(proc: Path) -> str | None:
    """The command that lifts the setting which forbids user namespaces to this user, if one does."""
    for name, value, command in SYSCTLS:
        file = proc / "sys" / name
        if file.exists() and file.read_text().strip() == value:
            if os.geteuid() == 0 and name.startswith("kernel/"):
                continue  # these two bind ordinary users only
            return command
    return None


def confined(proc: Path) -> bool:
    """Whether a seccomp filter is on this process, as in a container with the default profile."""
    return "\nSeccomp:\t2" in (proc / "self/status").read_text()
