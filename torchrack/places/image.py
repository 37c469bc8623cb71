"""The Docker engine as a builder: whether it can be used, and the images of the nodes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from torchrack.model.errors import NotInstalled, NotPermitted, NotRunning, UsageError
from torchrack.places.base import Step
from torchrack.places.command import answer, stream
from torchrack.places.torch_wheel import CPU_INDEX, TORCH, wheel_folder

IMAGE_LABEL = "torchrack.image"  # on every image that docker/Dockerfile makes; its value is the target
DOCKER = Path(__file__).resolve().parents[2] / "docker"
TARGETS = ("cpu", "cuda")
SLIM = "python:3.11-slim-bookworm"
LOCAL_BASE = "torchrack-base:bookworm"
SOURCES = ("Dockerfile", "apt.sh", "torch.sh", "base-image.sh", ".dockerignore")
ENGINE_S = 5  # seconds for one answer of the engine
PULL_S = 120.0  # seconds for the slim image (50 MB); past them the local base is taken
OLDEST_API = "1.41"  # engine 20.10: the first whose own Dockerfile frontend has RUN --mount=type=secret
DEFAULT_HOST = "unix:///var/run/docker.sock"
INSTALL_DOCKER = "install Docker Engine with Compose v2: https://docs.docker.com/engine/install/"
INSTALL_COMPOSE = "install Compose v2: https://docs.docker.com/compose/install/linux/"


# The engine


def engine_check() -> None:
    """Raise NotInstalled, NotRunning or NotPermitted unless the engine and Compose v2 can be used.

    Each question to the engine or the client is bounded by ENGINE_S, an older engine than 20.10 counts as none.
    """
    if shutil.which("docker") is None:
        raise NotInstalled("Docker is not installed", INSTALL_DOCKER)
    _compose_check()
    version = _ask_engine()
    if _numbers(version["ApiVersion"]) < _numbers(OLDEST_API):
        raise NotInstalled(f"Docker Engine {version['Version']} is older than 20.10", INSTALL_DOCKER)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _compose_check() -> None:
    said = answer(["docker", "compose", "version", "--short"], ENGINE_S)
    if said.returncode == 124:
        raise NotRunning(f"docker compose: {said.stderr}", "docker compose version")
    if said.returncode == 0 and not said.stdout.lstrip("v").startswith("1."):
        return
    old = answer(["docker-compose", "version", "--short"], ENGINE_S).stdout.strip()
    if old.startswith("1."):
        raise NotInstalled(f"docker-compose {old} is Compose v1; `docker compose` (v2) is missing", INSTALL_COMPOSE)
    raise NotInstalled("Docker has no Compose v2: `docker compose` does not work", INSTALL_COMPOSE)


def _ask_engine() -> dict[str, str]:
    """The engine's version."""
    where = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    if where.startswith("unix://"):
        _knock(where)
    from torchrack.places.docker_sdk import APIError, DockerException, from_env

    try:
        # A version given, the client asks nothing by itself; this question has the same form in every version.
        client = from_env(timeout=ENGINE_S, version=OLDEST_API).api
        try:
            return dict(client.version(api_version=False))
        finally:
            client.close()
    except APIError as error:
        raise NotRunning(
            f"the Docker engine at {where} answers with an error: {error.explanation}", "docker info"
        ) from error
    except (DockerException, OSError) as error:  # requests' errors are OSErrors
        if "Timeout" in type(error).__name__:
            restart = "sudo systemctl restart docker"
            raise NotRunning(f"the Docker engine at {where} did not answer within {ENGINE_S} s", restart) from error
        raise NotRunning(f"no Docker engine answers at {where}: {error}", "docker info") from error


