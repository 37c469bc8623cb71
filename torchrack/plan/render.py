"""Plan to files, through templates/ under StrictUndefined: templates print a plan and decide nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import jinja2

from torchrack.plan.plan import NodePlan, Plan

PACKAGE = Path(__file__).resolve().parent.parent
TEMPLATES = PACKAGE.parent / "templates"
CONSTANT_FILES = ("launch.sh", "rank.sh")


@cache
def environment() -> jinja2.Environment:
    """The one Jinja environment: strict about undefined names, with `sh` to quote a value for bash."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    env.filters["sh"] = quoted
    return env


def quoted(value: str) -> str:
    """A value in single quotes for bash, always: shlex.quote leaves commas bare, which reads like a list."""
    return "'" + value.replace("'", "'\\''") + "'"


def node_files(plan: Plan) -> dict[str, dict[str, bytes]]:
    """Every node's env.sh, nccl.conf and hosts: a function of the plan alone."""
    hosts = hosts_file(plan.hosts)  # the same on every node; rendered for each of 1,024 it would be a million lines
    return {node.node: _own_files(plan, node) | {"hosts": hosts} for node in plan.nodes}


def hosts_file(hosts: Iterable[tuple[str, str]]) -> bytes:
    """/etc/hosts of every node, from (mgmt address, name) of each; local places install these very bytes."""
    return _render("hosts.j2", hosts=tuple(hosts))


def _own_files(plan: Plan, node: NodePlan) -> dict[str, bytes]:
    return {name: _render(f"{name}.j2", plan=plan, node=node) for name in ("env.sh", "nccl.conf")}


def constant_files() -> dict[str, bytes]:
    """launch.sh, rank.sh, the forking launcher and the supervisor: the same bytes on every node of every place."""
    files = {name: _render(f"{name}.j2") for name in CONSTANT_FILES}
    return files | {name: (PACKAGE / "node" / name).read_bytes() for name in ("supervisor.py", "forked.py")}


def sha256(files: Mapping[str, bytes]) -> dict[str, str]:
    """Hex digest of each file's content."""
    return {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}


def digest(files: Mapping[str, bytes]) -> str:
    """One short name for a set of files, e.g. 3f2a91c0: changes when any path or content does."""
    lines = "".join(f"{h}  {path}\n" for path, h in sorted(sha256(files).items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:8]


def _render(name: str, **values: object) -> bytes:
    return environment().get_template(name).render(**values).encode()
