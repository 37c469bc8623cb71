"""Preflight's rules on canned facts, good and bad; the networks that are chosen; the rows that are printed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from torchrack.model.checks import Check, worst
from torchrack.model.errors import UsageError
from torchrack.model.health import Report
from torchrack.model.hosts import Host
from torchrack.model.job import Job
from torchrack.model.rack import GiB, MiB, Nic, Rack
from torchrack.plan.networks import networks, placed
from torchrack.run.preflight_rules import Seen, collapse, judge
from torchrack.run.probe import peers_of, rows

LO = {"name": "lo", "address": "127.0.0.1", "prefix": 8}


def report(i: int, nics: list[tuple[str, str, int]] | None = None, **more: Any) -> Report:
    """A healthy GPU host with two NICs; `more` replaces facts, or fields of its health."""
    named = nics or [("eno1", f"192.168.7.{10 + i}", 24), ("ens6", f"10.20.0.{10 + i}", 24)]
    facts: dict[str, Any] = {
        "node": f"node{i}",
        "hostname": f"gpu{i}",
        "nics": [LO, *({"name": n, "address": a, "prefix": p} for n, a, p in named)],
        "cores": 64,
        "shm": 64 * GiB,
        "python": "3.11.9",
        "torch": "2.13.0+cu130",
    }
    health: dict[str, Any] = {
        "host": f"root@h{i}",
        "asked": 1000.0,
        "answered": 1000.4,
        "clock": 1000.2,
        "user": "root",
        "python": "/opt/venv/bin/python",
        "missing": [],
        "folder": "/home/me/.torchrack",
        "deployed": "",
        "disk_free": 900 * GiB,
        "memlock": -1,
        "nofile": 1048576,
        "stack": 8 * MiB,
        "nccl": "2.30.7",
        "own_name": [named[0][1]],
        "ssh_address": named[0][1],
        "default_nic": named[0][0],
        "links": [{"name": n, "mtu": 1500, "speed": 1000 * (1 + 9 * k)} for k, (n, _, _) in enumerate(named)],
        "rdma": [],
        "rdma_usable": False,
        "listening": [22],
        "port_range": [32768, 60999],
        "runs": [],
        "gpus": [{"name": "H200", "used_mib": 4, "total_mib": 143771}] * 8,
        "driver": "580.95",
        "gpu_error": "",
    }
    for key, value in more.items():
        (facts if key in facts else health)[key] = value
    return Report.model_validate(facts | {"health": health})


def hosts(count: int, **more: Any) -> list[Host]:
    return [Host(name=f"h{i}", address=f"h{i}", **more) for i in range(count)]


def judged(*reports: Report, **more: Any) -> dict[tuple[str, str], Check]:
    rack, facts = placed(Rack(nodes=len(reports)), hosts(len(reports)), reports)
    nics = {f.node: {net: n for net in ("mgmt", "fabric") if (n := f.nic_for(net, rack))} for f in facts}
    seen = Seen(tuple(reports), nics, Job(), "remote", **more)
    return {(row.node, row.check): row for row in judge(seen)}


def test_healthy_hosts_pass_every_rule() -> None:
    found = judged(report(0), report(1))
    assert {row.state for row in found.values()} == {"ok"}
    assert all(row.why for row in found.values())
    assert found["node1", "data NIC"].value == "ens6 10.20.0.11/24, 10 Gbit/s"


BAD: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "clock a minute ahead": ({"clock": 1060.0}, "clock", "fail", "+59.6 s"),
    "clock a minute behind": ({"clock": 940.0}, "clock", "fail", "-60.0 s"),
    "no torch": ({"torch": ""}, "torch", "fail", "none in /opt/venv/bin/python"),
    "no torchrun": ({"missing": ["torchrun"]}, "torch", "fail", "no torchrun beside"),
    "another torch": ({"torch": "2.12.0"}, "torch version", "fail", "2.12.0 (others: 2.13.0+cu130)"),
    "another NCCL": ({"nccl": "2.27.3"}, "NCCL version", "fail", "2.27.3"),
    "another python": ({"python": "3.12.1"}, "python version", "warn", "3.12"),
    "another driver": ({"driver": "550.1"}, "driver", "warn", "550.1"),
    "a GPU less": ({"gpus": [{"name": "H200", "used_mib": 4, "total_mib": 9}] * 7}, "GPUs", "fail", "7 × H200"),
    "busy GPU": ({"gpus": [{"name": "H200", "used_mib": 9000, "total_mib": 143771}] * 8}, "GPUs free", "warn", "GPU 0"),
    "driver dead": ({"gpu_error": "NVML: Driver/library version mismatch"}, "GPUs free", "fail", "mismatch"),
    "shm of a container": ({"shm": 64 * MiB}, "/dev/shm", "fail", "64 MiB"),
    "small shm": ({"shm": 512 * MiB}, "/dev/shm", "warn", "512 MiB"),
    "memlock with RDMA": (
        {"memlock": 65536, "rdma": [{"device": "mlx5_0:1", "state": "4: ACTIVE", "rate": "400"}], "rdma_usable": True},
        "memlock",
        "fail",
        "MiB",
    ),
    "few descriptors": ({"nofile": 1024}, "nofile", "warn", "1024"),
    "endless stack": ({"stack": -1}, "stack", "warn", "unlimited"),
    "disk full": ({"disk_free": 0}, "disk", "fail", "0 MiB free"),
    "name means 127.0.1.1": ({"own_name": ["127.0.1.1"]}, "own name", "warn", "gpu1 means 127.0.1.1"),
    "name means nothing": ({"own_name": []}, "own name", "warn", "does not resolve"),
    "orphan": ({"runs": [{"run": "r1", "rack": "b", "pids": [5, 6]}]}, "earlier runs", "fail", "run r1: 2 processes"),
    "RDMA idle": (
        {"rdma": [{"device": "mlx5_0:1", "state": "1: DOWN", "rate": "10"}], "rdma_usable": True},
        "RDMA",
        "warn",
        "no port is active",
    ),
    "RDMA out of reach": (
        {"rdma": [{"device": "mlx5_0:1", "state": "4: ACTIVE", "rate": "400"}]},
        "RDMA",
        "fail",
        "opened",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_host_is_the_one_row_that_stands_out(name: str) -> None:
    more, check, state, value = BAD[name]
    found = judged(report(0), report(1, **more), report(2))
    row = found["node1", check]
    assert (row.state, value in row.value) == (state, True), row
    assert row.fix and row.why
    assert {who for (who, _), one in found.items() if one.state != "ok"} == {"node1"}


def test_the_rendezvous_port_is_asked_of_the_first_node_only() -> None:
    assert judged(report(0, listening=[29400]), report(1))["node0", "rendezvous port"].state == "fail"
    assert judged(report(0), report(1, listening=[29400]))["node0", "rendezvous port"].state == "ok"


def test_a_slow_answer_is_not_a_wrong_clock() -> None:
    assert judged(report(0), report(1, asked=1000.0, answered=1040.0, clock=1020.0))["node1", "clock"].state == "ok"


# Networks


def test_the_network_that_carries_the_job_is_the_one_all_share() -> None:
    chosen = networks(hosts(2), [report(0), report(1)])
    assert chosen["node0"] == {"mgmt": "eno1", "fabric": "ens6"}


def test_names_of_nics_may_differ() -> None:
    other = report(1, [("eth0", "192.168.7.11", 24), ("enp9s0", "10.20.0.11", 24)])
    rack, facts = placed(Rack(nodes=2), hosts(2), [report(0), other])
    assert [fact.nets["fabric"] for fact in facts] == ["ens6", "enp9s0"]
    assert (rack.mgmt_subnet, rack.fabric_subnet) == ("192.168.7.0/24", "10.20.0.0/24")


def test_with_one_network_all_goes_over_it_and_the_row_says_so() -> None:
    alone = [report(i, [("eth0", f"10.0.0.{10 + i}", 24)]) for i in range(2)]
    assert networks(hosts(2), alone)["node1"] == {"mgmt": "eth0", "fabric": "eth0"}
    assert "the only network" in judged(*alone)["node0", "data NIC"].value


def test_routed_hosts_share_no_subnet_and_still_have_a_plan() -> None:
    far = [report(i, [("eth0", f"10.{i}.0.10", 24)]) for i in range(2)]
    rack, facts = placed(Rack(nodes=2), hosts(2), far)
    assert rack.fabric_subnet is None and facts[1].nic_for("fabric", rack) == Nic(
        name="eth0", address="10.1.0.10", prefix=24
    )


def test_of_several_the_fastest() -> None:
    def three(i: int) -> Report:
        return report(i, [("a", f"10.1.0.1{i}", 24), ("b", f"10.2.0.1{i}", 24), ("c", f"10.3.0.1{i}", 24), ("docker0", "172.17.0.1", 16)])  # fmt: skip

    assert networks(hosts(2), [three(0), three(1)])["node1"] == {"mgmt": "a", "fabric": "c"}


def test_the_inventory_decides_and_is_told_when_it_cannot() -> None:
    assert networks(hosts(2, nic="eno1"), [report(0), report(1)])["node0"]["fabric"] == "eno1"
    assert networks(hosts(2, subnet="10.20.0.0/16"), [report(0), report(1)])["node0"]["fabric"] == "ens6"
    with pytest.raises(
        UsageError, match=r"(?s)node0 \(h0\) has no NIC ens9.*it has lo.*node1.*fix: correct torchrack_nic"
    ):
        networks(hosts(2, nic="ens9"), [report(0), report(1)])
    with pytest.raises(UsageError, match=r"node1 .*has no address in 10\.99"):
        networks(hosts(2, subnet="10.99.0.0/16"), [report(0), report(1)])


def test_public_data_addresses_need_a_word() -> None:
    out = [report(i, [("eth0", f"8.8.4.{i + 1}", 24)]) for i in range(2)]
    assert judged(*out)["node0", "public address"].state == "fail"
    assert judged(*out, allow_public=True)["node0", "public address"].state == "warn"


def test_overlapping_subnets_are_refused() -> None:
    twice = report(1, [("eno1", "192.168.7.11", 24), ("ens6", "10.20.0.11", 24), ("ens7", "10.20.0.99", 16)])
    assert judged(report(0), twice)["node1", "subnets"].state == "fail"


# What nodes see of each other


def test_a_run_that_is_alive_is_ended_by_the_rack_it_belongs_to() -> None:
    def fix(**run: object) -> str:
        return judged(report(0, runs=[{"run": "r1", "pids": [5], **run}]), report(1))["node0", "earlier runs"].fix

    assert "make stop HOSTS=… RACK=b ends it" in fix(rack="b")
    assert "make stop HOSTS=… ends it" in fix(rack="remote") and "RACK=" not in fix(rack="remote")


@pytest.mark.parametrize(("count", "looks"), [(2, 1), (8, 7), (9, 4), (64, 4)])
def test_few_looks_reach_everybody(count: int, looks: int) -> None:
    nodes = [f"node{i}" for i in range(count)]
    peers = peers_of(nodes, deep=False)
    assert {len(own) for own in peers.values()} == {looks}
    assert {peer for own in peers.values() for peer in own} == set(nodes)
    assert all(node not in own for node, own in peers.items())
    assert {len(own) for own in peers_of(nodes, deep=True).values()} == {count - 1}


NICS = {f"node{i}": Nic(name="ens6", address=f"10.20.0.{10 + i}", prefix=24) for i in range(2)}
GOOD = {"dev": "ens6", "src": "10.20.0.10", "ports": {"29400": "", "40000": ""}, "mtu": ""}
PROBED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({}, "data network", "ok"),
    ({"ports": {"29400": "no answer within 3 s", "40000": ""}}, "data network", "fail"),
    ({"dev": "eno1", "src": "192.168.7.10"}, "route", "fail"),
    ({"mtu": "packets of 9000 bytes do not arrive"}, "MTU", "fail"),
)


@pytest.mark.parametrize(("bad", "check", "state"), PROBED)
def test_what_a_node_sees_becomes_a_row(bad: dict[str, Any], check: str, state: str) -> None:
    found = {row.check: row for row in rows({"node0": {"node1": GOOD | bad}}, NICS, {"node0": 9000})}
    assert found[check].state == state
    assert bool(found[check].fix) == (state == "fail")


# Rows


def test_rows_that_say_the_same_are_one() -> None:
    nodes = [f"node{i}" for i in range(6)]
    same = [Check(node=node, check="torch", state="ok", value="2.13") for node in nodes]
    assert [row.node for row in collapse(same, nodes)] == ["all"]
    odd = [*same[:3], same[3].model_copy(update={"value": "2.12"}), *same[4:]]
    assert [(row.node, row.value) for row in collapse(odd, nodes)] == [("node0-2 node4-5", "2.13"), ("node3", "2.12")]


def states(*names: str) -> Iterator[Check]:
    yield from (Check.model_validate({"node": "n", "check": "c", "state": name, "value": ""}) for name in names)


def test_no_result_is_never_a_pass() -> None:
    assert worst(()) == "could not run"
    assert worst(tuple(states("ok", "warn", "could not run"))) == "could not run"
    assert worst(tuple(states("ok", "fail", "could not run"))) == "fail"
    assert worst(tuple(states("ok", "ok"))) == "ok"
