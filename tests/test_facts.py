"""facts.py as nodes run it (python -I -S -): what it says of this machine, and of packages in an environment."""

from __future__ import annotations

import ast
import json
import socket
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from torchrack.places.spawned import FACTS_SCRIPT


def facts(python: str | Path = sys.executable, *args: str) -> dict[str, Any]:
    argv = [str(python), "-I", "-S", "-", *args]
    done = subprocess.run(argv, input=FACTS_SCRIPT.read_bytes(), capture_output=True, check=True)
    found: dict[str, Any] = ast.literal_eval(done.stdout.decode())
    return found


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """The site-packages of an environment without pip, whose Python is bin/python."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    return next((tmp_path / "env").glob("lib/python*/site-packages"))


def torch_of(packages: Path) -> str:
    return str(facts(packages.parents[2] / "bin/python")["torch"])


def test_addresses_are_those_that_ip_tells() -> None:
    told = json.loads(subprocess.run(["ip", "-j", "-4", "addr"], capture_output=True, check=True).stdout)
    wanted = [(link["ifname"], info["local"], info["prefixlen"]) for link in told for info in link["addr_info"]]
    assert [(nic["name"], nic["address"], nic["prefix"]) for nic in facts()["nics"]] == wanted


def test_the_version_of_a_wheel_is_in_the_folders_name(packages: Path) -> None:
    assert torch_of(packages) == "", "this environment does not see what ours has"
    (packages / "torch-9.8.7+cu130.dist-info").mkdir()
    assert torch_of(packages) == "9.8.7+cu130"


def test_a_build_from_source_tells_its_version_in_pkg_info(packages: Path, tmp_path: Path) -> None:
    source = tmp_path / "pytorch"
    (source / "torch.egg-info").mkdir(parents=True)
    (source / "torch.egg-info/PKG-INFO").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.0a0+git12\n")
    (packages / "easy-install.pth").write_text(f"import sys\n# a comment\n\n{source}\n")
    assert torch_of(packages) == "9.9.0a0+git12"


def test_an_environment_may_see_the_systems_packages(packages: Path) -> None:
    top = packages.parents[2]
    settings = (top / "pyvenv.cfg").read_text()
    (top / "pyvenv.cfg").write_text(settings.replace("packages = false", "packages = true"))
    (packages / "torch-1.2.3.dist-info").mkdir()
    assert torch_of(packages) == "1.2.3", "its own come first"


def test_health_names_what_a_deploy_put_there(tmp_path: Path) -> None:
    def said() -> str:
        return str(facts(sys.executable, "--health", str(tmp_path), "lab", "node0")["health"]["deployed"])

    current = tmp_path / "lab/node0/current"
    assert said() == ""
    (current / "scripts").mkdir(parents=True)
    (current / "scripts/env.sh").write_text("export A=1\n")
    first = said()
    assert len(first) == 8
    (current / "scripts/env.sh").write_text("export A=2\n")
    assert said() not in ("", first)


def test_listeners_are_told_by_kernels_without_sock_diag_too() -> None:
    names: dict[str, Any] = {}
    exec(FACTS_SCRIPT.read_text().removesuffix("main()\n"), names)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port in names["listening"](), "as it is"
        names["kernel"] = refuses
        assert port in names["listening"]()


def refuses(*_: object) -> None:
    raise OSError(2, "netlink")
