"""The documents are held against the thing: targets, commands and lab names in them exist, and all are told."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from typer.main import get_command

from torchrack.cli.app import app
from torchrack.teach.catalogue import labs

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]+):", MAKEFILE, re.MULTILINE))
PAGES = [README, *(path.read_text() for path in ROOT.glob("labs/*/README.md")), (ROOT / "docker/README.md").read_text()]


def test_every_make_target_that_a_page_names_exists() -> None:
    named = {name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z][a-z-]+)\b", page, re.MULTILINE)}
    assert len(named) > 10 and named <= TARGETS, named - TARGETS


def test_every_make_target_is_in_the_help_and_in_the_readme() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in TARGETS:
        assert re.search(rf"^  {target} ", shown, re.MULTILINE), f"make help does not show {target}"
        assert re.search(rf"\b{target}\b", README), f"the README does not name {target}"


def test_every_command_has_a_target_and_help() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert command.help, name
        assert name in TARGETS or name == "lab", f"no make target for torchrack {name}"


def test_the_readme_names_every_lab() -> None:
    for lab in labs():
        assert re.search(rf"^\| {lab.number} ", README, re.MULTILINE), lab.name


def test_make_alone_prints_help() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "lab-cpu" in shown and "Labs" in shown


def test_module_runs_as_the_command_does() -> None:
    done = subprocess.run([sys.executable, "-m", "torchrack", "--help"], capture_output=True, text=True, check=True)
    assert "lab" in done.stdout
