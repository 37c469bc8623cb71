"""The engine's checks against real sockets, and the images as the real engine builds them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from time import monotonic

import pytest
from test_torch_wheel import make_wheel

from torchrack.model.errors import CommandFailed, NotInstalled, NotPermitted, NotRunning, UsageError
from torchrack.places import image
from torchrack.places.image import build_image, engine_check, ensure_cpu_image, image_tag
from torchrack.places.torch_wheel import TORCH

ROOT = Path(image.__file__).parents[2]
BUDGET = 900_000_000  # bytes, uncompressed


def docker(*args: str, timeout: float = 120) -> str:
    done = subprocess.run(["docker", *args], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


# The engine: one real cause after the other


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is all of PATH, with a `docker` whose Compose is v2; another user can read it too."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv("PATH", folder)
        tool(Path(folder), "docker", 'case "$1" in compose) echo 2.26.1;; context) echo default unix:///x;; esac')
        yield Path(folder)


def tool(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def test_no_docker_at_all(tools: Path) -> None:
    (tools / "docker").unlink()
    with pytest.raises(NotInstalled, match="Docker is not installed"):
        engine_check()


def test_no_compose(tools: Path) -> None:
    tool(tools, "docker", "echo \"docker: 'compose' is not a docker command.\" >&2; exit 1")
    with pytest.raises(NotInstalled, match="no Compose v2"):
        engine_check()


def test_compose_v1_is_named(tools: Path) -> None:
    tool(tools, "docker", "exit 1")
    tool(tools, "docker-compose", "echo 1.29.2")
    with pytest.raises(NotInstalled, match=r"docker-compose 1\.29\.2 is Compose v1"):
        engine_check()


def test_a_client_that_hangs_is_not_waited_for(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "ENGINE_S", 1)
    tool(tools, "docker", "exec /bin/sleep 60")
    with pytest.raises(NotRunning, match="no answer within 1 s"):
        engine_check()


def test_an_engine_that_is_not_running(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tools}/nobody.sock")
    with pytest.raises(NotRunning, match="Docker is not running") as caught:
        engine_check()
    assert "systemctl start docker" in str(caught.value)


def test_a_socket_that_a_dead_engine_left(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(tools / "dead.sock"):
        pass
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tools}/dead.sock")
    with pytest.raises(NotRunning, match="Docker is not running"):
        engine_check()


def test_an_engine_elsewhere_by_docker_context(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(image, "DEFAULT_HOST", f"unix://{tools}/nobody.sock")
    tool(tools, "docker", 'case "$1" in compose) echo 2.26.1;; context) echo far unix:///far.sock;; esac')
    with pytest.raises(NotRunning, match="your docker context is far") as caught:
        engine_check()
    assert caught.value.hint == "export DOCKER_HOST=unix:///far.sock"


def test_an_engine_that_accepts_and_never_answers(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(tools / "silent.sock"):
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tools}/silent.sock")
        began = monotonic()
        with pytest.raises(NotRunning, match="did not answer within 5 s"):
            engine_check()
        assert monotonic() - began < 15


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield server


def test_an_engine_that_this_user_may_not_use(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tools}/roots.sock")
    refused = pytest.raises(NotPermitted, match="may not use the Docker engine")
    with listening(tools / "roots.sock"), ordinary_user(tools / "roots.sock"), refused as caught:
        engine_check()
    assert "usermod -aG docker" in str(caught.value)


@contextmanager
def ordinary_user(socket_path: Path) -> Iterator[None]:
    """Be a user to whom the socket says no."""
    socket_path.chmod(0o000)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


class OldEngine(BaseHTTPRequestHandler):
    """Answers as an engine 19.03 does."""

    def do_GET(self) -> None:
        body = json.dumps({"Version": "19.03.15", "ApiVersion": "1.40"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def address_string(self) -> str:
        return "a Unix socket"


def test_an_engine_that_is_too_old(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tools}/old.sock")
    with (
        serving(ThreadingUnixStreamServer(str(tools / "old.sock"), OldEngine)),
        pytest.raises(NotInstalled, match=r"Docker Engine 19\.03\.15 is older than 20\.10"),
    ):
        engine_check()


@contextmanager
def serving(server: ThreadingUnixStreamServer | ThreadingHTTPServer) -> Iterator[None]:
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


# Names


def test_the_tag_follows_the_base_and_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = image_tag("cpu", "a"), image_tag("cpu", "b"), image_tag("cuda", "a")
    assert len(set(before)) == 3
    shutil.copytree(image.DOCKER, tmp_path / "docker", ignore=shutil.ignore_patterns("wheels"))
    monkeypatch.setattr(image, "DOCKER", tmp_path / "docker")
    assert image_tag("cpu", "a") == before[0]
    for name in image.SOURCES:
        with (tmp_path / "docker" / name).open("a") as source:
            source.write("\n# changed\n")
        assert image_tag("cpu", "a") not in before, name


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(UsageError, match="no image target 'gpu'"):
        build_image(pytest.fail, target="gpu")


# The cpu image


def nothing(line: str) -> None:
    """A step that nobody watches."""


@pytest.fixture(scope="module")
def cpu() -> str:
    return ensure_cpu_image(nothing)


def in_image(cpu: str, *argv: str, timeout: float = 120) -> str:
    return docker("run", "--rm", "--init", "--network=none", cpu, *argv, timeout=timeout)


@pytest.mark.docker
def test_the_image_keeps_its_budget(cpu: str) -> None:
    assert int(docker("image", "inspect", "--format", "{{.Size}}", cpu)) <= BUDGET


@pytest.mark.docker
def test_the_image_says_what_it_is(cpu: str) -> None:
    config = json.loads(docker("image", "inspect", cpu))[0]["Config"]
    assert config["Labels"][image.IMAGE_LABEL] == "cpu"
    assert (config["User"], config["WorkingDir"]) == ("rack", "/home/rack")


LOOK = """
set -e
[ "$(id -u) $HOME $(which python)" = "1000 /home/rack /opt/venv/bin/python" ]
grep -qx 'hosts: files' /etc/nsswitch.conf
which ip tc ps torchrun python3 >/dev/null
[ -x /usr/sbin/sshd ]
cd /opt/venv/lib/python3.11/site-packages
ls torch/__pycache__/__init__.*.pyc torch-*.dist-info/licenses/LICENSE numpy-*.dist-info/licenses/LICENSE.txt >/dev/null
for gone in torch/include torch/test torch/share pip numpy/_core/include; do [ ! -e $gone ] || echo "there: $gone"; done
find . -name '*.a'
find torch/bin -type f ! -name torch_shm_manager
find / -xdev \\( -name 'ssh_host_*' -o -path '/context*' -o -path '/run/secrets/*' -o -path '/var/lib/apt/lists/*Packages*' \\) \
  2>/dev/null || true
