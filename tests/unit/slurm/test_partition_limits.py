"""Comparison of requests with partitions: each problem is one line with key, value and fix."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from hpcdist.config.launch_schema import ClusterConfig
from hpcdist.slurm.job import submit_checks
from hpcdist.slurm.job.submit_checks import Findings, check_partitions, requested_partitions
from hpcdist.slurm.output import NodeGroup, Partition

BIG = NodeGroup(partition="gpu", num_nodes=2, cpus=64, memory_mb=256000, gpus=4, usable=True, names="n[1-2]")
SMALL = NodeGroup(partition="gpu", num_nodes=2, cpus=16, memory_mb=64000, gpus=0, usable=True, names="n[3-4]")
GPU = Partition(name="gpu", facts={"Default": "YES", "State": "UP"}, nodes=(BIG, SMALL))
FITTING: dict[str, Any] = {"nodes": 2, "tasks_per_node": 4, "cpus_per_task": 8, "gpus_per_node": 4, "mem": "200G"}


def found(partition: Partition = GPU, **cluster: Any) -> Findings:
    findings = Findings()
    check_partitions(ClusterConfig(**cluster), [partition], findings)
    return findings


def of(**facts: str) -> Partition:
    return replace(GPU, facts={**GPU.facts, **facts})


def test_valid_request() -> None:
    assert found(**FITTING) == Findings()
    assert found(nodes=4) == Findings()
    assert found(nodes=9, min_nodes=4) == Findings(), "Slurm starts the job with four of up to nine nodes"


@pytest.mark.parametrize(
    ("facts", "cluster", "line"),
    [
        ({}, {"nodes": 5}, "cluster.nodes=5: partition gpu has 4: lower it or choose another"),
        (
            {},
            {"nodes": 4, "spare_nodes": 1},
            "cluster.nodes=4 and cluster.spare_nodes=1: partition gpu has 4: lower it or choose another",
        ),
        ({}, {"nodes": 9, "min_nodes": 5}, "cluster.min_nodes=5: partition gpu has 4: lower it or choose another"),
        (
            {"MaxNodes": "2"},
            {"nodes": 3},
            "cluster.nodes=3: partition gpu allows 2 per job: lower it or choose another",
        ),
        ({"MinNodes": "2"}, {}, "cluster.nodes=1: partition gpu requires at least 2: raise it or choose another"),
        (
            {"MaxTime": "00:30:00"},
            {},
            "cluster.time_limit_min=60: partition gpu allows 30: lower it; a longer run saves, requeues"
            " itself and continues",
        ),
        (
            {},
            {"tasks_per_node": 13, "cpus_per_task": 5},
            "cluster.tasks_per_node=13 × cluster.cpus_per_task=5: partition gpu offers at most 64 cores per node:"
            " lower it or choose another",
        ),
        (
            {"MaxCPUsPerNode": "8"},
            {"cpus_per_task": 9},
            "cluster.tasks_per_node=1 × cluster.cpus_per_task=9: partition gpu offers at most 8 cores per node:"
            " lower it or choose another",
        ),
        (
            {},
            {"gpus_per_node": 5},
            "cluster.gpus_per_node=5: partition gpu offers at most 4 GPUs per node: lower it or choose another",
        ),
        (
            {"MaxMemPerNode": "1000"},
            {"mem": "2G"},
            "cluster.mem=2G: partition gpu offers at most 1000 MiB per node: lower it or choose another",
        ),
        ({}, {"mem": "lots"}, "cluster.mem=lots is not a memory size: write 64G, or MiB without a unit"),
        (
            {},
            {"nodes": 3, "gpus_per_node": 1},
            "cluster.nodes=3: 2 nodes of partition gpu have the requested hardware: lower the number or the request",
        ),
        ({"State": "DRAIN"}, {}, "cluster.partition=gpu accepts no jobs (state DRAIN): choose another"),
        ({"AllowAccounts": "ada"}, {"account": "eve"}, "cluster.account=eve may not use partition gpu: use ada"),
        ({"DenyQos": "long"}, {"qos": "long"}, "cluster.qos=long may not use partition gpu: choose another"),
    ],
)
def test_impossible_request_is_an_error(facts: dict[str, str], cluster: dict[str, Any], line: str) -> None:
    assert found(of(**facts), **cluster) == Findings(errors=[line])


@pytest.mark.parametrize(
    ("partition", "cluster", "line"),
    [
        (of(State="DOWN"), {}, "cluster.partition=gpu starts no jobs (state DOWN): the run will wait"),
        (
            replace(GPU, nodes=(replace(BIG, usable=False), SMALL)),
            {"nodes": 3},
            "only 2 of the 4 matching nodes of gpu are up: the run will wait",
        ),
        (
            of(DefMemPerCPU="100"),
            {"cpus_per_task": 2},
            "cluster.mem is not set, and the default of partition gpu is only 200 MiB per node",
        ),
    ],
)
def test_doubtful_request_is_a_warning(partition: Partition, cluster: dict[str, Any], line: str) -> None:
    assert found(partition, **cluster) == Findings(warnings=[line])


def test_all_errors_are_reported_at_once() -> None:
    assert len(found(of(MaxTime="00:30:00"), nodes=9, gpus_per_node=9, mem="900G", cpus_per_task=99).errors) == 5


def test_partition_without_visible_nodes_is_not_checked() -> None:
    assert found(replace(GPU, nodes=()), **FITTING) == Findings()


def test_partition_reserved_for_groups_or_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(submit_checks, "_own_groups", lambda: ["users"])
    assert found(of(AllowGroups="users,staff")) == Findings()
    (line,) = found(of(AllowGroups="staff")).errors
    assert line == "cluster.partition=gpu is reserved for groups staff, and you are in none of them: choose another"
    assert found(of(RootOnly="YES")).errors == ["cluster.partition=gpu is reserved for root: choose another"]
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert found(of(AllowGroups="staff", RootOnly="YES")) == Findings()


def test_current_user_has_groups() -> None:
    assert submit_checks._own_groups()


def test_requested_partitions_default_and_unknown_names() -> None:
    findings = Findings()
    other = replace(GPU, name="other", facts={})
    assert requested_partitions(ClusterConfig(), [other, GPU], findings) == [GPU]
    assert requested_partitions(ClusterConfig(partition="other,gpu"), [other, GPU], findings) == [other, GPU]
    assert findings == Findings()
    assert requested_partitions(ClusterConfig(partition="ohter"), [other, GPU], findings) == []
    assert requested_partitions(ClusterConfig(partition="cpu-long"), [other, GPU], findings) == []
    assert findings.errors == [
        "cluster.partition=ohter: no such partition, did you mean 'other'?",
        "cluster.partition=cpu-long: no such partition, the cluster has gpu, other",
    ]


def test_request_must_fit_one_of_several_partitions() -> None:
    tight = of(MaxTime="00:30:00", MaxNodes="1")
    findings = Findings()
    check_partitions(ClusterConfig(nodes=2), [tight, GPU], findings)
    assert findings == Findings()
    check_partitions(ClusterConfig(nodes=2), [tight, of(MaxNodes="1")], findings)
    assert findings.errors == ["cluster.nodes=2: partition gpu allows 1 per job: lower it or choose another"]
