"""The house: an import never points up, modules stay small, the CLI imports heavy libraries only where used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "torchrack"
FLOOR = {
    "model": 1,
    "diagnose": 1,
    "node": 1,
    "plan": 2,
    "places": 2,
    "run": 3,
    "teach": 4,
    "measure": 4,
    "cli": 5,
}
BESIDE = {("places", "plan"), ("diagnose", "model")}  # the same floor, one way
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0]
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "torchrack" or len(parts) < 2 or own not in FLOOR:
            continue
        other = parts[1]
        if own == "node":
            pytest.fail(f"node/ runs alone on a node, but {path.name} imports {name}")
        assert other == own or FLOOR[other] < FLOOR[own] or (own, other) in BESIDE, f"{own} imports {name}"
        assert not (own == "cli" and other == "places"), f"{path.name} imports {name}: the CLI goes through run/"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_what_runs_on_a_node_needs_only_the_standard_library() -> None:
    for path in (PACKAGE / "node").glob("*.py"):
        others = {name.split(".")[0] for name in imported(path)} - sys.stdlib_module_names
        assert others <= {"torch"}, f"{path.name} imports {others}"
        assert path.name in ("nics.py", "forked.py") or not others


@pytest.mark.parametrize("command", [["--help"], ["lab", "--help"], ["lab", "list"], ["status"]])
def test_the_cli_imports_heavy_libraries_only_where_it_uses_them(command: list[str], home: Path) -> None:
    code = (
        "import sys; from torchrack.cli import main\n"
        f"sys.argv = ['torchrack', *{command!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('heavy:', {'torch', 'docker', 'fabric', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("heavy: set()\n"), done.stdout[-200:]
