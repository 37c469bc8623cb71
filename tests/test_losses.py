"""A node that is lost during a run: what the job's `lost` makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_plan import RACK, facts

from torchrack.diagnose import diagnose_folder
from torchrack.model.job import Job
from torchrack.plan.plan import plan
from torchrack.run.losses import Losses
from torchrack.run.wires import wire_rows

KILLED = """\
# torchrack run=r node=node1 agent nnodes=2 nproc=1
E1129 23:26:48.910000 8 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 12) of binary: bash
# torchrack exit=null signal=9 reason=job seconds=78.8
# torchrack node1 is started again
"""


def test_by_default_a_lost_agent_ends_the_job() -> None:
    losses = Losses(Job(), 2)
    assert not losses.saw_exit("node1", killed=True)
    assert losses.due(set()) == []


@pytest.mark.parametrize("policy", ["stay", "return"])
def test_the_others_go_on_after_a_kill_but_not_after_a_failure(policy: str) -> None:
    losses = Losses(Job.model_validate({"lost": policy}), 2)
    assert not losses.saw_exit("node1", killed=False)
    assert losses.saw_exit("node1", killed=True)


def test_a_node_returns_once_and_only_when_the_smaller_world_is_at_work() -> None:
    losses = Losses(Job(lost="return"), 2)
    losses.saw_rank(2, 0)
    losses.saw_exit("node1", killed=True)
    losses.saw_line(0)  # what a rank of the old world still says
    assert losses.due(set()) == []
    losses.saw_rank(1, 1)
    losses.saw_line(0)
    assert losses.due(set()) == []
    losses.saw_line(1)
    assert losses.due({"node1"}) == []  # something of it is still there
    assert losses.due({"node0"}) == ["node1"]
    assert losses.lives["node1"] == 1
    losses.saw_line(1)
    assert losses.due(set()) == []


def test_a_node_that_stays_away_is_never_started_again() -> None:
    losses = Losses(Job(lost="stay"), 2)
    losses.saw_exit("node1", killed=True)
    losses.saw_rank(1, 1)
    losses.saw_line(1)
    assert losses.due(set()) == []


def test_the_wires_of_a_node_with_two_lives_are_added_up() -> None:
    made = plan(RACK, facts(RACK), Job())
    nics = [{"nic": "eth1", "tx_bytes": 5, "rx_bytes": 1}, {"nic": "eth1", "tx_bytes": 7, "rx_bytes": 2}]
    rows = {(row.node, row.nic): (row.tx_bytes, row.rx_bytes) for row in wire_rows(made.nodes, {"node1": nics})}
    assert rows["node1", "eth1"] == (12, 3)


@pytest.mark.parametrize(
    ("code", "kind"),
    [pytest.param(0, "no-fault", id="made-good"), pytest.param(1, "rank-sigkilled", id="failed-in-the-end")],
)
def test_a_loss_that_a_restart_has_made_good_is_no_fault(code: int, kind: str, tmp_path: Path) -> None:
    ended = f"# torchrack exit={code} signal=null reason=job seconds=67.0\n"
    for node, text in (("node0", KILLED.splitlines()[0].replace("node1", "node0") + "\n"), ("node1", KILLED)):
        (tmp_path / node).mkdir()
        (tmp_path / node / "agent.log").write_text(text + ended)
    assert diagnose_folder(tmp_path).kind == kind
