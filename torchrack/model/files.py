"""YAML files to validated models: every problem of a file at once, each as file:key: problem."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import ValidationError

from torchrack.model.errors import InvalidFile, NotFound
from torchrack.model.rack import Model

M = TypeVar("M", bound=Model)
LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where it was built


def parse_yaml(path: Path, model: type[M]) -> M:
    """A YAML file as a model; raises InvalidFile with every problem as file:key: problem."""
    try:
        data = yaml.load(path.read_text(), Loader=LOADER)
    except FileNotFoundError as error:
        raise NotFound(f"no file {path}", "check the path") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f"line {where.line + 1}" if where else "?"
        raise InvalidFile(str(path), [(line, str(getattr(error, "problem", error)))], "fix the YAML") from error
    if not isinstance(data, Mapping):
        raise InvalidFile(str(path), [("(whole file)", "is not a mapping of keys to values")], "key: value lines")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InvalidFile(str(path), problems(error), f"the keys are {', '.join(model.model_fields)}") from error


def problems(error: ValidationError) -> list[tuple[str, str]]:
    """(key, problem) of every error that pydantic found, the value it saw included."""
    return [
        (
            ".".join(map(str, e["loc"])) or "(whole file)",
            f"{e['msg'].removeprefix('Value error, ')}, got {e['input']!r:.60}",
        )
        for e in error.errors()
    ]
