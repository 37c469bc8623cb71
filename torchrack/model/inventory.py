"""An Ansible YAML inventory, read for what concerns us; every problem with its line and its key.

The same file serves ansible-playbook and the ssh place. Precedence is Ansible's: a group's variables win over its
parents', a host's own over all groups'. https://docs.ansible.com/ansible/latest/inventory_guide/intro_inventory.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from torchrack.model.errors import InvalidFile, NotFound
from torchrack.model.files import LOADER

# Ansible's name (older ones too) -> Host's.
ANSIBLE = {
    "ansible_host": "address",
    "ansible_ssh_host": "address",
    "ansible_user": "user",
    "ansible_ssh_user": "user",
    "ansible_port": "port",
    "ansible_ssh_port": "port",
    "ansible_ssh_private_key_file": "key",
    "ansible_private_key_file": "key",
}
OURS = {f"torchrack_{key}": key for key in ("nic", "subnet", "python", "folder")}
READ = ("ansible_host", "ansible_user", "ansible_port", "ansible_ssh_private_key_file", *OURS)
# What would change where or how Ansible connects, and which the ssh place does not read from here.
REFUSED = {
    "ansible_password": "passwords are not used: give a key (ansible_ssh_private_key_file) or an agent",
    "ansible_ssh_pass": "passwords are not used: give a key (ansible_ssh_private_key_file) or an agent",
    "ansible_ssh_common_args": "put this into ~/.ssh/config, which both tools read (ProxyJump, for example)",
    "ansible_ssh_extra_args": "put this into ~/.ssh/config, which both tools read",
}
MISSPELT = 0.905  # of difflib; what Ansible itself has beside these variables is at most 0.902 like them
_RANGE = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]")
_GROUP_KEYS = ("hosts", "vars", "children")


class Value(NamedTuple):
    """One variable with the place where it was set."""

    value: Any
    line: int
    path: str


Variables = Mapping[str, Value]


@dataclass
class Inventory:
    path: Path
    grouped: dict[str, dict[str, Value]] = field(default_factory=dict)
    own: dict[str, dict[str, Value]] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)

    @property
    def hosts(self) -> dict[str, dict[str, Value]]:
        """Host name to its variables, in the order of the file."""
        return {name: variables | self.own[name] for name, variables in self.grouped.items()}

    def keys(self, variables: Variables) -> dict[str, Any]:
        """The variables that describe a Host, under Host's names."""
        known = ANSIBLE | OURS
        return {known[name]: value.value for name, value in variables.items() if name in known}

    def complain(self, host: str, key: str, problem: str) -> None:
        """Note a problem with what Host calls `key`, at the line that set it."""
        known = ANSIBLE | OURS
        set_here = [value for name, value in self.hosts[host].items() if known.get(name) == key]
        self.note(*(set_here[-1][1:] if set_here else (0, f"hosts.{host}")), problem)

    def note(self, line: int, path: str, problem: str) -> None:
        self.problems.append((f"{line}: {path}" if line else path, problem))

    def raise_problems(self) -> None:
        if not self.problems and not self.hosts:
            self.note(1, "all", "names no host")
        if self.problems:
            hint = f"of a host are read {', '.join(READ)}"
            raise InvalidFile(str(self.path), self.problems, hint)


def read_inventory(path: Path) -> Inventory:
    """Raises NotFound, or InvalidFile where it is no YAML; other problems are collected in the result."""
    try:
        root = yaml.compose(path.read_text(), Loader=LOADER)
    except FileNotFoundError as error:
        raise NotFound(f"no inventory {path}", "check the path, or HOSTS='user@a,user@b:2222'") from error
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"cannot read {path}: {error}", "check the path") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = str(getattr(error, "problem", None) or error)
        raise _not_yaml(path, mark.line + 1 if mark else 1, what) from error
    if not isinstance(root, yaml.MappingNode):
        raise _not_yaml(path, 1, "is not a mapping of groups")
    inventory = Inventory(path)
    groups = {name.value: group for name, group in _pairs(inventory, root, "")}
    everyone: Variables = {}
    for name in sorted(groups, key=lambda name: name != "all"):  # stable; every other group is a child of `all`
        made = _group(inventory, groups[name], name, everyone)
        everyone = made if name == "all" else everyone
    return inventory


