"""make labs-bench: wall seconds of every lab on a netns rack, healthy and broken sides, against the grade's budget.

    python -m benchmarks.labs [--launcher fork|torchrun] [--runtime netns|compose]

Runs the grade itself, once, and reads its rows. A side's deadline is its bound, not its cost: the sum of the deadlines
says how long a grade could take in which every side hangs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from torchrack.teach.catalogue import GRADE_BUDGET, labs
from torchrack.teach.grade import HEALTHY, GradeRow, all_ok, sides, summary

TR = str(Path(sys.executable).parent / "torchrack")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=["fork", "torchrun"], default="fork")
    parser.add_argument("--runtime", choices=["netns", "compose"], default="netns")
    options = parser.parse_args()
    argv = [TR, "lab", "grade", "--all", "--json", "--runtime", options.runtime, "--launcher", options.launcher]
    start = time.monotonic()
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    wall = time.monotonic() - start
    rows = [GradeRow.model_validate(row) for row in json.loads(done.stdout)]
    print(
        f"{'lab':<32} {'size':>5} {'healthy s':>10} {'sides':>6} {'all s':>8} {'budget s':>9} {'deadlines s':>12}  by"
    )
    for lab in labs():
        mine = [row for row in rows if row.lab == lab.number]
        healthy = next((row.seconds for row in mine if row.variant == HEALTHY), float("nan"))
        bound = sum(side.deadline for side in sides(lab))
        size = f"{lab.lab.nodes}×{lab.lab.nproc}"
        took = sum(row.seconds for row in mine)
        by = "/".join(sorted({row.launcher for row in mine}))
        allowed = f"{lab.lab.budget:.0f}{'!' if took > lab.lab.budget else ' '}"
        print(
            f"{lab.name:<32} {size:>5} {healthy:>10.1f} {len(mine):>6} {took:>8.1f} {allowed:>9} {bound:>12.0f}  {by}"
        )
    good = all_ok(rows)  # parts that need a GPU are listed as not run, and are no failure
    kept = wall <= GRADE_BUDGET or options.runtime != "netns"
    print(f"{'✓' if good and kept else '✗'} {summary(rows)}; {wall:.0f} s in all, of {GRADE_BUDGET:.0f} s")
    return 0 if good and kept else 1


if __name__ == "__main__":
    sys.exit(main())
