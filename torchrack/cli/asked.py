"""How flags, rack file and the rack that is up make one request, with every problem told at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from torchrack.model.errors import UsageError
from torchrack.model.files import M, parse_yaml, problems
from torchrack.model.job import Job
from torchrack.model.rack import LocalRack
from torchrack.run.folder import RackFolder

SHORTEST_SECRET = 6  # characters; masking a shorter one would riddle the logs
VALID = {
    "nodes": "NODES=2 (1 to 32)",
    "nproc": "NPROC=1 (1 to 8)",
    "runtime": "RUNTIME=auto, compose or netns",
    "name": "RACK=lab (lower-case letters, digits and -)",
    "shm": "SHM=1g (1m to 512g)",
    "pin": "PIN=fabric, mgmt or none",
    "mode": "MODE=c10d, static or standalone",
    "launcher": "LAUNCHER=torchrun or fork",
    "elastic": "ELASTIC=1:2",
    "port": "PORT=29400 (1024 to 65535)",
    "env": "ENV='NAME=VALUE'",
}


def rack(file: Path | None, wanted: Mapping[str, object] | None = None, **flags: str | None) -> LocalRack:
    """The rack that is asked for: flags over the rack file, what a lab wants, the rack that is up, defaults.

    Raises InvalidFile for the file, UsageError for the flags; each lists all of its problems.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    base = parse_yaml(file, LocalRack).model_dump(exclude_unset=True) if file else {}
    name = given.get("name") or base.get("name") or "lab"
    return validated(LocalRack, _standing(str(name)) | dict(wanted or {}) | base | given | {"name": name})


def _standing(name: str) -> dict[str, object]:
    recorded = RackFolder(name).read_rack() if name.replace("-", "").isalnum() else None
    if recorded is None or recorded.rack is None or recorded.runtime == "ssh":
        return {}
    return recorded.asked.model_dump() | {"runtime": recorded.runtime}


def host_keys(value: str) -> Literal["known", "accept-new"]:
    """What to do about new host keys; raises UsageError."""
    if value == "known":
        return "known"
    if value == "accept-new":
        return "accept-new"
    raise UsageError(f"host keys: {value!r} is not a choice", "HOSTKEYS=known or accept-new")


def torch_from(value: str) -> Literal["python", "venv", "image", "auto"]:
    """How torch gets to hosts; raises UsageError."""
    if value in ("python", "venv", "image", "auto"):
        return value  # type: ignore[return-value]
    raise UsageError(f"torch: {value!r} is not a choice", "TORCH=python, venv, image or auto")


def secrets(names: list[str]) -> dict[str, str]:
    """Our own variables of these names; raises UsageError where one is unset, empty or too short to be masked."""
    short = [name for name in names if len(os.environ.get(name, "")) < SHORTEST_SECRET]
    if short:
        why = f"{', '.join(short)}: not set here, or shorter than {SHORTEST_SECRET} characters"
        raise UsageError(why, f"export {short[0]}=…, then SECRET={short[0]}")
    return {name: os.environ[name] for name in names}


def job(env: list[str] | None = None, **flags: str | None) -> Job:
    """The job that is asked for; raises UsageError with all problems."""
    given: dict[str, object] = {key: value for key, value in flags.items() if value is not None}
    return validated(Job, given | {"env": dict(pair(item) for item in env or ())})


def pair(item: str, flag: str = "--env") -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals:
        raise UsageError(f"{flag} {item!r} is not NAME=VALUE", f"{flag.strip('-').upper()}='NAME=VALUE'")
    return name, value


def validated(model: type[M], data: dict[str, object]) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        found = problems(error)
        hints = [VALID[key] for key, _ in found if key in VALID]
        message = "\n".join(f"{key}: {problem}" for key, problem in found)
        raise UsageError(message, "; ".join(dict.fromkeys(hints)) or None) from error
