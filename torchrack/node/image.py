"""Docker as a host's way to torch: can this user use it, and bring an image. Runs there, standard library only.

    image.py ask                                        {"version", "machine", "nvidia"}, or {"failed", "fix"}
    image.py bring FOLDER TAG DIGEST GPUS SCRIPT        {"want": bool}, then {"python"} or {"failed"}

A wanted image is read from stdin to its end, as `docker save` writes it. It is known by its tag and layers, for its id
differs between Docker's ways to store it. FOLDER/image-DIGEST/bin then holds its commands (SCRIPT is in_image.sh), and
FOLDER/python is switched to it last: a sender that goes, or stalls, has changed nothing.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import os
import select
import shlex
import shutil
import subprocess
import sys

ANSWER_S = 20.0  # seconds for one answer of the engine
FIRST_S = 120.0  # seconds for the first start of a container
STALL = 300.0  # seconds without a byte after which whoever sends is taken for dead; `docker save` thinks first
CHUNK = 1 << 20
PROVISION = "make provision HOSTS=… VAR=torchrack_containers=true"


def say(**fields: object) -> None:
    sys.stdout.write(f"{fields!a}\n")
    sys.stdout.flush()


def answer(*argv: str, within: float = ANSWER_S) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=within)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", "no answer within %g s" % within)


def ask() -> dict[str, object]:
    if not shutil.which("docker"):
        return {"failed": "Docker is not installed there", "fix": PROVISION}
    said = answer("docker", "info", "--format", "{{json .}}")
    info = json.loads(said.stdout) if said.returncode == 0 else {}
    problem = " ".join(info.get("ServerErrors") or []) or said.stderr.strip()
    if not info.get("ServerVersion"):
        if "permission denied" in problem:
            user = getpass.getuser()
            return {"failed": "%s may not use Docker there" % user, "fix": "there: sudo usermod -aG docker %s" % user}
        return {"failed": "Docker does not answer there: %s" % problem, "fix": "there: sudo systemctl start docker"}
    if info["Name"] != os.uname().nodename:
        return {
            "failed": "the engine that answers there is that of %s" % info["Name"],
            "fix": "unset DOCKER_HOST there",
        }
    if any("rootless" in option or "userns" in option for option in info.get("SecurityOptions") or []):
        return {"failed": "Docker there maps users, and the job would be another one", "fix": "TORCH=venv"}
    tools = ("nvidia-ctk", "nvidia-container-cli", "nvidia-container-runtime-hook")
    nvidia = "nvidia" in (info.get("Runtimes") or {}) or any(map(shutil.which, tools))
    return {"version": info["ServerVersion"], "machine": info["Architecture"], "nvidia": nvidia}


def there(tag: str) -> tuple[str, str]:
    """Its id and its digest, as places/image.py makes it; empty: it is not there."""
    said = answer("docker", "image", "inspect", "--format", "{{.Id}} {{json .RootFS.Layers}}", tag)
    if said.returncode:
        return "", ""
    own, _, layers = said.stdout.strip().partition(" ")
    return own, hashlib.sha256((tag + layers).encode()).hexdigest()[:12]


def load() -> None:
    """Raises OSError with what is wrong, after which Docker has nothing of it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(["docker", "load"], stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe) as loading:
        assert loading.stdin and loading.stderr
        try:
            while select.select([0], [], [], STALL)[0]:
                data = os.read(0, CHUNK)
                if not data:
                    break
                loading.stdin.write(data)
            else:
                loading.kill()
                raise OSError("nothing came for %g s" % STALL)
            loading.stdin.close()
        except BrokenPipeError:
            loading.stdin = None  # it says why
        last = loading.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
    if loading.returncode:
        raise OSError("docker load: %s" % (last[0] if last else loading.returncode))


def write(path: str, content: str, mode: int) -> None:
    with open(path + ".new", "w") as file:
        file.write(content)
    os.chmod(path + ".new", mode)
    os.replace(path + ".new", path)


def link(target: str, path: str) -> None:
    if os.path.islink(path + ".new"):
        os.unlink(path + ".new")
    os.symlink(target, path + ".new")
    os.replace(path + ".new", path)


def bring(folder: str, tag: str, digest: str, gpus: str, script: str) -> str:
    """The Python that it leaves; raises OSError."""
    own, found = there(tag)
    say(want=found != digest)
    if found != digest:
        load()
        own, found = there(tag)
        if found != digest:
            raise OSError("another %s arrived than was sent" % tag)
    home = "%s/image-%s" % (folder, digest)
    os.makedirs(home + "/bin", exist_ok=True)
    settings = {"image": own, "gpus": gpus, "bin": home + "/bin"}
    write(home + "/settings", "".join("%s=%s\n" % (k, shlex.quote(v)) for k, v in settings.items()), 0o644)
    write(home + "/bin/python", script, 0o755)
    for name in ("torchrun", "usable"):
        link("python", "%s/bin/%s" % (home, name))
    tried = answer(home + "/bin/python", "-I", "-S", "-c", "", within=FIRST_S)
    if tried.returncode:  # no GPUs for Docker, for instance: a Python that does not start would keep us out from now on
        raise OSError("%s does not run: %s" % (tag, (tried.stderr.strip().splitlines() or ["no word why"])[0]))
    link(os.path.basename(home), folder + "/python")
    return home + "/bin/python"


def main(mode: str, *words: str) -> None:
    if mode == "ask":
        say(**ask())
        return
    folder = os.path.expanduser(words[0])
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with open(folder + "/python.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            say(python=bring(folder, *words[1:]))
        except BlockingIOError:
            say(failed="another deployer is making it")
        except OSError as error:
            say(failed=str(error))


main(*sys.argv[1:])
