"""Choosing torch: the user's own pip configuration first, PyTorch's CPU wheel index next, never CUDA by accident."""

from __future__ import annotations

import fcntl
import json
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from torchrack.model.errors import NotInstalled
from torchrack.places.base import Step
from torchrack.places.command import answer, stream

TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
IMAGE_PYTHON = "3.11"
BESIDE_TORCH = ("numpy", "py-spy")  # py-spy tells where a rank hangs; the host's comes with torchrack
REQUIREMENTS = "requirements.txt"  # beside the wheels: what they were downloaded for
METADATA_S = 300  # seconds for one question to pip; it downloads no wheels, but an index can be slow
CUDA_PACKAGE = re.compile(r"nvidia-|cuda-|triton$|pytorch-triton")
PIP_QUIETLY = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")


@dataclass(frozen=True)
class Choice:
    """Where pip finds a CPU build: `pip_args` beside the user's configuration, and the version it offers there."""

    source: str
    pip_args: tuple[str, ...]
    version: str


SOURCES = (("your pip configuration", ()), ("PyTorch's CPU wheel index", ("--index-url", CPU_INDEX, "--retries", "2")))


def choose(python: str, tags: Sequence[str] = ()) -> Choice:
    """The first source that offers a CPU build of TORCH to that Python, or to the platform that pip's `tags` name.

    Only metadata is read. Raises NotInstalled with what each source answered.
    """
    refusals = []
    for source, args in SOURCES:
        offer = _offer(python, (*tags, *args))
        if isinstance(offer, str):
            refusals.append(f"{source}: {offer}")
        elif cuda := sorted(filter(CUDA_PACKAGE.match, offer)):
            refusals.append(f"{source}: a CUDA build, with {cuda[0]} and {len(cuda) - 1} more packages")
        else:
            return Choice(source, args, offer["torch"])
    version = IMAGE_PYTHON if tags else _version(python)
    raise NotInstalled("\n".join([f"no CPU build of torch {TORCH} for Python {version}", *refusals]), _hint(version))


def _offer(python: str, args: Sequence[str]) -> dict[str, str] | str:
    """Names and versions of all that `pip install torch` would install, or the end of what pip said against it."""
    argv = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    said = answer([*argv, "--disable-pip-version-check", "--no-input", *args, f"torch=={TORCH}"], METADATA_S)
    if said.returncode:
        return "\n".join(["not there", *(f"  | {line}" for line in said.stderr.strip().splitlines()[-3:])])
    # Warnings of some pip versions come on stdout, before the report.
    found = [item["metadata"] for item in json.loads(said.stdout[said.stdout.index("{") :])["install"]]
    return {re.sub(r"[-_.]+", "-", item["name"]).lower(): item["version"] for item in found}


def _version(python: str) -> str:
    return answer([python, "-c", "import platform; print(platform.python_version())"], 20).stdout.strip() or "?"


def _hint(version: str) -> str:
    folder = f"or put the wheel torch-{TORCH} in a folder, then: export PIP_FIND_LINKS=that-folder"
    if version.startswith(IMAGE_PYTHON):
        return f"check the network, {folder}"
    return f"install Python {IMAGE_PYTHON}, then: rm -rf .venv; make setup PYTHON=python{IMAGE_PYTHON}; {folder}"


def install(python: str, step: Step) -> None:
    """Install torch and numpy for that Python unless they are there; any build of the right version will do.

    Raises NotInstalled (nothing to install from) or CommandFailed.
    """
    if _installed(python, "torch").split("+")[0] == TORCH and _installed(python, "numpy"):
        return
    step(f"asking pip for a CPU build of torch {TORCH}")
    choice = choose(python)
    step(f"installing torch {choice.version} from {choice.source}")
    argv = [python, "-m", "pip", "install", *PIP_QUIETLY, *choice.pip_args, f"torch=={choice.version}", "numpy"]
    stream(argv, step, "check the network and the disk (df -h), then try again")


def _installed(python: str, package: str) -> str:
    """The installed version, without importing the package; empty: none."""
    if python == sys.executable:  # asked before every run: a process of its own would cost 0.1 s
        return next((found.version for found in distributions(name=package)), "")
    script = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
    return answer([python, "-c", script, package], 20).stdout.strip()


def wheel_folder(dest: Path, step: Step, extra: Sequence[str] = ()) -> Path:
    """Fill `dest` with the Python packages of an image, so that it is built offline; a folder that fits is kept.

    `extra` are more requirements. A folder that someone else filled will do if torch, numpy and py-spy are in it.
    Raises NotInstalled or CommandFailed, and then leaves the old folder.
    """
    with _locked(dest.with_suffix(".lock")):
        if not _fits(dest, extra):
            _fill(dest, step, extra)
    return dest


def _fill(dest: Path, step: Step, extra: Sequence[str]) -> None:
    tags = _image_tags()
    step(f"asking pip for a CPU build of torch {TORCH} for the image")
    part = dest.with_suffix(".part")
    # pip before 23.3 takes tags only with a --target, even for a dry run, which puts nothing there.
    choice = choose(sys.executable, [*tags, "--target", str(part)])
    torch = f"torch=={choice.version}"
    wanted = [torch, *BESIDE_TORCH, *extra]
    shutil.rmtree(part, ignore_errors=True)
    argv = [sys.executable, "-m", "pip", "download", "--dest", str(part), *PIP_QUIETLY, *tags]
    fix = "check the network, the disk (df -h) and the packages' names, then try again"
    if choice.pip_args:  # an index of torch's own has few other packages: those come from the user's configuration
        stream([*argv, *choice.pip_args, torch], step, fix)
        argv += ["--find-links", str(part)]
    stream([*argv, *wanted], step, fix)
    (part / REQUIREMENTS).write_text("".join(f"{line}\n" for line in wanted))
    shutil.rmtree(dest, ignore_errors=True)
    part.rename(dest)


def _fits(folder: Path, extra: Sequence[str]) -> bool:
    """Whether the folder has torch, what goes with it, and, as far as we know, was filled for these `extra`."""
    beside = (f"{name.replace('-', '_')}-*.whl" for name in BESIDE_TORCH)
    wheels = f"torch-{TORCH}[+-]*cp{IMAGE_PYTHON.replace('.', '')}-*.whl", *beside
    wanted = folder / REQUIREMENTS
    filled_for = wanted.read_text().split()[1 + len(BESIDE_TORCH) :] if wanted.exists() else []
    return all(any(folder.glob(wheel)) for wheel in wheels) and filled_for == list(extra)


def _image_tags() -> list[str]:
    """pip's options for wheels of the image's Python on this processor, for a C library as old as Debian 12's."""
    machine = platform.machine()
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(36, 16, -1)]
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", IMAGE_PYTHON]
    return [*options, *(f"--platform={name}" for name in [*platforms, f"manylinux2014_{machine}", f"linux_{machine}"])]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
