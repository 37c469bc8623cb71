"""TORCH=image: who gets torch in the kit's image, and a whole run in it on this machine, behind a real sshd."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from racks import Cli, Done, tagged, wait_until
from sshd import Machines, Quiet, this_machine
from test_preflight import report

from torchrack.model.errors import Lacking, NotInstalled, TorchrackError
from torchrack.model.hosts import Host
from torchrack.places.image import Image, built
from torchrack.places.ssh import Ssh
from torchrack.places.ssh_connect import Trust
from torchrack.places.torch_wheel import TORCH
from torchrack.run import torch_image
from torchrack.run.phases import Progress
from torchrack.run.torch_image import bring, suitable
from torchrack.run.torch_there import Need, make_them, needs

IMAGE = Image("torchrack-cpu:1234", "abcdef", "x86_64", 800_000_000)
NO_DOCKER = NotInstalled("Docker is not installed there", "make provision HOSTS=…")
INSIDE = "/home/someone/.torchrack/image-abcdef/bin/python"


@pytest.mark.parametrize(
    ("source", "have", "can", "wanted"),
    [
        ("auto", ["", ""], [IMAGE, IMAGE], ["image", "image"]),
        ("auto", ["", TORCH], [IMAGE, None], ["image", ""]),
        ("auto", ["", ""], [IMAGE, NO_DOCKER], ["venv", "venv"]),
        ("auto", ["", "2.12.0"], [IMAGE, None], ["venv", ""]),
        ("image", ["", TORCH], [IMAGE, IMAGE], ["image", "image"]),
        ("venv", ["", TORCH], [None, None], ["venv", "venv"]),
        ("python", ["", TORCH], [None, None], ["", ""]),
    ],
)
def test_who_gets_the_image(
    source: str, have: list[str], can: list[Image | TorchrackError | None], wanted: list[str]
) -> None:
    reports = {f"node{i}": report(i, torch=version) for i, version in enumerate(have)}
    hosts = {node: Host(name=node, address=node) for node in reports}
    answers = {f"node{i}": answer for i, answer in enumerate(can) if answer}
    found = needs(hosts, reports, source, answers)  # type: ignore[arg-type]
    kinds = {node: "image" if need.image else "venv" for node, need in found.items()}
    assert kinds == {f"node{i}": kind for i, kind in enumerate(wanted) if kind}


def test_it_is_said_why() -> None:
    reports, hosts = {"node0": report(0, torch="")}, {"node0": Host(name="a", address="a")}
    chosen = needs(hosts, reports, "auto", {"node0": IMAGE})["node0"]
    assert str(chosen) == "the image torchrack-cpu:1234: it has none, and its Docker can run the image"
    other = needs(hosts, reports, "auto", {"node0": NO_DOCKER})["node0"]
    assert str(other).endswith("it has none; no image, as on node0: Docker is not installed there")
    with pytest.raises(Lacking, match=r"(?s)nothing was deployed.*node0: Docker is not.*fix: make provision"):
        needs(hosts, reports, "image", {"node0": NO_DOCKER})


def test_a_host_that_runs_in_the_image_already_needs_nothing() -> None:
    there = report(0, torch=TORCH)
    folder = there.health.folder
    health = there.health.model_copy(update={"python": f"{folder}/image-abcdef/bin/python"})
    reports, hosts = {"node0": there.model_copy(update={"health": health})}, {"node0": Host(name="a", address="a")}
    assert needs(hosts, reports, "image", {"node0": IMAGE}) == {}
    assert needs(hosts, reports, "venv", {})["node0"].image is None, "the later choice wins"
    named = {"node0": Host(name="a", address="a", python="/opt/python")}
    assert needs(named, reports, "image", {}) == {}


def test_an_image_needs_its_processor_and_gpus_need_the_toolkit() -> None:
    assert suitable(IMAGE, False, "x86_64", False) is IMAGE
    assert suitable(IMAGE, True, "x86_64", True) is IMAGE
    with pytest.raises(Lacking, match=r"the host is aarch64"):
        suitable(IMAGE, False, "aarch64", False)
    with pytest.raises(Lacking, match=r"(?s)no NVIDIA container toolkit.*torchrack_containers=true"):
        suitable(IMAGE, True, "x86_64", False)


# On this machine


class Remote(Cli):
    """The CLI with this machine as the only host, its bytes on the bridge of Docker: they never leave the kernel."""

    def named(self, there: Machines) -> list[str]:
        file = there.inventory(self.home / "hosts.yml")
        told = json.loads(file.read_text())
        for one in told["all"]["hosts"].values():
            del one["torchrack_python"]
            one["torchrack_nic"] = "docker0"
        file.write_text(json.dumps(told))
        return ["--hosts", str(file), "--known-hosts", str(there.known_hosts)]

    def on(self, there: Machines, command: str, *more: str) -> Done:
        return self(command, *self.named(there), *more)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def containers(there: Machines) -> list[str]:
    argv = ["docker", "ps", "--all", "--quiet", "--filter", f"volume={there.all[0].folder}"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()


def nothing_left(there: Machines) -> bool:
    return not containers(there) and not tagged(f"TORCHRACK_AT={there.all[0].folder}")


@pytest.fixture(scope="module")
def there() -> Iterator[Machines]:
    with this_machine() as made:
        yield made
        assert wait_until(lambda: nothing_left(made), 25)


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Remote:
    return Remote(tmp_path_factory.mktemp("home"), "ssh", "remote")


@pytest.fixture(scope="module")
def port() -> str:
    return free_port()


real = [pytest.mark.ssh, pytest.mark.docker, pytest.mark.slow]


@pytest.fixture(scope="module")
def deployed(there: Machines, cli: Remote, port: str) -> Machines:
    done = cli.on(there, "deploy", "--torch", "image", "--nproc", "2", "--port", port)
    assert done.returncode in (0, 3), done.stderr  # 3: /etc/hosts and the like of whoever runs the tests
    assert (there.all[0].folder / "python").readlink() == Path(f"image-{built('cpu').digest}")
    return there


class TestOnThisMachine:
    pytestmark = real

    def test_a_plan_chooses_the_image_and_changes_nothing(self, there: Machines, cli: Remote, port: str) -> None:
        plan = cli.on(there, "deploy", "--plan", "--torch", "auto", "--nproc", "2", "--port", port)
        assert plan.returncode == 0, plan.stderr
        told = f"node0 would get the image {built('cpu').tag}: it has none, and its Docker can run the image"
        assert told in plan.stderr and not there.all[0].folder.exists()

    def test_ranks_run_in_the_image_as_they_would_on_the_host(
        self, deployed: Machines, cli: Remote, port: str, tmp_path: Path
    ) -> None:
        script = tmp_path / "where.py"
        script.write_text(
            "import json, os, socket, torch, torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "total = torch.ones(1); dist.all_reduce(total); dist.destroy_process_group()\n"
            "print(json.dumps([torch.__file__, socket.gethostname(), os.getuid(), os.getcwd(), int(total)]))\n"
            "open(os.environ['OUT'] + '/said', 'w').write('from the image')\n"
        )
        done = cli.on(deployed, "launch", "--nproc", "2", "--port", port, "--json", str(script))
        result = cli.result(done)
        assert result["verdict"] == "passed", done.stderr
        record = Path(result["record"])
        said = json.loads((record / "logs/node0/1.log").read_text().splitlines()[-1])
        assert said[0].startswith("/opt/venv/") and not Path(said[0]).exists(), "a torch that only the image has"
        assert said[1:3] == [socket.gethostname(), deployed.all[0].uid] and said[4] == 2
        assert (record / "out/rank1/said").read_text() == "from the image"
        assert wait_until(lambda: nothing_left(deployed), 5)

    def test_nothing_is_brought_twice(self, deployed: Machines, cli: Remote, port: str) -> None:
        done = cli.on(deployed, "deploy", "--torch", "image", "--nproc", "2", "--port", port)
        assert done.returncode in (0, 3) and "gets" not in done.stderr, done.stderr

    @pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
    def test_nothing_of_a_run_outlives_its_client(
        self, deployed: Machines, cli: Remote, port: str, tmp_path: Path, ending: signal.Signals
    ) -> None:
        script = tmp_path / "long.py"
        script.write_text("import time; print('at work', flush=True); time.sleep(300)\n")
        client = cli.start(
            "launch", *cli.named(deployed), "--nproc", "2", "--port", port, "--deadline", "60", "--json", str(script)
        )
        assert client.stderr
        try:
            said = iter(client.stderr.readline, "")
            assert len([*itertools.islice((line for line in said if "at work" in line), 2)]) == 2
            assert containers(deployed)
            client.send_signal(ending)
            assert wait_until(lambda: nothing_left(deployed), 30), tagged(f"TORCHRACK_AT={deployed.all[0].folder}")
        finally:
            client.kill()
            client.communicate()

    def test_an_image_that_does_not_run_there_is_not_switched_to(self, deployed: Machines, tmp_path: Path) -> None:
        if shutil.which("nvidia-smi"):
            pytest.skip("there are GPUs here, so it runs")
        place, folder = place_of(deployed, tmp_path), deployed.all[0].folder
        (folder / "python").rename(folder / "before")
        with pytest.raises(Lacking, match=r"torchrack-cpu:\S+ does not run: docker: Error"):
            bring(place, "node0", built("cpu"), True, Progress(Quiet()))
        assert not (folder / "python").exists()
        (folder / "before").rename(folder / "python")
        bring(place, "node0", built("cpu"), False, Progress(Quiet()))

    def test_stop_ends_a_run_that_was_left_to_itself(
        self, deployed: Machines, cli: Remote, port: str, tmp_path: Path
    ) -> None:
        script = tmp_path / "long.py"
        script.write_text("import time; time.sleep(300)\n")
        done = cli.on(deployed, "launch", "--detach", "--nproc", "2", "--port", port, str(script))
        assert done.returncode == 0, done.stderr
        run = done.stdout.split()[1]
        assert json.loads(cli.on(deployed, "stop", "--json").stdout) == {"node0": [run]}
        assert wait_until(lambda: nothing_left(deployed), 5)

    def test_the_later_choice_wins_and_an_image_that_is_gone_is_put_right(
        self, deployed: Machines, cli: Remote, port: str, tmp_path: Path
    ) -> None:
        place = place_of(deployed, tmp_path)
        folder = deployed.all[0].folder
        inside = place.report("node0").health.python
        assert inside == str(folder / f"image-{built('cpu').digest}/bin/python")
        ready = folder / f"venv-{TORCH}"
        (ready / "bin").mkdir(parents=True)
        (ready / "bin/python").symlink_to(folder.parents[1] / "bare/bin/python")
        (ready / "complete").touch()
        make_them(place, {"node0": Need(TORCH, True, "asked for")}, Progress(Quiet()))
        assert (folder / "python").readlink() == Path(ready.name)
        settings = Path(inside).parents[1] / "settings"
        settings.write_text(settings.read_text().replace("sha256:", "sha256:0"))
        (folder / "python").unlink()
        (folder / "python").symlink_to(settings.parent.name)
        assert "/bare/bin/" in place.report("node0").health.python, "as if it were not there"
        done = cli.on(deployed, "deploy", "--torch", "image", "--nproc", "2", "--port", port)
        assert done.returncode in (0, 3), done.stderr
        assert place.report("node0").health.python == inside


def place_of(there: Machines, tmp_path: Path) -> Ssh:
    hosts = [host.model_copy(update={"python": None}) for host in there.hosts()]
    return Ssh("image", tmp_path / "state", hosts, Trust("known", there.known_hosts))


@pytest.mark.ssh
@pytest.mark.docker
@pytest.mark.slow
def test_without_docker_it_is_refused_and_auto_takes_a_venv(tmp_path: Path) -> None:
    cli = Remote(tmp_path, "ssh", "remote")
    with this_machine("DOCKER_HOST=unix:///nowhere") as there:
        done = cli.on(there, "deploy", "--torch", "image", "--port", free_port())
        assert done.returncode == 4, done.stderr
        assert "node0: Docker does not answer there: Cannot connect" in done.stderr
        assert "fix: there: sudo systemctl start docker" in done.stderr and not there.all[0].folder.exists()
        plan = cli.on(there, "deploy", "--plan", "--torch", "auto", "--port", free_port())
        assert f"would get a virtual environment with torch {TORCH} (CPU): it has none; no image, as on" in plan.stderr


# An image that the host does not have


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Image]:
    """An image that the engine does not know, and a `docker save` here that plays it from a file."""
    tag, layer = f"torchrack-test:{os.getpid()}", tmp_path / "layer.tar"
    root, python = tmp_path / "root", tmp_path / "root/usr/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    (root / "content").write_bytes(os.urandom(8_000_000))
    needed = subprocess.run(["ldd", "/bin/sh"], capture_output=True, text=True, check=True).stdout
    for path in ("/bin/sh", *re.findall(r"(/\S+) \(0x", needed)):
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path[1:])
    subprocess.run(["tar", "-C", str(root), "-cf", str(layer), "."], check=True)
    subprocess.run(["docker", "import", str(layer), tag], check=True, capture_output=True)
    subprocess.run(["docker", "save", "--output", str(tmp_path / "saved"), tag], check=True)
    monkeypatch.setattr(torch_image, "TOLD", 1_000_000)
    monkeypatch.setattr("torchrack.places.image._tags", lambda target: [tag])
    image = built("cpu")
    subprocess.run(["docker", "image", "rm", tag], check=True, capture_output=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text(f"#!/bin/sh\nexec cat {tmp_path}/saved\n")
    (tmp_path / "bin/docker").chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{path}")
    yield image
    monkeypatch.setenv("PATH", path)
    subprocess.run(["docker", "image", "rm", tag], capture_output=True)


def known(image: Image) -> bool:
    docker = [path for path in os.environ["PATH"].split(":") if Path(path, "docker").exists()][1]
    return subprocess.run([f"{docker}/docker", "image", "inspect", image.tag], capture_output=True).returncode == 0


class Listening(Quiet):
    def __init__(self, act: object = None) -> None:
        self.heard: list[str] = []
        self.act = act

    def update(self, text: str) -> None:
        self.heard.append(text)
        if callable(self.act) and "sent 1 of" in text:
            self.act()


@pytest.mark.ssh
@pytest.mark.docker
@pytest.mark.slow
def test_an_image_is_sent_where_it_is_not_known_and_only_there(away: Image, tmp_path: Path) -> None:
    with this_machine() as there:
        place, console = place_of(there, tmp_path), Listening()
        python = bring(place, "node0", away, False, Progress(console))
        assert known(away) and Path(python).stat().st_mode & 0o111
        assert f"node0: sent 4 of about 10 MB of {away.tag}" in " ".join(console.heard)
        again = Listening()
        assert bring(place, "node0", away, False, Progress(again)) == python and again.heard == []
        place.close()


@pytest.mark.ssh
@pytest.mark.docker
@pytest.mark.slow
def test_a_transfer_that_breaks_leaves_nothing(away: Image, tmp_path: Path) -> None:
    with this_machine() as there:
        machine = there.all[0]
        going = threading.Thread(target=machine.hang_up)
        place = place_of(there, tmp_path)
        with pytest.raises(TorchrackError, match="the connection broke"):
            bring(place, "node0", away, False, Progress(Listening(going.start)))
        going.join()
        assert wait_until(lambda: not tagged("docker load"), 10)
        assert not known(away) and [path.name for path in machine.folder.iterdir()] == ["python.lock"]
        place.close()


@pytest.mark.ssh
@pytest.mark.docker
@pytest.mark.slow
def test_ctrl_c_ends_a_transfer(away: Image, tmp_path: Path) -> None:
    save = tmp_path / "bin/docker"
    save.write_text(f"#!/bin/sh\nhead -c 3000000 {tmp_path}/saved\nexec sleep 60\n")
    with this_machine() as there:
        place, began = place_of(there, tmp_path), time.monotonic()
        going = Progress(Listening(lambda: os.kill(os.getpid(), signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):
            make_them(place, {"node0": Need(TORCH, True, "asked for", away)}, going)
        assert time.monotonic() - began < 20
        assert wait_until(lambda: not tagged("docker load"), 10) and not known(away)
