"""The parts of a run that need no rack: wires, exit codes, locks, targets, requests."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from test_plan import RACK, facts

from torchrack.cli import asked, tables
from torchrack.model.errors import NotFound, RackBusy, UsageError
from torchrack.model.job import Job
from torchrack.model.result import RankResult, RunResult, WireRow
from torchrack.plan.plan import plan
from torchrack.run.folder import RackFolder
from torchrack.run.outputs import _extract
from torchrack.run.record import rank_exits
from torchrack.run.target import imports, script_target
from torchrack.run.wires import pinned_share, wire_rows

SUMMARY = """\
E1129 17:00:00.000000 7 torch/distributed/elastic/api.py:1003] failed (exitcode: -6) local_rank: 1 (pid: 12) of binary: x
============================================================
lab.py FAILED
Failures:
[1]:
  time      : 2026-11-29_17:00:00
  host      : node1
  rank      : 2 (local_rank: 0)
  exitcode  : 1 (pid: 11)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_17:00:00
  host      : node1
  rank      : 3 (local_rank: 1)
  exitcode  : -6 (pid: 12)
  traceback : Signal 6 (SIGABRT) received by PID 12
"""


def test_exit_codes_come_from_torchruns_own_summary() -> None:
    assert rank_exits(SUMMARY.splitlines()) == {0: 1, 1: -6}
    assert rank_exits(["nothing of the kind"]) == {}


def rows(fabric: int, mgmt: int, lo: int = 5) -> list[WireRow]:
    return [
        WireRow(node="node0", nic=nic, net=net, tx_bytes=sent, rx_bytes=0)
        for nic, net, sent in (("eth1", "fabric", fabric), ("eth0", "mgmt", mgmt), ("lo", "lo", lo))
    ]


def test_pinned_share_leaves_lo_out_and_is_null_where_there_is_nothing_to_share() -> None:
    assert pinned_share(rows(90, 10), "fabric") == 0.9
    assert pinned_share(rows(90, 10), "mgmt") == 0.1
    assert pinned_share(rows(90, 10), "none") is None
    assert pinned_share(rows(0, 0, lo=900), "fabric") is None


def test_wires_are_named_by_network_whatever_the_kernel_calls_them() -> None:
    made = plan(RACK, facts(RACK, swapped=("node1",)), Job())
    counters = {
        node: [{"nic": nic, "tx_bytes": i, "rx_bytes": 0} for i, nic in enumerate(("lo", "eth0", "eth1", "sit0"))]
        for node in RACK.node_names
    }
    counters["node0"][3]["tx_bytes"] = 0
    found = [(row.node, row.net, row.nic) for row in wire_rows(made.nodes, counters)]
    assert found[:3] == [("node0", "fabric", "eth1"), ("node0", "mgmt", "eth0"), ("node0", "lo", "lo")]
    assert found[3:5] == [("node1", "fabric", "eth0"), ("node1", "mgmt", "eth1")]


def test_the_wires_table_marks_the_pinned_network() -> None:
    result = RunResult(
        run="r", rack="lab", runtime="netns", nodes=1, nproc=1, target="t", verdict="passed", kind=None,
        ranks=(), wires=tuple(rows(84_100_000, 0)), pinned_share=1.0, seconds=1, record="r",
    )  # fmt: skip
    columns = {column.header: list(column.cells) for column in tables.wires(result, "fabric").columns}
    assert columns["sent"] == ["84.1 MB", "0 B", "5 B"]
    assert columns["share"] == ["100 %", "0 %", ""]
    assert columns[""] == ["← pinned", "", "inside the node"]


@pytest.mark.parametrize(
    ("exit_", "signal", "said"), [(0, None, "ok"), (3, None, "exit 3"), (None, 9, "signal 9"), (None, None, "not told")]
)
def test_how_a_rank_ended_in_words(exit_: int | None, signal: int | None, said: str) -> None:
    row = RankResult(rank=0, node="node0", local_rank=0, exit=exit_, signal=signal, log="x")
    assert tables.ended(row) == said


def test_a_rack_is_worked_on_by_one_command_at_a_time(home: Path) -> None:
    folder = RackFolder("lab")
    with folder.lock("lab run 01"):
        assert folder.holder() is not None
        with pytest.raises(RackBusy, match=r"at 'lab run 01'\n  fix: "), RackFolder("lab").lock("down", wait=0.1):
            pass
        with RackFolder("other").lock("up", wait=0.1):
            pass
    assert folder.holder() is None


def test_a_killed_holder_leaves_no_lock(home: Path) -> None:
    code = "import os\nfrom torchrack.run.folder import RackFolder\nwith RackFolder('lab').lock('x'): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    with RackFolder("lab").lock("down", wait=0.1):
        pass


def test_a_torn_record_counts_as_none(home: Path) -> None:
    folder = RackFolder("lab")
    folder.make()
    for text in ("", "{", "[]", '{"runtime": "teapot"}'):
        (folder.path / "rack.json").write_text(text)
        assert folder.read_rack() is None


def test_a_script_takes_its_folder_along_but_not_the_litter(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("train.py", "pkg/model.py", ".git/config", "data.bin"):
        (tmp_path / name).write_bytes(b"\x00\xff")
    target = script_target(tmp_path / "train.py", "r1")
    assert sorted(target.files) == ["data.bin", "pkg/model.py", "train.py"]
    assert target.path == "runs/r1/script/train.py"
    with pytest.raises(NotFound, match="no script"):
        script_target(tmp_path / "other.py", "r1")


def test_a_linked_folder_goes_along_and_a_circle_ends(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("a")
    own = tmp_path / "own"
    own.mkdir()
    (own / "train.py").write_text("")
    (own / "linked").symlink_to(tmp_path / "data")
    (own / "round").symlink_to(own)
    (own / "nowhere").symlink_to(tmp_path / "none")
    assert sorted(script_target(own / "train.py", "r1").files) == ["linked/a.txt", "train.py"]


WHOLE = "tar c -C / etc/hostname --format=gnu -b 20"
STREAMS = {"printf 'nothing\\nend\\n'": True, "printf 'nothing\\n'": False, "printf 'tar\\n'": False,
           f"printf 'tar\\n'; {WHOLE}; printf 'end\\n'": True, f"printf 'tar\\n'; {WHOLE} | head -c 600": False,
           f"printf 'tar\\n'; {WHOLE} | head -c 700; printf 'end\\n'": False, "true": False}  # fmt: skip


@pytest.mark.parametrize("script", STREAMS)
def test_what_came_in_part_is_not_taken_for_all(script: str, tmp_path: Path) -> None:
    """A node removes what its ranks wrote only when it hears that all of it was kept."""
    argv = ["sh", "-c", f"read before; {script}; exec 1>&-; read word; echo heard $word >&2"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            _extract(process, [], tmp_path)
        except (EOFError, tarfile.TarError):
            assert process.stdin
            process.stdin.close()
        assert process.stderr
        assert (process.stderr.read() == b"heard kept\n") is STREAMS[script]


def test_a_module_beside_the_folder_does_not_travel(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "train.py").write_text("import shared\n")
    assert "shared" in script_target(tmp_path / "app" / "train.py", "r1").beside


def test_imports_that_a_script_needs_as_it_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch\nfrom model import Net\nimport numpy.linalg as la\n"
        "try:\n    import wandb\nexcept ImportError:\n    pass\n"
        "def f():\n    import pandas\n"
    )
    (tmp_path / "model.py").write_text("from einops import rearrange\nfrom . import x\n")
    assert imports(script_target(tmp_path / "train.py", "r1")) == {"torch", "numpy", "einops"}


@pytest.mark.parametrize("nodes", ["0", "33", "abc", "-1", ""])
def test_node_counts_that_no_rack_has_end_with_the_fix(nodes: str, home: Path) -> None:
    with pytest.raises(UsageError, match=r"nodes: .*\n  fix: NODES=2 \(1 to 32\)"):
        asked.rack(None, nodes=nodes)


def test_all_wrong_flags_are_told_at_once(home: Path) -> None:
    with pytest.raises(UsageError) as caught:
        asked.rack(None, name="Lab!", nodes="99", runtime="podman", shm="lots")
    assert all(f"{key}: " in str(caught.value) for key in ("name", "nodes", "runtime", "shm"))


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path, home: Path) -> None:
    file = tmp_path / "rack.yaml"
    file.write_text("name: big\nnodes: 4\nshm: 2g\n")
    rack = asked.rack(file, {"nodes": 8}, nodes="3")
    assert (rack.name, rack.nodes, rack.shm) == ("big", 3, 2 << 30)


@pytest.mark.parametrize("pair", ["NOVALUE", "1X=2", "NCCL_X=a\nb"])
def test_env_pairs_that_cannot_be_set_are_refused(pair: str) -> None:
    with pytest.raises(UsageError, match="fix: ENV="):
        asked.job([pair])
