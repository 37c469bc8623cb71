"""LAUNCHER=fork gives what torchrun gives: exit codes, signals, tracebacks, environment, folders, early exits, kinds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from racks import Cli

pytest.importorskip("torch")
FORKED = Path(__file__).parent.parent / "torchrack" / "node" / "forked.py"
LAUNCHERS = {"torchrun": ["-m", "torch.distributed.run"], "fork": [str(FORKED)]}
SCRIPTS = {
    "environment": """
        import json, os, sys
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_MAX_RESTARTS", "MINE", "OUT"]
        print(json.dumps([{n: os.environ.get(n) and n for n in names}, sys.argv[1:], __name__, os.path.basename(__file__)]))
        open(os.path.join(os.environ["OUT"], "mine.txt"), "w").write(os.environ["RANK"])
        import helper; print(helper.__name__, os.environ["OUT"][-6:])""",
    "raises": "print('before')\nraise ValueError('rank says no')",
    "text-exit": "import sys; sys.exit('the last word')",
    "code-exit": "import sys; sys.exit(7)",
    "clean-exit": "import atexit, sys; atexit.register(print, 'at exit'); sys.exit(0)",
    "killed": "import os, signal; print('here', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "early": """
        import os, sys, time, torch.distributed as dist, torch
        dist.init_process_group("gloo")
        if dist.get_rank() == 1: sys.exit(0)
        try: dist.all_reduce(torch.ones(1)); print("no error")
        except RuntimeError as error: print("lost the peer")""",
    "workers": """
        import torch
        from torch.utils.data import DataLoader
        print(sum(int(x.sum()) for x in DataLoader(torch.arange(100), batch_size=10, num_workers=2)))""",
}


def ran(launcher: str, script: Path, tmp: Path) -> tuple[int, dict[str, str], list[str]]:
    """Exit code of the launcher; each rank's stdout and stderr; what torchrun says of failures."""
    logs, out = tmp / f"logs-{launcher}", tmp / f"out-{launcher}"
    rank_sh = tmp / "rank.sh"
    rank_sh.write_text((Path(__file__).parent.parent / "templates" / "rank.sh.j2").read_text())
    argv = [sys.executable, *LAUNCHERS[launcher], "--standalone", "--nproc-per-node=2", f"--log-dir={logs}"]
    argv += ["--redirects=3", "--no-python", "bash", str(rank_sh), str(script), "a b", "{OUT}"]
    env = os.environ | {"OUT": str(out), "MINE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, cwd=tmp)
    texts = {
        f"{log.parent.name}/{log.stem}": log.read_text().replace(str(out), "OUT")
        for log in sorted(logs.glob("*/attempt_0/*/std*.log"))
    }
    told = re.findall(r"exitcode\s*: (-?\d+)", done.stderr)
    return done.returncode, texts, told


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_forked_rank_ends_and_speaks_as_an_executed_one(name: str, tmp_path: Path) -> None:
    import textwrap

    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPTS[name]))
    (tmp_path / "helper.py").write_text("")
    executed, forked = ran("torchrun", script, tmp_path), ran("fork", script, tmp_path)
    assert forked[0] == executed[0]
    # Which of two failing ranks torchrun meets first, and so how the other ends, is a race under both launchers.
    assert set(forked[2]) & set(executed[2]) or forked[2] == executed[2] == []
    for key in executed[1]:
        if executed[0] == 0:
            assert forked[1][key] == executed[1][key]
    first = [texts[1] for texts in (executed, forked)]
    assert any(text for text in first[0].values()) == any(text for text in first[1].values())
    if name in ("raises", "text-exit"):
        said = [{t.strip() for t in texts.values() if "says no" in t or "last word" in t} for texts in first]
        assert said[0] & said[1], "the same traceback, with no frame of the launcher's"


@pytest.mark.slow
@pytest.mark.netns
def test_the_launchers_give_equal_results_on_a_rack(tmp_path: Path) -> None:
    cli = Cli(tmp_path, "netns", "forked")
    rows = {}
    for launcher in ("torchrun", "fork"):
        done = cli("lab", "grade", "01", *("--runtime", "netns", "--launcher", launcher, "--json"), timeout=400)
        rows[launcher] = [(r["variant"], r["expected"], r["verdict"], r["ok"]) for r in json.loads(done.stdout)]
        assert {r["launcher"] for r in json.loads(done.stdout)} == {launcher}
    assert rows["fork"] == rows["torchrun"]
    assert all(ok for *_, ok in rows["fork"])