def _knock(where: str) -> None:
    """Try the engine's socket: the SDK hides the reason, leaks the socket, and takes 0.7 s to import."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(ENGINE_S)
        try:
            client.connect(where.removeprefix("unix://"))
        except PermissionError as error:
            fix = "sudo usermod -aG docker $USER, then log in again"
            raise NotPermitted(f"this user may not use the Docker engine at {where}", fix) from error
        except OSError as error:
            raise _not_running(where) from error


def _not_running(where: str) -> NotRunning:
    name, host = _context()
    if where == DEFAULT_HOST and name != "default":  # Docker Desktop and the like, which only the docker command knows
        return NotRunning(f"no Docker engine at {where}: your docker context is {name}", f"export DOCKER_HOST={host}")
    return NotRunning(f"Docker is not running: nothing answers at {where}", "sudo systemctl start docker")


def _context() -> tuple[str, str]:
    """The name of the docker command's context, and the engine's address in it."""
    said = answer(["docker", "context", "inspect", "--format", "{{.Name}} {{.Endpoints.docker.Host}}"], ENGINE_S)
    name, _, host = said.stdout.strip().partition(" ")
    return name or "default", host


# The images


def ensure_cpu_image(step: Step) -> str:
    """The tag of the cpu image, which is built unless it is there already.

    Raises a Lacking error or CommandFailed.
    """
    return next((tag for tag in _tags("cpu") if _there(tag)), None) or build_image(step)


def _tags(target: str) -> list[str]:
    """The tags that an image of this very tree may have, by the bases that it may be built on."""
    given = os.environ.get("TORCHRACK_BASE")
    return [image_tag(target, base) for base in ([given] if given else [SLIM, LOCAL_BASE])]


@dataclass(frozen=True)
class Image:
    """One that is built here. `machine` as uname has it, `size` in bytes.

    `digest` is of tag and layers, which say the same of it in every engine: its id differs between ways to store it.
    """

    tag: str
    digest: str
    machine: str
    size: int


MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def built(target: str) -> Image:
    """The image of this very tree. Raises NotInstalled where it is not built."""
    form = "{{.Architecture}} {{.Size}} {{json .RootFS.Layers}}"
    for tag in _tags(target):
        said = answer(["docker", "image", "inspect", "--format", form, tag], ENGINE_S)
        if said.returncode == 0:
            machine, size, layers = said.stdout.strip().split(" ", 2)
            digest = hashlib.sha256((tag + layers).encode()).hexdigest()[:12]
            return Image(tag, digest, MACHINES.get(machine, machine), int(size))
    fix = "make image" if target == "cpu" else f"make image TARGET={target}"
    raise NotInstalled(f"the {target} image is not built on this machine", fix)


def image_tag(target: str, base: str) -> str:
    """`torchrack-<target>:<hash>`, a hash of all that decides the image's content except EXTRA packages."""
    content = hashlib.sha256(f"{TORCH} {base}".encode())
    for name in SOURCES:
        content.update((DOCKER / name).read_bytes())
    return f"torchrack-{target}:{content.hexdigest()[:12]}"


def _there(image: str) -> bool:
    return answer(["docker", "image", "inspect", "--format", "{{.Id}}", image], ENGINE_S).returncode == 0


def build_image(step: Step, target: str = "cpu", extra: str = "") -> str:
    """Build a target of docker/Dockerfile and return its tag; what has not changed comes from the build cache.

    `extra` are more Python packages, separated by blanks. Raises a Lacking error or CommandFailed.
    """
    if target not in TARGETS:
        raise UsageError(f"no image target {target!r}", f"one of {', '.join(TARGETS)}")
    engine_check()
    base = choose_base(step)
    if target == "cpu":  # CUDA wheels are gigabytes: the build fetches them itself, unless docker/wheels/cuda is there
        wheel_folder(DOCKER / "wheels" / target, step, extra.split())
    tag = image_tag(target, base)
    values = {"BASE": base, "TORCH": TORCH, "TORCH_INDEX": CPU_INDEX, "EXTRA": extra}
    argv = ["docker", "build", "--progress=plain", f"--target={target}", *_ca()]
    argv += [f"--build-arg={name}={value}" for name, value in values.items()]
    argv += ["--build-arg=PIP_INDEX_URL"] if os.environ.get("PIP_INDEX_URL") else []  # by name: it may hold a password
    argv += [f"--tag={tag}", f"--tag=torchrack-{target}:latest", str(DOCKER)]
    stream(argv, lambda line: step(_plain(line)), "make image shows it again; the first error in it counts", _builder())
    return tag


def _plain(line: str) -> str:
    """A line of BuildKit without its step number and seconds."""
    return re.sub(r"^#\d+ (\d+\.\d+ )?", "", line)


def _ca() -> list[str]:
    """The host's own CA bundle as a BuildKit secret: it lets a build through a TLS proxy and leaves nothing behind."""
    named = [os.environ.get(name, "") for name in ("TORCHRACK_CA", "SSL_CERT_FILE", "PIP_CERT")]
    return next(([f"--secret=id=ca,src={path}"] for path in named if path and Path(path).is_file()), [])


def _builder() -> dict[str, str]:
    """BuildKit inside the engine: another builder would neither see local bases nor leave the image in the engine."""
    return {"DOCKER_BUILDKIT": "1", "BUILDX_BUILDER": _context()[0]}


def choose_base(step: Step) -> str:
    """TORCHRACK_BASE; else a base that is here; else the slim image, pulled; else one built by mmdebstrap.

    Raises NotInstalled if none of these is to be had.
    """
    if given := os.environ.get("TORCHRACK_BASE"):
        return given
    for base in (SLIM, LOCAL_BASE):
        if _there(base):
            return base
    step(f"pulling {SLIM}, at most {PULL_S:g} s")
    pulled = answer(["docker", "pull", "--quiet", SLIM], PULL_S)
    if pulled.returncode == 0:
        return SLIM
    step(f"not pulled: {pulled.stderr.strip()}")
    if os.geteuid() == 0 and shutil.which("mmdebstrap"):
        return build_base(step)
    raise NotInstalled(f"no base image: {SLIM} cannot be pulled: {pulled.stderr.strip()}", "make base-image")


def build_base(step: Step) -> str:
    """Build the base image with mmdebstrap from this host's Debian mirror, without an image registry."""
    if shutil.which("mmdebstrap") is None:
        raise NotInstalled("mmdebstrap is not installed", "sudo apt-get install mmdebstrap")
    engine_check()
    stream(
        [str(DOCKER / "base-image.sh"), LOCAL_BASE], step, "check that apt-get update works here, then: make base-image"
    )
    return LOCAL_BASE
