"""Choosing torch, with the real pip on folders of tiny wheels: no index is asked."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from torchrack.model.errors import CommandFailed, NotInstalled
from torchrack.places import torch_wheel
from torchrack.places.torch_wheel import TORCH, choose, install, wheel_folder

ANY = "py3-none-any"
CP311 = "cp311-cp311-manylinux_2_28_x86_64"


def make_wheel(
    folder: Path, name: str, version: str, tag: str = ANY, needs: Iterable[str] = (), also: Iterable[str] = ()
) -> None:
    """A wheel of a package that is empty but for the files `also`."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    requires = "".join(f"Requires-Dist: {need}\n" for need in needs)
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        **{f"{name}/{path}": "" for path in also},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    lines = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in files.items()]
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]))


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folders that play the user's pip configuration and PyTorch's CPU index, both empty."""
    mine, pytorch = tmp_path / "mine", tmp_path / "pytorch"
    mine.mkdir()
    pytorch.mkdir()
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(mine)}.items():
        monkeypatch.setenv(name, value)
    (own, args), (cpu, _) = torch_wheel.SOURCES
    monkeypatch.setattr(
        torch_wheel, "SOURCES", ((own, args), (cpu, ("--isolated", "--no-index", "--find-links", str(pytorch))))
    )
    return mine, pytorch


def test_a_cpu_build_of_the_users_own_configuration_is_taken(offered: tuple[Path, Path]) -> None:
    mine, pytorch = offered
    make_wheel(mine, "torch", f"{TORCH}+cpu")
    make_wheel(pytorch, "torch", f"{TORCH}+cpu.other")
    choice = choose(sys.executable)
    assert (choice.source, choice.version) == ("your pip configuration", f"{TORCH}+cpu")


@pytest.mark.parametrize("package", ["nvidia-cublas", "nvidia-nccl-cu13", "cuda-bindings", "triton"])
def test_a_cuda_build_is_never_taken(offered: tuple[Path, Path], package: str) -> None:
    mine, pytorch = offered
    make_wheel(mine, "torch", TORCH, needs=[package])
    make_wheel(mine, package.replace("-", "_"), "1.0")
    with pytest.raises(NotInstalled, match=rf"your pip configuration: a CUDA build, with {package}"):
        choose(sys.executable)
    make_wheel(pytorch, "torch", f"{TORCH}+cpu")
    choice = choose(sys.executable)
    assert (choice.source, choice.version) == ("PyTorch's CPU wheel index", f"{TORCH}+cpu")


def test_nothing_on_offer_tells_what_each_source_said_and_what_to_do(offered: tuple[Path, Path]) -> None:
    with pytest.raises(NotInstalled) as caught:
        choose(sys.executable)
    said = str(caught.value)
    assert said.count("No matching distribution found") == 2
    assert f"no CPU build of torch {TORCH} for Python 3." in said
    assert "PIP_FIND_LINKS" in said.partition("fix: ")[2]


def test_a_python_without_a_wheel_is_told_which_one_to_take() -> None:
    assert "make setup PYTHON=python3.11" in torch_wheel._hint("3.13.5")
    assert "PYTHON" not in torch_wheel._hint("3.11.2")


def test_the_cpu_index_is_named_in_one_place() -> None:
    root = Path(torch_wheel.__file__).parents[2]
    named = subprocess.run(
        ["git", "grep", "-l", "-F", torch_wheel.CPU_INDEX.partition("//")[2]], cwd=root, capture_output=True, text=True
    )
    assert named.stdout.split() in (["torchrack/places/torch_wheel.py"], [])  # none: no git, or not committed


def test_install_skips_what_is_there(offered: tuple[Path, Path], tmp_path: Path) -> None:
    mine, _ = offered
    make_wheel(mine, "torch", f"{TORCH}+cpu")
    make_wheel(mine, "numpy", "2.0")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv/bin/python")
    steps: list[str] = []
    install(python, steps.append)
    assert any(line.startswith("Successfully installed") and f"torch-{TORCH}+cpu" in line for line in steps), steps
    for wheel in mine.iterdir():
        wheel.unlink()
    steps.clear()
    install(python, steps.append)
    assert steps == []


def test_the_wheel_folder_is_filled_kept_and_refilled(offered: tuple[Path, Path], tmp_path: Path) -> None:
    mine, _ = offered
    make_wheel(mine, "torch", f"{TORCH}+cpu", CP311)
    make_wheel(mine, "numpy", "2.0", CP311)
    make_wheel(mine, "py_spy", "0.4", CP311)
    dest, steps = tmp_path / "wheels/cpu", list[str]()
    wheel_folder(dest, steps.append)
    assert {path.name for path in dest.glob("*.whl")} == {path.name for path in mine.iterdir()}
    steps.clear()
    wheel_folder(dest, steps.append)
    assert steps == []
    with pytest.raises(CommandFailed, match="No matching distribution found for pandas"):
        wheel_folder(dest, steps.append, ["pandas"])
    assert len(list(dest.glob("*.whl"))) == 3
    make_wheel(mine, "pandas", "3.0")
    wheel_folder(dest, steps.append, ["pandas"])
    assert len(list(dest.glob("*.whl"))) == 4


def test_an_index_with_torch_alone_will_do(offered: tuple[Path, Path], tmp_path: Path) -> None:
    """The CPU index has torch and what it depends on; py-spy and EXTRA come from where all else comes from."""
    mine, pytorch = offered
    make_wheel(pytorch, "torch", f"{TORCH}+cpu", CP311, needs=["sympy"])
    make_wheel(pytorch, "sympy", "1.0")
    make_wheel(mine, "torch", TORCH, CP311, needs=["nvidia-nccl-cu13"])
    make_wheel(mine, "nvidia_nccl_cu13", "2.0")
    for name in ("numpy", "py_spy", "pandas"):
        make_wheel(mine, name, "2.0", CP311)
    dest = wheel_folder(tmp_path / "wheels/cpu", list[str]().append, ["pandas"])
    found = sorted(path.name.split("-")[0] for path in dest.glob("*.whl"))
    assert found == ["numpy", "pandas", "py_spy", "sympy", "torch"]
    assert (dest / f"torch-{TORCH}+cpu-{CP311}.whl").exists()


def test_a_wheel_folder_that_somebody_brought_is_taken_as_it_is(offered: tuple[Path, Path], tmp_path: Path) -> None:
    make_wheel(tmp_path / "brought", "torch", TORCH, CP311)
    make_wheel(tmp_path / "brought", "numpy", "2.0", CP311)
    make_wheel(tmp_path / "brought", "py_spy", "0.4", CP311)
    assert wheel_folder(tmp_path / "brought", pytest.fail) == tmp_path / "brought"
