"""Nothing that can stand in a file crashes the reader, holds it up, or makes it see a fault in noise.

A short run by default; TORCHRACK_FUZZ=100000 says how many inputs to try.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from torchrack.diagnose import Source, diagnose, lookup
from torchrack.diagnose.rules import rules
from torchrack.diagnose.sources import BLOCK, LINE_LIMIT
from torchrack.diagnose.sources import Source as FileSource

CASES = Path(__file__).parent / "diagnose_cases"
INPUTS = int(os.environ.get("TORCHRACK_FUZZ", "400"))
SLOWEST = 5.0  # seconds for one input of at most some hundred lines, on a busy machine
BAIT = [
    "a" * 20_000,
    "(" * 5000,
    "network addresses of (" + "," * 8000,
    "Connection closed by peer [" + "1" * 8000,
    "[rank" + "9" * 400 + "]: x",
    "  rank      : " + "9" * 300 + " (local_rank: 1)",
    "  exitcode  : -" + "9" * 30 + " (pid: 1)",
    "WorkNCCL(SeqNum=" + "1" * 5000 + ", OpType=",
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: " + "x, but Rank " * 600,
    "# torchrack exit=999999999999 signal=null reason=job",
    "# torchrack run=x node= rank=99999999999999",
    "world_size=99999999999999999999",
    "Timed out after 1 seconds waiting for clients. 1/999999999 clients joined.",
    "NET/Socket : Using [0]" + "x" * 9000,
    "\x1b[" * 3000,
    "\r" * 3000 + "NCCL WARN",
    'Traceback (most recent call last):\n  File "' + "x" * 5000 + '", line 1',
    "1" * 3000 + ": x",
    "٣: node١ rank ٢ of ٤",
    "[E١١٢٩ 06:24:44.9 x.cpp:1] [Rank ٣] Watchdog",
]


def corpus() -> list[str]:
    lines = [line for path in sorted(CASES.rglob("*.txt")) for line in path.read_text(errors="replace").splitlines()]
    return lines + [line for rule in rules() for line in (*rule.fires, *rule.silent)]


LINES = corpus()
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "tensor",
    "loss",
    "model",
    "layer",
    "weight",
    "token",
    "data",
    "batch",
    "mean",
    "value",
    "result",
    "output",
]


def shuffled(rng: random.Random) -> list[str]:
    return rng.sample(LINES, rng.randint(1, 60))


def truncated(rng: random.Random) -> list[str]:
    return [line[: rng.randint(0, len(line))] for line in shuffled(rng)]


def spliced(rng: random.Random) -> list[str]:
    lines = shuffled(rng)
    return [
        a[: rng.randint(0, len(a))] + b[rng.randint(0, len(b)) :] for a, b in zip(lines, reversed(lines), strict=True)
    ]


def mangled(rng: random.Random) -> list[str]:
    out = []
    for line in shuffled(rng):
        chars = list(line)
        for _ in range(rng.randint(1, 6)):
            chars.insert(
                rng.randint(0, len(chars)), chr(rng.choice([0, 9, 13, 27, 91, 93, 160, 0x2028, 0xFFFD, 0x1F600]))
            )
        out.append("".join(chars))
    return out


def baited(rng: random.Random) -> list[str]:
    return [*shuffled(rng)[:5], *rng.sample(BAIT, 3)]


@pytest.mark.parametrize("make", [shuffled, truncated, spliced, mangled, baited], ids=lambda f: f.__name__)
def test_no_crash_and_no_standstill(make: Callable[[random.Random], list[str]]) -> None:
    for seed in range(INPUTS // 6):
        rng = random.Random(f"{make.__name__}{seed}")
        names = rng.choice([["log.txt"], ["log.node0.txt", "log.node1.txt"], ["a/0.log", "b/0.log"]])
        start = time.monotonic()
        answer = diagnose([Source(name, make(rng)) for name in names])
        assert time.monotonic() - start < SLOWEST, (make.__name__, seed)
        assert answer.verdict in ("fault", "healthy", "unknown")
        assert "{" not in answer.why or "{" in str(answer.evidence), (make.__name__, seed, answer.why)
        assert str(answer) and answer.to_json()


def test_noise_is_never_a_fault() -> None:
    for seed in range(INPUTS // 6):
        rng = random.Random(seed)
        text = "\n".join(" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(rng.randint(1, 80)))
        assert diagnose([Source("log.txt", text.split("\n"))]).verdict == "unknown", seed


def test_binary_is_never_a_fault(tmp_path: Path) -> None:
    for seed in range(max(10, INPUTS // 40)):
        path = tmp_path / "core"
        path.write_bytes(random.Random(seed).randbytes(20_000))
        assert diagnose([FileSource("core", path=path)]).verdict == "unknown", seed


@pytest.mark.parametrize("line", BAIT)
def test_each_bait_alone_is_quick(line: str) -> None:
    start = time.monotonic()
    diagnose([Source("log.txt", line.split("\n"))])
    lookup(line)
    assert time.monotonic() - start < SLOWEST


def test_an_empty_or_missing_log_is_not_readable() -> None:
    assert diagnose([]).exit_code == 2
    assert diagnose([Source("log.txt", [])]).exit_code == 2


def test_lines_longer_than_a_block_are_cut(tmp_path: Path) -> None:
    """The rest of an overlong line is dropped, the next line is read, and its number is right."""
    path = tmp_path / "log.txt"
    path.write_bytes(
        b"x" * (3 * BLOCK) + b"\nRuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n" + b"y" * LINE_LIMIT
    )
    answer = diagnose([FileSource("log.txt", path=path)])
    assert answer.kind == "gpu-oom-one-rank"
    assert answer.evidence[0].line == 2


def test_the_same_host_name_on_two_nodes() -> None:
    """The file tells them apart."""
    oom = "user:11:12 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'"
    quiet = "user:21:22 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>"
    answer = diagnose([Source("log.node0.txt", [quiet]), Source("log.node1.txt", [oom])])
    assert [who.node for who in answer.culprits] == ["node1"]


def test_a_large_log_of_many_ranks_is_read_in_bounded_memory() -> None:
    """64 MB of 1,024 ranks: what is kept does not grow with the length of the log."""
    import tracemalloc

    def lines(steps: int) -> list[str]:
        return [
            f"[rank{r}]: step {s} loss 0.{(r * s) % 9973:04d} tokens/s {r + s}"
            for s in range(steps)
            for r in range(1024)
        ]

    def peak(steps: int) -> int:
        source = Source("big.log", (line for _ in range(steps) for line in chunk))
        tracemalloc.start()
        assert diagnose([source]).verdict == "healthy"
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    chunk = lines(4)
    assert peak(40) < 1.3 * peak(8) + 2_000_000
