"""The Docker engine as a rack sees it: what carries which labels, how to remove it, what a complaint means."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from typing import Any, Literal

from requests import RequestException

from torchrack.model.errors import CommandFailed, NotEnough, NotRunning, TorchrackError
from torchrack.places.docker_sdk import APIClient, APIError, ContextAPI, DockerException, from_env
from torchrack.places.image import engine_check
from torchrack.places.subnets import InUse

ANSWER_S = 20  # seconds for any one request


@dataclass(frozen=True)
class Thing:
    """A container or network of the engine, with the labels that say whose it is."""

    kind: Literal["container", "network"]
    id: str
    name: str
    labels: Mapping[str, str] = field(compare=False)
    state: str = ""
    status: str = ""
    subnets: tuple[IPv4Network, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def connect() -> APIClient:
    """A client of the engine that the `docker` command would talk to; raises a Lacking error."""
    _refuse_unread_context()
    try:
        return from_env(timeout=ANSWER_S).api
    except DockerException as error:
        engine_check()  # knows the reason, and the command that fixes it
        raise NotRunning(f"the Docker engine does not answer: {error}", "docker info") from error


def _refuse_unread_context() -> None:
    """The SDK cannot read contexts where there is no config.json, and would quietly talk to another engine."""
    name = os.environ.get("DOCKER_CONTEXT", "default")
    if name != "default" and not os.environ.get("DOCKER_HOST") and ContextAPI.get_context(name) is None:
        inspect = f"docker context inspect {name} --format '{{{{.Endpoints.docker.Host}}}}'"
        raise NotRunning(f"cannot read the docker context {name}", f"export DOCKER_HOST=$({inspect})")


def containers(api: APIClient, labels: Mapping[str, str] | None = None) -> list[Thing]:
    """Every container, running or not, that carries all of `labels`."""
    with talking("docker", "ps", "--all"):
        found = api.containers(all=True, filters=_filters(labels))
    return [
        Thing("container", item["Id"], _name(item), item["Labels"] or {}, item["State"], item["Status"])
        for item in found
    ]


def _name(item: Mapping[str, Any]) -> str:
    return str(item["Names"][0]).lstrip("/") if item["Names"] else str(item["Id"])[:12]


def networks(api: APIClient, labels: Mapping[str, str] | None = None) -> list[Thing]:
    """Every network that carries all of `labels`."""
    with talking("docker", "network", "ls"):
        found = api.networks(filters=_filters(labels))
    return [
        Thing("network", item["Id"], item["Name"], item["Labels"] or {}, subnets=tuple(_subnets(item["IPAM"] or {})))
        for item in found
    ]


def _subnets(ipam: Mapping[str, Any]) -> Iterable[IPv4Network]:
    values = [config.get("Subnet", "") for config in ipam.get("Config") or []]
    return (IPv4Network(value) for value in values if "." in value)


def _filters(labels: Mapping[str, str] | None) -> dict[str, list[str]]:
    return {"label": [f"{key}={value}" for key, value in (labels or {}).items()]}


def subnets_in_use(there: Iterable[Thing]) -> list[InUse]:
    return [InUse(subnet, f"docker network {thing.name}") for thing in there for subnet in thing.subnets]


def remove(api: APIClient, thing: Thing) -> str:
    """Ask for `thing` to be removed; returns why that did not work (yet), empty if it did or was already gone."""
    try:
        if thing.kind == "container":
            api.remove_container(thing.id, force=True, v=True)
        else:
            api.remove_network(thing.id)
    except APIError as error:
        return "" if error.status_code == 404 else str(error.explanation or error)
    except RequestException as error:
        return str(error)
    return ""


@contextmanager
def talking(*argv: str) -> Iterator[None]:
    """Turn the SDK's errors into ours; `argv` is the command line that asks the same of the engine."""
    try:
        yield
    except APIError as error:
        raise complaint(argv, 1, str(error)) from error
    except (DockerException, RequestException) as error:
        raise NotRunning(f"the Docker engine has stopped answering: {error}", "docker info") from error


class SubnetLost(NotEnough):
    """Somebody took one of our subnets between our look and our `up`."""


def complaint(argv: Sequence[str], code: int | None, output: str) -> TorchrackError:
    """What a failed `docker` command means, from its words."""
    last = (output.strip().splitlines() or [""])[-1].strip()
    if "Pool overlaps" in output:
        return SubnetLost(f"somebody else took a subnet of this rack: {last}", "try again: another one is chosen")
    if "non-overlapping" in output:
        return NotEnough(f"Docker has no subnet left to give: {last}", "docker network prune")
    if "no space left on device" in output.lower():
        return NotEnough(f"the Docker engine's disk is full: {last}", "docker system df; docker system prune")
    if "No such image" in output:
        return CommandFailed(argv, code, output, "make image")
    return CommandFailed(argv, code, output, "docker info, then try again")
