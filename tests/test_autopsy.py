"""A run that hangs is ended by its deadline, and the answer names the rank that holds the others up, and where it stands."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from racks import Cli

from torchrack.diagnose import Source, Who, diagnose

SCRIPT = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, i):
            time.sleep(600)

    how = sys.argv[1]
    dist.init_process_group("gloo")
    if how == "flight":  # gloo records as NCCL does, but has no watchdog that dumps: this plays it
        import threading
        from torch._C._distributed_c10d import _dump_fr_trace
        rank, pipe, dump = (os.environ[n] for n in ("RANK", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"))
        os.mkfifo(f"{pipe}{rank}.pipe")
        def watchdog():
            open(f"{pipe}{rank}.pipe", "rb").read(1)
            open(f"{dump}{rank}", "wb").write(_dump_fr_trace())
        threading.Thread(target=watchdog, daemon=True).start()
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4))
    x = torch.ones(4)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1)) if how == "backward" else None
    if dist.get_rank() == 1:
        if how in ("sleep", "flight", "backward"):
            time.sleep(600)
        if how == "loader":
            next(iter(DataLoader(Slow(), num_workers=1)))
        if how == "other":
            dist.recv(x, src=0)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    if how == "backward":
        ddp(x).sum().backward()
    dist.all_reduce(x)
"""
SAYS = {
    "sleep": "rank 1 on node1 is at hang.py:29: time.sleep(600); rank 0 on node0 waits in all_reduce (hang.py:38)",
    "loader": "rank 1 on node1 waits for its data loader (hang.py:31: ",
    "flight": "is at hang.py:29: time.sleep(600), after 2 collectives; rank 0 on node0 waits in all_reduce 3 (hang.py:38)",
    "other": "rank 1 on node1 is in recv (hang.py:33: dist.recv(x, src=0)); rank 0 on node0 waits in all_reduce",
    "backward": "rank 1 on node1 is at hang.py:29: time.sleep(600); rank 0 on node0 waits in backward (hang.py:37)",
    "stop": "rank 1 on node1 is stopped (state T: SIGSTOP, or a debugger); rank 0 on node0 waits in all_reduce",
}


@pytest.mark.slow
@pytest.mark.parametrize(  # each way on netns; on compose two, as what is told does not depend on the place
    ("runtime", "how"),
    [pytest.param("netns", how, marks=pytest.mark.netns) for how in SAYS]
    + [pytest.param("compose", how, marks=pytest.mark.docker) for how in ("sleep", "stop")],
)
def test_the_answer_names_the_rank_and_the_place(runtime: str, how: str, tmp_path: Path) -> None:
    cli = Cli(tmp_path, runtime, "hang")
    script = tmp_path / "job" / "hang.py"
    script.parent.mkdir()
    script.write_text(textwrap.dedent(SCRIPT))
    try:
        more = ["--env", "TORCH_FR_BUFFER_SIZE=100"] if how == "flight" else []
        done = cli(*cli.on_rack("run"), "--nodes", "2", "--deadline", "40", "--json", *more, str(script), how)
        result = cli.result(done)
        assert done.returncode == 1
        assert result["verdict"] == "timed_out"
        assert SAYS[how] in result["why"], result["why"]
        assert result["kind"] == ("collective-mismatch" if how == "other" else "rank-stuck-outside-collective")
        assert "rank 1 (pid" in (Path(result["record"]) / "stacks.txt").read_text()
        assert len([*Path(result["record"]).glob("out/flight/rank*")]) == (2 if how == "flight" else 0)
    finally:
        cli.down()


def log(rank: int, state: str, call: str, place: str, seq: str = "") -> Source:
    head = f"# torchrack run=r node=node{rank // 2} rank={rank} local_rank={rank % 2} world=4"
    flight = f" flight={call}:{seq}:doing" if seq else ""
    stand = f"# torchrack autopsy rank={rank} state={state} call={call}{flight} place={place} line=x()"
    return Source(f"node{rank // 2}/{rank % 2}.log", [head, "step 1", stand])


@pytest.mark.parametrize(
    ("stands", "kind", "culprits"),
    [
        (["S all_reduce a.py:1"] * 3 + ["S none b.py:2"], "rank-stuck-outside-collective", [3]),
        (["S all_reduce a.py:1"] * 3 + ["S broadcast a.py:2"], "collective-mismatch", [3]),
        (["S all_reduce a.py:1"] * 3 + ["S all_reduce a.py:2"], "collective-desync", [3]),
        (["S all_reduce a.py:1", "T all_reduce a.py:1"] * 2, "rank-stuck-outside-collective", [1, 3]),
        (["S all_reduce a.py:1 5"] * 3 + ["S all_reduce a.py:1 4"], "collective-desync", [3]),
        (["S all_reduce a.py:1 5"] * 4, "hang", []),
        (["S none a.py:1"] * 4, "hang", []),
        (["S all_reduce a.py:1"] * 4, "hang", []),
    ],
)
def test_what_stands_tell(stands: list[str], kind: str, culprits: list[int]) -> None:
    end = "# torchrack exit=null signal=15 reason=deadline seconds=40.0"
    agents = [
        Source(f"node{i}/agent.log", [f"# torchrack run=r node=node{i} agent nnodes=2 nproc=2", end]) for i in (0, 1)
    ]
    answer = diagnose([*agents, *(log(rank, *stand.split()) for rank, stand in enumerate(stands))])
    assert answer.kind == kind
    assert list(answer.culprits) == [Who(f"node{rank // 2}", rank) for rank in culprits]
