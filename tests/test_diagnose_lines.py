"""What the prefixes of a line tell: node, rank, process and time."""

from __future__ import annotations

import pytest

from torchrack.diagnose.lines import clean, parse, relay, service_name


@pytest.mark.parametrize(
    ("line", "text", "known"),
    [
        ("[rank7]: hello", "hello", {"rank": 7}),
        ("[default1]:[rank3]: hello", "hello", {"rank": 3, "local_rank": 1}),
        ("[1,3]<stdout>:hello", "hello", {"rank": 3}),
        ("3: hello", "hello", {"rank": 3}),
        ("lab-node0-1  | [rank 2] hello", "[rank 2] hello", {"node": "node0", "rank": 2}),
        ("node0_1 | hello", "hello", {"node": "node0"}),
        ("node1: Permission denied", "Permission denied", {"node": "node1"}),
        ("pdsh@node0: node1: ssh exited", "ssh exited", {"node": "node1"}),
        ("python3: can't open", "python3: can't open", {"node": None}),
        ("(Worker pid=213) ERROR 08-03 13:35:33 [x.py:9]   File", "  File", {"pid": "213"}),
        ("(raylet, ip=10.0.0.2) A worker died", "A worker died", {"ip": "10.0.0.2"}),
        ("(RayWorker pid=9, ip=10.0.0.2) hello", "hello", {"pid": "9", "ip": "10.0.0.2"}),
        ("node0:11:12 [3] init.cc:7 NCCL WARN x", "init.cc:7 NCCL WARN x", {"node": "node0", "pid": "11"}),
        ("[2026-09-02 11:20:31] node0:11:12 [0] NCCL INFO x", "NCCL INFO x", {"node": "node0"}),
        ("[node0:4711] Signal: Bus error (7)", "Signal: Bus error (7)", {"node": "node0", "pid": "4711"}),
        ("Nov 29 12:30:01 node1 kernel: x", "kernel: x", {"node": "node1"}),
        ("[ 9912.401122] NVRM: Xid", "NVRM: Xid", {"at": None}),
        ("2026-11-29T12:00:00.123456789Z stderr F x", "x", {}),
        ("[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog", "[Rank 1] Watchdog", {"rank": 1}),
        ("rank 1 of 2: leaving", "rank 1 of 2: leaving", {"rank": 1}),
    ],
)
def test_prefixes(line: str, text: str, known: dict[str, object]) -> None:
    parsed = parse(clean(line))
    assert parsed.text == text
    assert {name: getattr(parsed, name) for name in known} == known


def test_stamps_with_and_without_a_year_compare() -> None:
    lines = [
        "E1129 12:32:36.500000 25742 torch/distributed/elastic/multiprocessing/api.py:1002] failed",
        "[W1129 12:32:36.500000000 socket.cpp:207] [c10d] x",
        "[2026-11-29 12:32:36.5] x",
        "2026-11-29 12:32:36,500 INFO x",
        "  time      : 2026-11-29_12:32:36.5",
        "[Sun Nov 29 12:32:36 2026] x",
    ]
    stamps = [parse(clean(line)).at for line in lines]
    assert max(abs((at or 0) - (stamps[0] or 0)) for at in stamps) <= 0.5


def test_colours_progress_bars_and_crlf_are_cleaned() -> None:
    assert clean("\x1b[31mred\x1b[0m\r\n") == "red"
    assert clean("10%\r50%\r100%\n") == "100%"
    assert clean("\x1b]0;title\x07text") == "text"


def test_service_names() -> None:
    assert service_name("lab-node0-1") == "node0"
    assert service_name("node0_1") == "node0"
    assert service_name("gpu-a12") == "gpu-a12"


def test_a_relayed_file_is_told_by_its_prefixes() -> None:
    assert relay(["node0-1  | a", "node1-1  | b", "node0-1 exited with code 0"])
    assert relay(["node0: a", "node1: b"])
    assert relay(["node0: a", "node0: b"]) is None
    assert relay(["loss | 0.3", "accuracy | 0.5"]) is None
