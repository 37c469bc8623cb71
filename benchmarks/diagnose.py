"""make diagnose-bench: how fast and in how much memory a large log is read, beside `grep -E` with the same patterns.

    python -m benchmarks.diagnose [--mb 1000] [--ranks 1024] [--rounds 3]

The log is one file of training output of all ranks, interleaved, with one failure near its end. Both read it from the
page cache; grep counts the lines that any of our rules' patterns match (GNU grep -P takes our syntax, -E does not know
named groups, so these are made plain).
"""

from __future__ import annotations

import argparse
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torchrack.diagnose.rules import rules

GOAL = 3.0  # times grep's time
FAILURE = """Traceback (most recent call last):
  File "/job/train.py", line 41, in <module>
    dist.all_reduce(loss)
  File "/venv/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
    work.wait()
RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"""


def write_log(path: Path, megabytes: int, ranks: int) -> None:
    with path.open("w") as file:
        print(f"# world_size={ranks}", file=file)
        step = 0
        while file.tell() < megabytes * 1_000_000:
            for rank in range(ranks):
                loss = 2.0 + (rank * 31 + step * 17) % 1000 / 1000
                file.write(
                    f"[rank{rank}]: step {step} loss {loss:.4f} grad_norm {loss / 3:.3f} tokens/s {90000 + rank}\n"
                )
            step += 1
        for rank in range(ranks - 1):
            file.writelines(f"[rank{rank}]: {line}\n" for line in FAILURE.splitlines())


def plain(pattern: str) -> str:
    """For grep -E: no named or non-capturing groups, no \\d and \\w, no lazy repetition."""
    text = re.sub(r"\(\?P<\w+>|\(\?:", "(", pattern)
    text = text.replace(r"\d", "[0-9]").replace(r"\S", "[^[:space:]]").replace(r"\s", "[[:space:]]")
    return re.sub(r"([+*?}])\?", r"\1", text)


def accepted(patterns: list[str]) -> list[str]:
    """Those that grep -E takes: what looks around has no plain form."""
    argv = ["grep", "-E", "-c", "-e"]
    return [p for p in patterns if subprocess.run([*argv, p], input=b"", capture_output=True).returncode < 2]


def timed(argv: list[str]) -> float:
    start = time.monotonic()
    subprocess.run(argv, capture_output=True, check=False)  # into /dev/null, GNU grep stops at its first match
    return time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log, words = Path(folder, "job.log"), Path(folder, "patterns")
        write_log(log, options.mb, options.ranks)
        patterns = accepted([plain(p) for rule in rules() for p in rule.match])
        words.write_text("\n".join(patterns) + "\n")
        megabytes = log.stat().st_size / 1e6
        ours_argv = [str(Path(sys.executable).parent / "torchrack"), "diagnose", str(log)]
        grep_argv = ["env", "LC_ALL=C", "grep", "-E", "-c", "-f", str(words), str(log)]
        timed(ours_argv)  # before grep, whose own memory would hide ours; and the file is in the page cache now
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        ours, grep = [], []
        for _ in range(options.rounds):
            ours.append(timed(ours_argv))
            grep.append(timed(grep_argv))
        answer = subprocess.run(ours_argv, capture_output=True, text=True, check=False).stdout.splitlines()
    mine, theirs = statistics.median(ours), statistics.median(grep)
    print(f"{megabytes:.0f} MB, {options.ranks} ranks: {answer[0] if answer else 'no answer'}")
    print(f"torchrack diagnose  {mine:7.1f} s  {megabytes / mine:7.1f} MB/s   {peak:.0f} MiB at its peak")
    print(f"grep -E -f          {theirs:7.1f} s  {megabytes / theirs:7.1f} MB/s   {len(patterns)} patterns")
    ok = mine <= GOAL * theirs
    print(f"{'✓' if ok else '✗'} {mine / theirs:.2f}× grep's time (goal: at most {GOAL:g}×)")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
