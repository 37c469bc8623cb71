"""How torch gets to rented machines: who gets a virtual environment, and how one is made behind a real sshd."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from racks import Cli, Done, wait_until
from sshd import Machines, Quiet, machines
from test_preflight import report
from test_torch_wheel import make_wheel

from torchrack.model.errors import Lacking, NotInstalled
from torchrack.model.hosts import Host
from torchrack.places.ssh import Ssh
from torchrack.places.ssh_connect import Trust
from torchrack.places.torch_wheel import TORCH
from torchrack.run.phases import Progress
from torchrack.run.torch_there import Need, make_them, needs

OLD = "2.12.0+cu130"


def host(python: str | None = None) -> Host:
    return Host(name="h", address="h", python=python)


@pytest.mark.parametrize(
    ("source", "have", "wanted"),
    [
        ("python", ["", OLD], {}),
        ("auto", [OLD, OLD], {}),
        ("auto", ["", OLD], {"node0": "2.12.0"}),
        ("auto", ["", ""], {"node0": TORCH, "node1": TORCH}),
        ("auto", ["", "2.11.0", OLD], {"node0": TORCH}),
        ("venv", ["", OLD], {"node0": TORCH, "node1": TORCH}),
    ],
)
def test_who_gets_one(source: str, have: list[str], wanted: dict[str, str]) -> None:
    reports = {f"node{i}": report(i, torch=version) for i, version in enumerate(have)}
    found = needs(
        {node: host() for node in reports}, reports, source, dict.fromkeys(reports, NotInstalled("no Docker"))
    )
    assert {node: need.version for node, need in found.items()} == wanted


def test_a_python_that_the_inventory_names_is_left_alone() -> None:
    reports = {"node0": report(0, torch="")}
    assert needs({"node0": host("/opt/python")}, reports, "venv", {}) == {}


# On machines


class Remote(Cli):
    """The CLI with an inventory of machines that names no Python."""

    def on(self, there: Machines, command: str, *more: str) -> Done:
        file = there.inventory(self.home / "hosts.yml")
        told = json.loads(file.read_text())
        for one in told["all"]["hosts"].values():
            del one["torchrack_python"]
        file.write_text(json.dumps(told))
        return self(command, "--hosts", str(file), "--known-hosts", str(there.known_hosts), *more)


@pytest.mark.ssh
@pytest.mark.netns
@pytest.mark.slow
def test_a_plan_says_who_would_get_one_and_a_deploy_without_says_how(there: Machines, tmp_path: Path) -> None:
    cli = Remote(tmp_path / "home", "ssh", "remote")
    cli.home.mkdir()
    plan = cli.on(there, "deploy", "--plan", "--torch", "auto")
    assert plan.returncode == 0, plan.stderr
    assert f"node1 would get a virtual environment with torch {TORCH} (CPU): it has none" in plan.stderr
    assert "nothing was changed" in plan.stderr and not there.all[1].folder.exists()
    bare = cli.on(there, "deploy")
    assert (bare.returncode, "make deploy HOSTS=… TORCH=auto brings it" in bare.stderr) == (4, True), bare.stderr


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Machines]:
    """Two machines whose pip finds nothing but our empty wheels."""
    with machines(f"venv-{os.getpid()}", 2, tmp_path / "there") as made:
        for machine in made.all:
            wheels, conf = machine.home / "wheels", machine.home / "sshd/conf"
            make_wheel(wheels, "torch", f"{TORCH}+cpu", needs=["sympy"])
            for name in ("sympy", "numpy", "py_spy"):
                make_wheel(wheels, name, "1.0")
            pip = f"PIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1 PIP_FIND_LINKS={wheels}"
            conf.write_text(conf.read_text() + f"SetEnv {pip}\n")
        yield made


def place_of(there: Machines, tmp_path: Path) -> Ssh:
    hosts = [host.model_copy(update={"python": None}) for host in there.hosts()]
    return Ssh("venv", tmp_path / "state", hosts, Trust("known", there.known_hosts))


WANTED = {"node1": Need(TORCH, True, "it has none")}


@pytest.mark.ssh
@pytest.mark.netns
@pytest.mark.slow
def test_a_venv_is_made_once_and_found_from_then_on(there: Machines, tmp_path: Path) -> None:
    place = place_of(there, tmp_path)
    assert place.report("node1").torch == ""
    make_them(place, WANTED, Progress(Quiet()))
    found = place.report("node1")
    assert found.torch == f"{TORCH}+cpu"
    assert found.health.python == f"{there.all[1].folder}/python/bin/python"
    assert place.report("node0").torch == "", "nobody asked for one there"
    for wheel in (there.all[1].home / "wheels").iterdir():
        wheel.unlink()
    make_them(place, WANTED, Progress(Quiet()))  # there is nothing to install from any more, and no need


@pytest.mark.ssh
@pytest.mark.netns
@pytest.mark.slow
def test_what_pip_says_is_told_and_nothing_half_made_stays(there: Machines, tmp_path: Path) -> None:
    place = place_of(there, tmp_path)
    for wheel in (there.all[1].home / "wheels").glob("numpy*"):
        wheel.unlink()
    with pytest.raises(Lacking, match=r"(?s)node1: .*No matching distribution found for numpy"):
        make_them(place, WANTED, Progress(Quiet()))
    assert [path.name for path in there.all[1].folder.iterdir()] == ["python.lock"]


@pytest.mark.ssh
@pytest.mark.netns
@pytest.mark.slow
def test_a_client_that_goes_leaves_nothing_half_made(there: Machines, tmp_path: Path) -> None:
    place = place_of(there, tmp_path)
    going = threading.Timer(0.0, lambda: None)

    class Leaving(Quiet):
        def update(self, text: str) -> None:
            nonlocal going
            going = threading.Timer(0.3, there.all[1].hang_up)
            going.start()

    with pytest.raises(Lacking):
        make_them(place, WANTED, Progress(Leaving()))
    going.join()
    folder = there.all[1].folder
    assert wait_until(lambda: [path.name for path in folder.iterdir()] == ["python.lock"], 20), list(folder.iterdir())
    time.sleep(0.5)
    assert "pip" not in json.dumps(there.all[1].processes())
