"""Hosts: rented machines as the user names them, by `user@a,user@b:2222` or by an Ansible YAML inventory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError

from torchrack.model.errors import UsageError
from torchrack.model.files import problems
from torchrack.model.inventory import read_inventory
from torchrack.model.rack import Model, Subnet

MAX_HOSTS = 4096
FOLDER = "~/.torchrack"
_ITEM = re.compile(r"^(?:(?P<user>[^@]*)@)?(?:\[(?P<v6>[^\]]*)\]|(?P<host>[^:@\[\]]*))(?::(?P<port>[^:]*))?$")
_INVENTORY = (".yml", ".yaml", ".ini", ".json")


def _plain(value: str) -> str:
    # Nothing of it reaches a shell of ours, but a name with a blank is a typing error, and one with a dash an option.
    if not value or value.startswith("-") or any(c.isspace() or not c.isprintable() for c in value):
        raise ValueError("must not be empty, start with - or hold blanks")
    return value


def _folder(value: str) -> str:
    if not value.startswith(("/", "~/")):
        raise ValueError("must be absolute or start with ~/")
    return value.rstrip("/")


def _one_line(value: str) -> str:
    if not value or "\0" in value or "\n" in value:
        raise ValueError("must be a path")
    return value


Plain = Annotated[str, AfterValidator(_plain)]
File = Annotated[str, AfterValidator(_one_line)]


class Host(Model):
    """One rented machine. What is left out comes from ~/.ssh/config, then from ssh's defaults.

    `key` is a private key's path here. `nic` or `subnet` names the data network; left out, the plan chooses. `python`
    is the interpreter there that has torch; `folder` holds all that torchrack writes there.
    """

    name: Plain
    address: Plain
    user: Plain | None = None
    port: int | None = Field(default=None, ge=1, le=65535)
    key: File | None = None
    nic: Plain | None = None
    subnet: Subnet | None = None
    python: File | None = None
    folder: Annotated[File, AfterValidator(_folder)] = FOLDER

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        user = f"{self.user}@" if self.user else ""
        return f"{user}{address}" + (f":{self.port}" if self.port else "")


def parse_hosts(text: str) -> tuple[Host, ...]:
    """`user@a,user@b:2222`, or the path of an Ansible YAML inventory; node0 is the first host, and so on.

    Raises UsageError, NotFound or InvalidFile, each with every problem and its place.
    """
    if not text.strip():
        raise UsageError("HOSTS is empty", "HOSTS='user@a,user@b:2222', or HOSTS=inventory.yml")
    path = Path(text).expanduser()
    if text.endswith(_INVENTORY) or "/" in text or path.is_file():
        return _of_inventory(path)
    return _of_list(text)


def _of_list(text: str) -> tuple[Host, ...]:
    found, wrong = list[Host](), list[str]()
    for number, item in enumerate((part.strip() for part in text.split(",")), 1):
        try:
            found.append(_of_item(item))
        except ValueError as error:
            wrong.append(f"HOSTS item {number} {item!r}: {error}")
    names = [f"HOSTS item {number}" for number in range(1, len(found) + 1)]
    wrong += [] if wrong else [f"{names[second]} {problem}" for second, problem in _twice(found, names)]
    if wrong:
        raise UsageError("\n".join(wrong), "HOSTS='user@a,user@b:2222' (an IPv6 address in brackets)")
    return tuple(found)


def _of_item(item: str) -> Host:
    match = _ITEM.match(item)
    if match is None:
        raise ValueError("is not user@host:port")
    user, port = match["user"], match["port"]
    address = match["v6"] if match["v6"] is not None else match["host"]
    if not address:
        raise ValueError("names no host")
    if user == "":
        raise ValueError("has an @ but no user before it")
    if port is not None and not port.isdigit():
        raise ValueError(f"{port!r} is not a port")
    try:
        return Host(name=address, address=address, user=user, port=int(port) if port else None)
    except ValidationError as error:
        raise ValueError("; ".join(f"{key} {problem}" for key, problem in problems(error))) from None


def _of_inventory(path: Path) -> tuple[Host, ...]:
    inventory = read_inventory(path)
    hosts: list[Host] = []
    for name, variables in inventory.hosts.items():
        try:
            hosts.append(Host.model_validate({"name": name, "address": name} | inventory.keys(variables)))
        except ValidationError as error:
            for key, problem in problems(error):
                inventory.complain(name, key, problem)
    if not inventory.problems:
        where = [host.name for host in hosts]
        for second, problem in _twice(hosts, where):
            inventory.complain(where[second], "address", problem)
    inventory.raise_problems()
    return tuple(hosts)


def _twice(hosts: Sequence[Host], names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(index, problem) of each host that is an earlier one again: one machine would be two nodes."""
    seen: dict[tuple[str, int | None], int] = {}
    for index, host in enumerate(hosts):
        first = seen.setdefault((host.address, host.port), index)
        if first != index:
            yield index, f"is the same machine as {names[first]}: {host}"
