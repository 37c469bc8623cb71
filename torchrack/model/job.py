"""Job: how torchrun is started on a rack, and the changes that a broken side makes to it."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from torchrack.model.rack import Model, NetName

MAX_NPROC = 8
NCCL_VALUE_MAX = 1023  # NCCL reads nccl.conf into lines of 1024 bytes (src/misc/param.cc)
_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_ELASTIC = re.compile(r"^(\d+):(\d+)$")


def _env(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not _ENV_NAME.match(name):
            raise ValueError(f"{name!r} is not a variable name")
        if name == "NCCL_CONF_FILE":
            raise ValueError("NCCL_CONF_FILE is set by launch.sh; give the NCCL_* variable itself")
        if "\0" in value:
            raise ValueError(f"{name} holds a NUL byte, which no environment can carry")
        if name.startswith("NCCL_"):
            _check_nccl(name, value)
    return values


def _check_nccl(name: str, value: str) -> None:
    # A line of nccl.conf: no quoting exists, so what a line cannot hold cannot be set.
    if any(c in value for c in "\n\r"):
        raise ValueError(f"{name} holds a line break, which nccl.conf cannot carry")
    if len(value.encode()) > NCCL_VALUE_MAX:
        raise ValueError(f"{name} is longer than {NCCL_VALUE_MAX} bytes, which nccl.conf cannot carry")
    if value != value.strip() or not value:
        raise ValueError(f"{name} is empty or has blanks at an end, which nccl.conf cannot carry")


def _elastic(value: object) -> object:
    if isinstance(value, str):
        match = _ELASTIC.match(value)
        if not match:
            raise ValueError("must be MIN:MAX, such as 1:2")
        return int(match[1]), int(match[2])
    return value


def _ordered(value: tuple[int, int]) -> tuple[int, int]:
    if not 1 <= value[0] <= value[1]:
        raise ValueError("must be MIN:MAX with 1 <= MIN <= MAX")
    return value


Env = Annotated[dict[str, str], AfterValidator(_env)]
Elastic = Annotated[tuple[int, int], BeforeValidator(_elastic), AfterValidator(_ordered)]
Port = Annotated[int, Field(ge=1024, le=65535)]
Pin = Literal["fabric", "mgmt", "none"]
Launcher = Literal["torchrun", "fork"]


class NodeChange(Model):
    """What one node does differently: flags and variables set, either of them dropped, its pin; for broken sides."""

    flags: dict[str, str] = Field(default_factory=dict)
    drop: tuple[str, ...] = ()
    env: Env = Field(default_factory=dict)
    pin: Pin | None = None


class Occupy(Model):
    """A foreign program that holds a TCP port on a node before the job starts."""

    node: str
    net: NetName
    port: Port


class Job(Model):
    """How torchrun is started: processes a node, rendezvous, NIC pin, variables.

    `env` may hold NCCL_* too; they go to nccl.conf and nowhere else. `join_timeout` (seconds) is how long agents wait
    for each other; left out, it is computed from the rack's size and cores. `lost` is what follows when an agent is
    killed, as with its machine: the others are ended too, or go on, or go on and get it back once they work without it.
    """

    nproc: int = Field(default=1, ge=1, le=MAX_NPROC)
    mode: Literal["c10d", "static", "standalone"] = "c10d"
    launcher: Launcher = "torchrun"
    elastic: Elastic | None = None
    max_restarts: int = Field(default=0, ge=0)
    lost: Literal["end", "stay", "return"] = "end"
    pin: Pin = "fabric"
    endpoint_net: NetName = "fabric"
    port: Port = 29400
    join_timeout: int | None = Field(default=None, ge=1)
    env: Env = Field(default_factory=dict)
    absent: tuple[str, ...] = ()
    nodes: dict[str, NodeChange] = Field(default_factory=dict)
    occupy: Occupy | None = None

    def change(self, node: str) -> NodeChange:
        """The changes for `node`: those of "*" overlaid by its own."""
        every, own = self.nodes.get("*", NodeChange()), self.nodes.get(node, NodeChange())
        flags, drop, env = every.flags | own.flags, every.drop + own.drop, every.env | own.env
        return NodeChange(flags=flags, drop=drop, env=env, pin=own.pin or every.pin)


class RunSpec(Model):
    """What one run adds to a plan: passed at start, recorded, never deployed. `deadline` is in seconds."""

    id: str
    target: str
    """Path of the script, relative to a node's home."""
    args: tuple[str, ...] = ()
    deadline: float = Field(gt=0)
    title: str = ""
