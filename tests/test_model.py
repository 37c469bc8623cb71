"""Plain data: sizes, racks, rack files with all of their errors at once, and the error tree."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from pydantic import ValidationError

from torchrack.model import errors
from torchrack.model.errors import CommandFailed, InvalidFile, TorchrackError
from torchrack.model.files import parse_yaml
from torchrack.model.rack import GiB, LocalRack, MiB, Rack, parse_size
from torchrack.teach.catalogue import Variant


@pytest.mark.parametrize(
    ("text", "size"),
    [("64m", 64 * MiB), ("1g", GiB), ("1.5GiB", 3 * GiB // 2), ("65536k", 64 * MiB), (1024, 1024), ("64 MB", 64 * MiB)],
)
def test_sizes_are_powers_of_two(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "many", "1t", "-1", True, None, 1.5])
def test_other_sizes_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="64m or 1g"):
        parse_size(text)


def test_addresses_are_two_digits_for_all_local_nodes() -> None:
    rack = Rack(nodes=32, mgmt_subnet="10.79.0.0/24", fabric_subnet="10.78.0.0/24")
    addresses = [rack.address(node, "fabric") for node in rack.node_names]
    assert (addresses[0], addresses[-1]) == ("10.78.0.10", "10.78.0.41")
    assert addresses == sorted(addresses), "c10d sorts agents by the text of their addresses"


def test_a_subnet_that_cannot_hold_the_nodes_is_refused() -> None:
    with pytest.raises(ValidationError, match="too small for 32 nodes"):
        Rack(nodes=32, mgmt_subnet="10.79.0.0/27")


def test_a_rack_file_with_three_errors_tells_all_three(tmp_path: Path) -> None:
    file = tmp_path / "rack.yaml"
    file.write_text("nodes: 99\nshm: huge\nwheels: 4\n")
    with pytest.raises(InvalidFile) as caught:
        parse_yaml(file, LocalRack)
    assert {key for key, _ in caught.value.problems} == {"nodes", "shm", "wheels"}
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{file}:") for line in lines[:3])
    assert lines[3].startswith("  fix: the keys are name, nodes")


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", "", "\x00"])
def test_what_is_no_rack_file_is_one_clear_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rack.yaml"
    file.write_text(text)
    with pytest.raises(InvalidFile, match=r"fix: "):
        parse_yaml(file, LocalRack)


def test_every_error_is_drawn_in_the_tree() -> None:
    for name, cls in vars(errors).items():
        if inspect.isclass(cls) and issubclass(cls, Exception):
            assert f" {name} " in f" {errors.__doc__} " or name in (errors.__doc__ or ""), name
            assert issubclass(cls, TorchrackError)


def test_a_failed_command_shows_argv_status_and_tail() -> None:
    error = CommandFailed(["docker", "compose", "up"], 17, "\n".join(map(str, range(40))), "make down")
    text = str(error)
    assert text.startswith("docker compose up: exit status 17\n")
    assert "| 39" in text and "| 5\n" not in text
    assert text.endswith("fix: make down")


def test_a_lab_says_what_its_rack_must_be() -> None:
    keys = {"title": "t", "expect": "hang", "culprit": [], "fix": "f"}
    assert Variant.model_validate(keys | {"rack": {"shm": "64m", "shm_shared": True}}).rack["shm"] == 64 * MiB
    for wrong in ({"shm": "lots"}, {"nodes": 3}, {"nic_names": "odd"}):
        with pytest.raises(ValidationError):
            Variant.model_validate(keys | {"rack": wrong})
