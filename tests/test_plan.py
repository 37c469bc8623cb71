"""The plan is pure: ranks, pins, rendezvous, and a reason for every setting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from torchrack.model.errors import UsageError
from torchrack.model.job import Job, NodeChange, Occupy, RunSpec
from torchrack.model.rack import Nic, NodeFacts, Rack
from torchrack.plan.plan import Plan, plan, torchrun_argv

RACK = Rack(nodes=2, mgmt_subnet="10.79.3.0/24", fabric_subnet="10.78.3.0/24")


def facts(rack: Rack, swapped: tuple[str, ...] = (), cores: int = 8, shared_by: int = 1) -> list[NodeFacts]:
    """Nodes as Docker might make them: on `swapped` nodes eth0 is the fabric."""
    found = []
    for node in rack.node_names:
        nets = ("fabric", "mgmt") if node in swapped else ("mgmt", "fabric")
        nics = tuple(Nic(name=f"eth{i}", address=rack.address(node, net), prefix=24) for i, net in enumerate(nets))  # type: ignore[arg-type]
        nics = (Nic(name="lo", address="127.0.0.1", prefix=8), *nics)
        found.append(NodeFacts(node=node, hostname=node, nics=nics, cores=cores, shared_by=shared_by, shm=1 << 30))
    return found


def value(made: Plan, node: str, name: str) -> str | None:
    return next((s.value for s in made.node(node).settings if s.name == name), None)


@given(st.integers(1, 32), st.integers(1, 8))
def test_rank_is_node_rank_times_nproc_plus_local_rank(nodes: int, nproc: int) -> None:
    rack = RACK.model_copy(update={"nodes": nodes})
    rack = Rack.model_validate(rack.model_dump())
    made = plan(rack, facts(rack), Job(nproc=nproc))
    assert [p.rank for p in made.ranks] == list(range(nodes * nproc))
    for place in made.ranks:
        assert place.rank == int(place.node.removeprefix("node")) * nproc + place.local_rank


def test_pins_are_found_by_subnet_per_node() -> None:
    made = plan(RACK, facts(RACK, swapped=("node1",)), Job())
    assert (value(made, "node0", "GLOO_SOCKET_IFNAME"), value(made, "node1", "GLOO_SOCKET_IFNAME")) == ("eth1", "eth0")
    assert value(made, "node1", "NCCL_SOCKET_IFNAME") == "=eth0"
    assert value(made, "node1", "TP_SOCKET_IFNAME") == "eth0"


def test_one_node_can_be_pinned_to_the_other_network() -> None:
    made = plan(RACK, facts(RACK), Job(nodes={"*": NodeChange(pin="none"), "node1": NodeChange(pin="mgmt")}))
    pins = [{s.name: s.value for s in node.settings}.get("GLOO_SOCKET_IFNAME") for node in made.nodes]
    assert pins == [None, made.node("node1").nics["mgmt"].name]


def test_unpinned_sets_no_interface_at_all() -> None:
    made = plan(RACK, facts(RACK), Job(pin="none"))
    assert not [s for node in made.nodes for s in node.settings if s.name.endswith("_IFNAME")]


def test_one_node_hosts_the_store_and_every_node_tells_its_address() -> None:
    made = plan(RACK, facts(RACK), Job())
    assert str(value(made, "node0", "rdzv-conf")).startswith("is_host=1,")
    assert str(value(made, "node1", "rdzv-conf")).startswith("is_host=0,")
    assert value(made, "node1", "local-addr") == "10.78.3.11"
    assert value(made, "node1", "rdzv-endpoint") == "10.78.3.10:29400" == made.endpoint


def test_c10d_ranks_follow_the_text_of_the_addresses() -> None:
    rack = Rack(nodes=95, mgmt_subnet="10.79.0.0/24", fabric_subnet="10.78.0.0/24")
    made = plan(rack, facts(rack), Job())
    assert made.node("node90").node_rank == 1, "10.78.0.100 sorts before 10.78.0.11"
    assert plan(rack, facts(rack), Job(mode="static")).node("node90").node_rank == 90


def test_static_counts_on_node_ranks_and_standalone_on_nothing() -> None:
    made = plan(RACK, facts(RACK), Job(mode="static"))
    assert made.node("node1").flags == (
        "--nnodes=2",
        "--max-restarts=0",
        "--local-addr=10.78.3.11",
        "--node-rank=1",
        "--master-addr=10.78.3.10",
        "--master-port=29400",
    )
    one = Rack(nodes=1, mgmt_subnet="10.79.3.0/24", fabric_subnet="10.78.3.0/24")
    assert plan(one, facts(one), Job(mode="standalone")).node("node0").flags == ("--standalone", "--max-restarts=0")


def test_elastic_range() -> None:
    made = plan(RACK, facts(RACK), Job(elastic="1:2", max_restarts=3))  # type: ignore[arg-type]
    assert made.node("node0").flags[:2] == ("--nnodes=1:2", "--max-restarts=3")


@pytest.mark.parametrize(
    ("cores", "shared_by", "nproc", "threads"), [(8, 1, 2, "4"), (2, 2, 1, "1"), (8, 2, 2, "2"), (1, 1, 8, "1")]
)
def test_threads_are_the_nodes_share_of_cores_by_rank(cores: int, shared_by: int, nproc: int, threads: str) -> None:
    made = plan(RACK, facts(RACK, cores=cores, shared_by=shared_by), Job(nproc=nproc))
    assert value(made, "node0", "OMP_NUM_THREADS") == threads


def test_join_bound_is_30_and_3_for_each_process_by_cores() -> None:
    assert plan(RACK, facts(RACK, cores=2, shared_by=2), Job(nproc=2)).join_bound == 30 + 3 * (4 + 2) // 2


@pytest.mark.parametrize("job", [Job(max_restarts=1), Job(elastic=(1, 2))])
def test_ranks_that_may_be_started_again_do_not_share_the_agents_store(job: Job) -> None:
    assert value(plan(RACK, facts(RACK), job), "node0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in {
        s.name for s in plan(RACK, facts(RACK), Job()).nodes[0].settings
    }


def test_broken_sides_set_drop_and_leave_out() -> None:
    job = Job(
        absent=("node1",),
        nodes={
            "*": NodeChange(drop=("local-addr", "OMP_NUM_THREADS")),
            "node1": NodeChange(flags={"rdzv-id": "other", "nnodes": "3"}),
        },
        occupy=Occupy(node="node0", net="fabric", port=29400),
    )
    made = plan(RACK, facts(RACK), job)
    assert [node.node for node in made.present] == ["node0"]
    assert not [flag for flag in made.node("node0").flags if "local-addr" in flag]
    assert not [setting for setting in made.node("node0").settings if setting.name == "OMP_NUM_THREADS"]
    assert "--nnodes=3" in made.node("node1").flags
    run = RunSpec(id="r1", target="labs/x/lab.py", deadline=9)
    assert "--rdzv-id=other" in torchrun_argv(made.node("node1"), run, 1, "/logs", ["bash", "rank.sh"])
    assert "--rdzv-id=r1" in torchrun_argv(made.node("node0"), run, 1, "/logs", ["bash", "rank.sh"])


@pytest.mark.parametrize(
    "job",
    [Job(), Job(mode="static"), Job(pin="none"), Job(pin="mgmt"), Job(env={"A": "1", "NCCL_DEBUG": "INFO"})],
)
def test_every_setting_has_a_reason_a_reader_and_a_pitfall(job: Job) -> None:
    for node in plan(RACK, facts(RACK), job).nodes:
        for setting in node.settings:
            assert setting.why and setting.reader and setting.prevents, setting.name
            assert "\n" not in setting.why


def test_nccl_variables_are_of_one_kind_only() -> None:
    made = plan(RACK, facts(RACK), Job(env={"NCCL_ALGO": "ring;allreduce:tree", "A": "1"}))
    assert {s.kind for s in made.nodes[0].settings if s.name.startswith("NCCL_")} == {"nccl"}
    assert value(made, "node0", "NCCL_ALGO") == "ring;allreduce:tree"


def test_what_contradicts_is_refused_with_a_fix() -> None:
    with pytest.raises(UsageError, match=r"node7.*\n  fix: "):
        plan(RACK, facts(RACK), Job(absent=("node7",)))
    with pytest.raises(UsageError, match="standalone"):
        plan(RACK, facts(RACK), Job(mode="standalone"))
    elsewhere = Rack(nodes=2, mgmt_subnet="10.79.3.0/24", fabric_subnet="10.99.0.0/24")
    with pytest.raises(UsageError, match=r"node0 has no NIC on fabric 10\.99\.0\.0/24; it has lo"):
        plan(elsewhere, facts(RACK), Job())


@pytest.mark.parametrize(
    "env",
    [
        {"NCCL_X": "a\nb"},
        {"NCCL_X": "x" * 1024},
        {"NCCL_X": ""},
        {"NCCL_X": " a"},
        {"A": "nul\0"},
        {"1A": "x"},
        {"NCCL_CONF_FILE": "/x"},
    ],
)
def test_what_no_file_can_carry_is_refused_in_the_model(env: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        Job(env=env)
