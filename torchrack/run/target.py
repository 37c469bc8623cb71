"""What a run starts: the files that travel to every node, and the script among them."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchrack.model.errors import Lacking, NotFound, UsageError
from torchrack.places.base import Place

SKIPPED = frozenset(
    {".git", ".venv", "venv", ".torchrack", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache"}
)
MAX_BYTES = 200 << 20


@dataclass(frozen=True)
class Target:
    """`files` are the same bytes on every node, under `folder` of each node's home; `script` is one of them."""

    title: str
    folder: str
    script: str
    files: Mapping[str, bytes]
    cwd: str | None = None
    """Relative to a node's home; None: a fresh folder of the run."""
    beside: frozenset[str] = frozenset()
    """Names of modules that lie beside the folder, which do not travel."""

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.script}"

    @property
    def placed(self) -> dict[str, bytes]:
        return {f"{self.folder}/{path}": content for path, content in self.files.items()}


def script_target(script: Path, run: str) -> Target:
    """A user's own script with the folder it lies in. Raises NotFound, or UsageError for a folder too large to send."""
    if not script.is_file():
        raise NotFound(f"no script {script}", "SCRIPT=path/to/train.py")
    folder = script.resolve().parent
    home = f"runs/{run}/script"
    beside = frozenset(path.stem for path in folder.parent.iterdir() if path.is_dir() or path.suffix == ".py")
    return Target(script.name, home, script.name, dict(_files(folder)), home, beside)


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    total, seen = 0, {os.path.realpath(folder)}
    for base, names, files in os.walk(folder, followlinks=True):  # a link to data elsewhere is meant to be read
        names[:] = sorted(n for n in names if n not in SKIPPED and os.path.realpath(f"{base}/{n}") not in seen)
        seen |= {os.path.realpath(f"{base}/{n}") for n in names}
        for name in sorted(files):
            path = Path(base) / name
            if not path.is_file():
                continue  # a dangling link, a socket
            total += path.stat().st_size
            if total > MAX_BYTES:
                raise UsageError(
                    f"{folder} holds more than {MAX_BYTES >> 20} MiB, and all of it would travel to every node",
                    "put the script in a folder of its own",
                )
            yield str(path.relative_to(folder)), path.read_bytes()


def imports(target: Target) -> set[str]:
    """Top-level packages that the script needs as it starts, through its own modules: no stdlib, nothing optional.

    Imports inside functions, `try` blocks and `if` blocks are left out: they may never run.
    """
    needed: set[str] = set()
    todo, seen = [target.script], set[str]()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in _imported(target.files[path]):
            own = [p for p in (f"{name}.py", f"{name}/__init__.py") if p in target.files]
            todo += own
            if not own and not any(p.startswith(f"{name}/") for p in target.files):
                needed.add(name)
    return needed - sys.stdlib_module_names


def _imported(source: bytes) -> set[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()  # the rank's own traceback says it better
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names


_FIND = "import importlib.util,json,sys;print(json.dumps([n for n in sys.argv[1:] if not importlib.util.find_spec(n)]))"


def check_imports(target: Target, place: Place, node: str) -> None:
    """Raise Lacking, naming them, if packages that the script imports are not installed on the node."""
    needed = sorted(imports(target))
    if not needed:
        return
    output = place.run(node, [place.python(node), "-I", "-c", _FIND, *needed])
    missing = json.loads(output.stdout) if output.code == 0 else []
    if missing:
        names = " ".join(missing)
        if beside := [name for name in missing if name in target.beside]:
            hint = f"only {target.script}'s own folder travels: move {', '.join(beside)} into it"
            raise Lacking(f"{target.title} imports {', '.join(beside)} from outside its folder", hint)
        kind = "image" if "/image-" in place.python(node) else place.kind
        hint = {
            "netns": f".venv/bin/pip install {names}",
            "ssh": f"on every host: {place.python(node)} -m pip install {names}",
            "image": f"make image TARGET=… EXTRA='{names}', then make deploy HOSTS=… TORCH=image",
        }.get(kind, f"make image EXTRA='{names}', then make down RACK={place.name}")
        raise Lacking(f"{target.title} imports {', '.join(missing)}, which the nodes do not have", hint)
