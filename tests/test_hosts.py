"""Naming hosts: lists and Ansible inventories, with every error and its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrack.model.errors import InvalidFile, NotFound, UsageError
from torchrack.model.hosts import FOLDER, Host, parse_hosts


def test_a_list() -> None:
    a, b, c = parse_hosts("root@a, ubuntu@10.0.0.2:2222,[fe80::1]:22")
    assert a == Host(name="a", address="a", user="root")
    assert (b.user, b.address, b.port, str(b)) == ("ubuntu", "10.0.0.2", 2222, "ubuntu@10.0.0.2:2222")
    assert (c.user, c.address, c.port, str(c)) == (None, "fe80::1", 22, "[fe80::1]:22")


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ("", "names no host"),
        ("@a", "no user"),
        ("u@", "names no host"),
        ("a:", "is not a port"),
        ("a:ssh", "is not a port"),
        ("a:70000", "port"),
        ("a b", "blanks"),
        ("-oProxyCommand=x", "start with -"),
        ("u@a:1:2", "is not user@host:port"),
    ],
)
def test_a_bad_item_is_named_by_its_number(item: str, problem: str) -> None:
    with pytest.raises(UsageError, match="HOSTS item 2 .*" + problem):
        parse_hosts(f"good,{item}")


def test_every_bad_item_is_told() -> None:
    with pytest.raises(UsageError, match=r"(?s)item 1.*item 3.*fix: HOSTS="):
        parse_hosts("@a,b,c:x")
    with pytest.raises(UsageError, match="HOSTS is empty"):
        parse_hosts(" ")


def test_a_host_twice_would_be_two_nodes_on_one_machine() -> None:
    with pytest.raises(UsageError, match="item 3 is the same machine as HOSTS item 1"):
        parse_hosts("u@a:22,b,root@a:22")


INVENTORY = """
all:
  vars: {ansible_user: root, torchrack_subnet: 10.1.0.0/16, app_version: 3}
  children:
    gpu:
      vars:
        ansible_user: ubuntu
        ansible_port: 2222
      hosts:
        first:
          ansible_host: 192.0.2.1
          ansible_ssh_private_key_file: ~/.ssh/rented
          torchrack_nic: ens6
        node[08:10]:
        last:
          ansible_user: me
          torchrack_python: /opt/venv/bin/python
          torchrack_folder: /scratch/me/
other:
  hosts:
    last: {}
    more: {}
"""


def test_an_inventory(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text(INVENTORY)
    hosts = {host.name: host for host in parse_hosts(str(file))}
    assert list(hosts) == ["first", "node08", "node09", "node10", "last", "more"]
    assert str(hosts["first"]) == "ubuntu@192.0.2.1:2222"
    assert (hosts["first"].key, hosts["first"].nic, hosts["first"].subnet) == ("~/.ssh/rented", "ens6", "10.1.0.0/16")
    assert (hosts["node09"].address, hosts["node09"].folder) == ("node09", FOLDER)
    assert (hosts["last"].user, hosts["last"].port, hosts["last"].folder) == ("me", 2222, "/scratch/me")
    assert (hosts["more"].user, hosts["more"].port) == ("root", None)


def test_every_error_of_an_inventory_has_its_line_and_key(tmp_path: Path) -> None:
    file = tmp_path / "bad.yml"
    file.write_text(
        "all:\n"
        "  hots: {}\n"
        "  vars:\n"
        "    ansible_ssh_pass: secret\n"
        "    torchrack_nics: eth0\n"
        "  hosts:\n"
        "    a: {ansible_port: many}\n"
        "    b: {ansible_host: '{{ address }}'}\n"
        "    c: {ansible_connection: local}\n"
        "    d: {torchrack_subnet: 10.0.0.1/8}\n"
        "    a: {}\n"
        "    e: {ansible_prot: 2222, ansible_become_user: root, ansible_ssh_private_key: ansibles}\n"
    )
    with pytest.raises(InvalidFile) as caught:
        parse_hosts(str(file))
    text = str(caught.value)
    for place in (
        "2: all.hots",
        "4: all.vars.ansible_ssh_pass",
        "5: all.vars.torchrack_nics",
        "7: all.hosts.a.ansible_port",
        "8: all.hosts.b.ansible_host",
        "9: all.hosts.c.ansible_connection",
        "10: all.hosts.d.torchrack_subnet",
        "11: all.hosts.a: is there twice",
        "12: all.hosts.e.ansible_prot: nobody reads this; is ansible_port meant?",
    ):
        assert f"{file}:{place}" in text, place
    assert "secret" not in text and "become" not in text and "ansible_ssh_private_key:" not in text
    assert "fix: of a host are read ansible_host" in text


def test_two_names_of_one_machine(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text("all: {hosts: {a: {ansible_host: 192.0.2.1}, b: {ansible_host: 192.0.2.1}}}\n")
    with pytest.raises(InvalidFile, match=r"1: all\.hosts\.b\.ansible_host: is the same machine as a"):
        parse_hosts(str(file))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gpu]\na\nb\n", "ansible-inventory"),
        ("- a\n", "not a mapping of groups"),
        ("all: [a]\n", "1: all: must be a mapping"),
        ("all:\n", "names no host"),
        ("all: {hosts: {a: [1]}}\n", "must be a mapping"),
        ("all: {children: {g: {hosts: {a: {ansible_port: 99999}}}}}\n", "1: all.children.g.hosts.a.ansible_port"),
    ],
)
def test_what_is_no_inventory(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text(text)
    with pytest.raises(InvalidFile) as caught:
        parse_hosts(str(file))
    assert said in str(caught.value)


def test_no_such_inventory() -> None:
    with pytest.raises(NotFound, match=r"no inventory nowhere\.yml"):
        parse_hosts("nowhere.yml")