"""


@pytest.mark.docker
def test_the_image_holds_what_training_needs_and_nothing_else(cpu: str) -> None:
    assert in_image(cpu, "sh", "-c", LOOK) == ""


TRAIN = """
import numpy.testing, torch, torch.nn as nn, torch.distributed as dist
import torch.distributed.checkpoint, torch.distributed.pipelining, torch.distributed.rpc, torch.testing
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

@record
def main():
    dist.init_process_group("gloo")
    total = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for (batch,) in DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=2, num_workers=1):
        model(batch).sum().backward()
        optimizer.step()
    mesh = init_device_mesh("cpu", (2,))
    sharded = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh)
    sharded(torch.randn(3, 4)).sum().backward()
    parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())(torch.randn(2, 4)).sum().backward()
    whole = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).full_tensor()
    print(f"rank {dist.get_rank()}: {total.tolist()} {whole.sum().item()}\\n", end="", flush=True)
    dist.destroy_process_group()

main()
"""


@pytest.mark.docker
@pytest.mark.slow
def test_training_runs_in_the_image(cpu: str) -> None:
    script = f"cat > train.py <<'EOF'\n{TRAIN}\nEOF\nexec timeout 240 torchrun --standalone --nproc-per-node 2 train.py"
    # Docker writes no hosts entry for a container without a network, and torchrun looks its own name up.
    said = docker("run", "--rm", "--init", "--shm-size=256m", cpu, "bash", "-c", script, timeout=280)
    assert sorted(line for line in said.splitlines() if line.startswith("rank")) == [
        "rank 0: [3.0, 3.0] 28.0",
        "rank 1: [3.0, 3.0] 28.0",
    ]


# Building


@pytest.mark.docker
def test_a_change_in_labs_or_templates_copies_no_layer(cpu: str) -> None:
    build_image(nothing)  # an image made from another checkout's wheels may be there under the same tag
    before = docker("image", "inspect", "--format", "{{.Id}}", cpu)
    built: list[str] = []
    with scratch_files(ROOT / "labs", ROOT / "templates"):
        build_image(built.append)
    assert docker("image", "inspect", "--format", "{{.Id}}", cpu) == before
    steps = [line for line in built if re.match(r"\[(system|cpu|cpu-venv) [2-9]/", line)]
    assert steps
    assert built.count("CACHED") >= len(steps), built
    context = next(line for line in reversed(built) if line.startswith("transferring context"))
    assert re.search(r"context: [\d.]+(B|kB) ", context), context


@contextmanager
def scratch_files(*folders: Path) -> Iterator[None]:
    made = [Path(tempfile.mkstemp(dir=folder, prefix=".test-")[1]) for folder in folders]
    try:
        yield
    finally:
        for path in made:
            path.unlink()


@pytest.mark.docker
def test_a_base_that_is_nowhere_fails_with_the_end_of_the_build(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRACK_BASE", "torchrack-base:no-such-tag")
    with pytest.raises(CommandFailed, match="torchrack-base:no-such-tag") as caught:
        ensure_cpu_image(nothing)
    assert "fix: make image" in str(caught.value)


@pytest.mark.docker
@pytest.mark.slow
def test_a_build_behind_a_ca_of_ones_own(cpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip, inside the build, from an https server that only the secret's CA vouches for."""
    host = docker("run", "--rm", cpu, "ip", "-4", "route", "show", "default").split()[
        2
    ]  # this machine, seen from a build
    ca = certificate(tmp_path, host)
    serve_packages(tmp_path / "index")
    shutil.copytree(image.DOCKER, tmp_path / "docker", ignore=shutil.ignore_patterns("wheels"))
    tag = f"torchrack-test:{tmp_path.name}".lower()
    with https(host, ca, tmp_path / "index") as url:
        argv = ["docker", "build", "--progress=plain", "--target=cpu-venv", f"--tag={tag}"]
        base = image.choose_base(nothing)
        argv += [
            f"--build-arg={value}"
            for value in (
                f"BASE={base}",
                f"TORCH={TORCH}",
                f"TORCH_INDEX={url}",
                f"PIP_INDEX_URL={url}",
                "EXTRA=pandas",
            )
        ]
        for given in (None, ca):
            monkeypatch.setenv("TORCHRACK_CA", str(given or ""))
            monkeypatch.delenv("SSL_CERT_FILE", raising=False)
            monkeypatch.delenv("PIP_CERT", raising=False)
            build = [*argv, *image._ca(), str(tmp_path / "docker")]
            done = subprocess.run(
                build, capture_output=True, text=True, timeout=240, env={**os.environ, **image._builder()}
            )
            assert (done.returncode == 0) == (given is not None), done.stderr
            assert given or "CERTIFICATE_VERIFY_FAILED" in done.stderr
    try:
        docker("run", "--rm", tag, "python", "-c", "import torch, numpy, pandas")
        saved = subprocess.run(["docker", "save", tag], capture_output=True, check=True, timeout=120).stdout
        assert ca.read_text().splitlines()[1].encode() not in saved
    finally:
        docker("image", "rm", tag)


def certificate(folder: Path, host: str) -> Path:
    """A self-signed certificate, its key in the same file."""
    pem = folder / "ca.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    argv += ["-addext", f"subjectAltName=IP:{host}", "-keyout", str(folder / "key.pem"), "-out", str(pem)]
    subprocess.run(argv, check=True, capture_output=True)
    return pem


def serve_packages(index: Path) -> None:
    """A package index with empty packages, but with all the folders that torch.sh prunes."""
    index.mkdir()
    make_wheel(index / "py-spy", "py_spy", "2.0")
    for name in ("numpy", "sympy", "networkx", "mpmath", "pandas"):
        make_wheel(index / name, name, "2.0")
    inside = ("bin/torch_shm_manager", "bin/test_api", "distributed.py")
    make_wheel(index / "torch", "torch", f"{TORCH}+cpu", needs=["sympy", "networkx", "mpmath"], also=inside)


@contextmanager
def https(host: str, pem: Path, folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer((host, 0), partial(Quiet, directory=str(folder)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, pem.with_name("key.pem"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with serving(server):
        yield f"https://{host}:{server.server_port}"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Say nothing."""