def _not_yaml(path: Path, line: int, what: str) -> InvalidFile:
    hint = f"correct that line; an INI inventory becomes one in YAML by ansible-inventory -i {path} --list --yaml"
    return InvalidFile(str(path), [(str(line), what)], hint)


def _pairs(inventory: Inventory, node: yaml.Node, path: str) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """The entries of a mapping; an empty value is none. A key given twice is a problem: YAML would drop the first."""
    if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null"):
        return
    if not isinstance(node, yaml.MappingNode):
        inventory.note(node.start_mark.line + 1, path, "must be a mapping")
        return
    seen: set[str] = set()
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            inventory.note(line, path, "has a key that is no plain word")
        elif key.value in seen:
            inventory.note(line, f"{path}.{key.value}".lstrip("."), "is there twice")
        else:
            seen.add(key.value)
            yield key, value


def _group(inventory: Inventory, node: yaml.Node, path: str, inherited: Variables) -> Variables:
    """Take in a group and those below it; returns its variables, its parents' included."""
    parts = {key.value: (key, value) for key, value in _pairs(inventory, node, path)}
    for name in parts.keys() - set(_GROUP_KEYS):
        line = parts[name][0].start_mark.line + 1
        inventory.note(line, f"{path}.{name}", f"is not one of {', '.join(_GROUP_KEYS)}")
    own = dict(inherited)
    if "vars" in parts:
        own |= _variables(inventory, parts["vars"][1], f"{path}.vars")
    if "hosts" in parts:
        for key, value in _pairs(inventory, parts["hosts"][1], f"{path}.hosts"):
            where = f"{path}.hosts.{key.value}"
            variables = _variables(inventory, value, where)
            for name in _expanded(key.value):
                inventory.grouped[name] = inventory.grouped.get(name, {}) | own
                inventory.own[name] = inventory.own.get(name, {}) | variables
    if "children" in parts:
        for key, value in _pairs(inventory, parts["children"][1], f"{path}.children"):
            _group(inventory, value, f"{path}.children.{key.value}", own)
    return own


def _variables(inventory: Inventory, node: yaml.Node, path: str) -> dict[str, Value]:
    found = {}
    for key, value in _pairs(inventory, node, path):
        name, line = key.value, key.start_mark.line + 1
        where = f"{path}.{name}"
        if name in REFUSED:
            inventory.note(line, where, REFUSED[name])
        elif name == "ansible_connection" and value.value not in ("ssh", "paramiko", "paramiko_ssh", "smart"):
            inventory.note(line, where, f"{value.value!r}: only hosts behind ssh can be nodes")
        elif name.startswith("torchrack_") and name not in OURS:
            inventory.note(line, where, f"is not one of {', '.join(OURS)}")
        elif name not in ANSIBLE and (meant := get_close_matches(name, ANSIBLE, 1, MISSPELT)):
            inventory.note(line, where, f"nobody reads this; is {meant[0]} meant?")
        elif name in ANSIBLE or name in OURS:
            plain = _plain(inventory, value, line, where)
            found[name] = Value(plain, line, where)
    return found


def _plain(inventory: Inventory, node: yaml.Node, line: int, where: str) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        inventory.note(line, where, "must be a plain value")
        return None
    if "{{" in node.value:
        inventory.note(line, where, f"{node.value!r} is a template; only Ansible could tell its value")
        return None
    value = yaml.SafeLoader("").construct_object(node)
    return value if isinstance(value, int) and not isinstance(value, bool) and where.endswith("port") else node.value


def _expanded(name: str) -> list[str]:
    """node[01:03] means node01, node02, node03, as Ansible has it."""
    match = _RANGE.search(name)
    if match is None:
        return [name]
    first, last, step = match[1], match[2], int(match[3] or 1)
    numbers = (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1, max(1, step)))
    return [more for n in numbers for more in _expanded(name[: match.start()] + n + name[match.end() :])]
