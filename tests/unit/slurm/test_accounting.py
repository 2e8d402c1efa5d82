"""Starts of a job from sacct's output, and the resources of a job's ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slurm_recordings import FakeCommands, recorded

from hpcdist.config.launch_schema import ClusterConfig, LaunchConfig, RoleRequest
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.errors import UserMistake
from hpcdist.run.records import NodeShare
from hpcdist.slurm import client
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.job.launcher import job_resources
from hpcdist.slurm.job.submit import estimate_start, why_no_het_jobs
from hpcdist.slurm.output import (
    AccountedStart,
    parse_boot_times,
    parse_node_features,
    parse_partitions,
    parse_records,
    parse_seconds,
    parse_settings,
    parse_starts,
)

SACCT = """\
41|train|2026-11-20T06:00:00|2026-11-20T06:00:05|2026-11-20T06:01:05|n[1-2]|8|billing=8,cpu=8,gres/gpu=4,node=2|0|PREEMPTED
41|train|2026-11-20T06:01:05|2026-11-20T06:03:05|Unknown|n[3-4]|8|cpu=8,gres/gpu:a100=4,gres/gpu=4,mem=4G,node=2|7200|RUNNING
41|train|2026-11-20T06:04:05|Unknown|Unknown|None assigned|0|||PENDING
4|other|2026-11-20T06:00:00|2026-11-20T06:00:05|2026-11-20T06:01:05|n1|1|cpu=1||CANCELLED by 1000
41|no job
"""


def at(clock: str) -> float:
    return time.mktime(time.strptime(f"2026-11-20T{clock}", "%Y-%m-%dT%H:%M:%S"))


def test_each_start_of_a_job_is_read() -> None:
    first = AccountedStart(
        name="train",
        began=at("06:00:05"),
        ended=at("06:01:05"),
        queue_s=5.0,
        nodes="n[1-2]",
        cores=8,
        gpus=4,
        energy_j=None,
        state="PREEMPTED",
    )
    second = replace(
        first,
        began=at("06:03:05"),
        ended=None,
        queue_s=120.0,
        nodes="n[3-4]",
        energy_j=7200.0,
        state="RUNNING",
    )
    assert parse_starts(SACCT, "41") == [first, second]
    assert parse_starts("", "41") == []
    assert [start.state for start in parse_starts(SACCT, "4")] == ["CANCELLED"]


def test_time_in_the_queue_after_a_requeue_begins_at_the_end_of_the_start_before() -> None:
    """Slurm submits the job again some seconds after its end, when its nodes are cleaned up."""
    late = SACCT.replace("41|train|2026-11-20T06:01:05", "41|train|2026-11-20T06:01:13")
    assert [start.queue_s for start in parse_starts(late, "41")] == [5.0, 120.0]
    other = late.replace("41|train|2026-11-20T06:01:13", "41|another|2026-11-20T06:01:13")
    assert [start.queue_s for start in parse_starts(other, "41")] == [5.0, 112.0], "a job with a reused id"


def test_components_of_a_heterogeneous_job_are_one_start() -> None:
    lines = [
        "7+0|j|2026-11-20T06:00:00|2026-11-20T06:00:05|2026-11-20T06:01:05|n1|4|cpu=4,gres/gpu=2|5|COMPLETED",
        "7+1|j|2026-11-20T06:00:00|2026-11-20T06:00:05|2026-11-20T06:01:06|n2|2|cpu=2||COMPLETED",
    ]
    (start,) = parse_starts("\n".join(lines), "7")
    assert (start.nodes, start.cores, start.gpus, start.energy_j) == ("n1,n2", 6, 2, 5.0)
    assert start.ended == at("06:01:06")


def test_sizes_of_a_job_that_loses_nodes_are_one_start() -> None:
    lines = [
        "7|j|2026-11-20T06:00:00|2026-11-20T06:00:05|2026-11-20T06:01:05|n[1-4]|8|cpu=8|5|RESIZING",
        "7|j|2026-11-20T06:00:00|2026-11-20T06:01:05|2026-11-20T06:02:05|n[1,3-4]|6|cpu=6|7|REQUEUED",
        "7|j|2026-11-20T06:02:05|2026-11-20T06:04:10|Unknown|n[1-4]|8|cpu=8||RUNNING",
    ]
    first, second = parse_starts("\n".join(lines), "7")
    assert (first.nodes, first.cores, first.energy_j, first.state) == ("n[1-4]", 8, 12.0, "REQUEUED")
    assert (first.began, first.ended) == (at("06:00:05"), at("06:02:05"))
    assert (second.began, second.ended, second.cores) == (at("06:04:10"), None, 8)
    lines[1] = lines[1].replace("06:01:05", "06:00:05", 1)
    assert [start.cores for start in parse_starts("\n".join(lines), "7")] == [8, 8], "lost in its first second"


# --- resources


def test_cores_of_a_node_beyond_those_of_its_ranks_are_allocated_too() -> None:
    config = Config(cluster=ClusterConfig(nodes=2, tasks_per_node=2, cpus_per_task=2))
    env = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "8,4"}
    found = job_resources(config, [("n1", "n2")], env)
    assert found.unit == "core"
    assert found.nodes == {
        "n1": NodeShare(allocated=8, share=2, ranks=[0, 1]),
        "n2": NodeShare(allocated=4, share=2, ranks=[2, 3]),
    }
    assert job_resources(config, [("n1", "n2")], {}).nodes["n1"].allocated == 4, "as requested"
    damaged = env | {"SLURM_JOB_CPUS_PER_NODE": "many"}
    assert job_resources(config, [("n1", "n2")], damaged).nodes["n1"].allocated == 4


def test_nodes_without_ranks_are_allocated_too() -> None:
    config = Config(cluster=ClusterConfig(nodes=2, tasks_per_node=2, spare_nodes=1))
    env = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_CPUS_PER_NODE": "2(x3)"}
    found = job_resources(config, [("n1", "n3")], env, ["n2"])
    assert found.nodes["n2"] == NodeShare(allocated=2, share=1, ranks=[])
    assert (found.nodes["n3"].ranks, found.idle) == ([2, 3], ("n2",))
    on_gpus = replace(config, cluster=replace(config.cluster, gpus_per_node=2))
    assert job_resources(on_gpus, [("n1", "n3")], env, ["n2"]).nodes["n2"] == NodeShare(allocated=2, share=1, ranks=[])


def test_gpus_count_if_a_job_has_any() -> None:
    config = Config(cluster=ClusterConfig(nodes=1, tasks_per_node=2, gpus_per_node=4))
    found = job_resources(config, [("n1",)], {})
    assert (found.unit, found.nodes) == ("GPU", {"n1": NodeShare(allocated=4, share=1, ranks=[0, 1])})
    on_cpu = replace(config, launch=LaunchConfig(device="cpu"))
    assert job_resources(on_cpu, [("n1",)], {}).nodes == {"n1": NodeShare(allocated=4, share=1, ranks=[])}


@pytest.mark.parametrize("het", [True, False])
def test_roles_without_a_gpu_have_no_share(het: bool) -> None:
    roles: dict[str, Any] = {"agent": RoleRequest(nodes=1, gpus_per_node=2), "observer": RoleRequest(gpus_per_node=0)}
    config = Config(
        roles={"agent": 2, "observer": 4}, cluster=ClusterConfig(nodes=3, tasks_per_node=2, roles=roles, het=het)
    )
    found = job_resources(config, [("g1",), ("n1", "n2")], {})
    spare = 0 if het else 2
    assert found.nodes == {
        "g1": NodeShare(allocated=2, share=1, ranks=[0, 1]),
        "n1": NodeShare(allocated=spare, share=min(1, spare), ranks=[]),
        "n2": NodeShare(allocated=spare, share=min(1, spare), ranks=[]),
    }


def test_cores_of_a_heterogeneous_job() -> None:
    roles: dict[str, Any] = {"agent": RoleRequest(nodes=1, cpus_per_task=4), "observer": RoleRequest(nodes=2)}
    config = Config(roles={"agent": 1, "observer": 4}, cluster=ClusterConfig(nodes=3, roles=roles, het=True))
    env = {"SLURM_HET_SIZE": "2"}
    for index, (names, counts) in enumerate([("n1", "4"), ("n[2-3]", "2(x2)")]):
        env |= {f"SLURM_JOB_NODELIST_HET_GROUP_{index}": names, f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{index}": counts}
    found = job_resources(config, [("n1",), ("n2", "n3")], env)
    assert [(share.allocated, share.ranks) for share in found.nodes.values()] == [(4, [0]), (2, [1, 2]), (2, [3, 4])]


# --- All parsers of the outputs of Slurm 22.05, 24.11 and 26.05, recorded on the dev cluster: the same facts from each.


RELEASES = ["22_05", "24_11", "26_05"]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    monkeypatch.setenv("PATH", str(tmp_path))
    return FakeCommands(tmp_path)


@pytest.mark.parametrize("release", RELEASES)
def test_partitions_and_their_nodes(release: str) -> None:
    found = parse_partitions(recorded("partition", release=release), recorded("sinfo", release=release))
    assert [(part.name, part.facts["MaxTime"], part.facts["PreemptMode"], part.facts["Default"]) for part in found] == [
        ("main", "1-00:00:00", "REQUEUE", "YES"),
        ("high", "1-00:00:00", "OFF", "NO"),
    ]
    for part in found:
        assert (part.limit("MaxNodes"), part.allowed("Accounts"), part.denied("Qos")) == (None, None, ())
        (group,) = part.nodes
        assert (group.num_nodes, group.cpus, group.memory_mb, group.gpus) == (4, 8, 32768, 2)
        assert (group.names, group.usable) == ("n[1-4]", True)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.usefixtures("utc")
def test_nodes(release: str) -> None:
    text = recorded("nodes", release=release)
    assert parse_node_features(text) == {"n1": frozenset(), "n2": frozenset()}
    assert list(parse_boot_times(text)) == ["n1", "n2"]
    assert [record["State"] for record in parse_records(text)] == ["IDLE", "IDLE"]


@pytest.mark.parametrize("release", RELEASES)
def test_settings(release: str) -> None:
    settings = parse_settings(recorded("config", release=release))
    assert settings["SLURM_VERSION"].startswith(release.replace("_", "."))
    assert (settings["ClusterName"], settings["PreemptMode"]) == ("hpcdist", "REQUEUE")
    assert (parse_seconds(settings["KillWait"]), parse_seconds(settings["UnkillableStepTimeout"])) == (5, 60)
    assert why_no_het_jobs(settings) == ""


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.processes
def test_estimated_start(release: str, commands: FakeCommands) -> None:
    commands.add("sbatch", error=recorded("messages", "test-only", release=release))
    text = estimate_start(load_config("ddp_digits", ["name=a"]))
    assert text.startswith("the job would start at 2026-11-21T23:4")
    assert text.endswith(" using 2 processors on nodes n[1-2] in partition main")
    assert len(text.split()) == 15


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("test-only-account", "Invalid account or account/partition combination specified"),
        ("test-only-gpus", "Requested node configuration is not available"),
        ("test-only-part", "invalid partition specified: nosuch allocation failure: Invalid partition name specified"),
    ],
)
def test_rejection(release: str, section: str, reason: str, commands: FakeCommands) -> None:
    commands.add("sbatch", error=recorded("messages", section, release=release), code=1)
    with pytest.raises(UserMistake) as error:
        estimate_start(load_config("ddp_digits", ["name=a"]))
    assert str(error.value) == f"Slurm rejects this job: {reason}"


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.processes
def test_second_requeue_and_unknown_job(release: str, commands: FakeCommands) -> None:
    commands.add("scontrol", error=recorded("messages", "requeue-again", release=release), code=1)
    client.requeue_job("1")
    commands.add("scontrol", error="Access/permission denied for job 1\n", code=1)
    with pytest.raises(SlurmError, match="Access/permission denied"):
        client.requeue_job("1")
    commands.add("scontrol", error=recorded("messages", "unknown-job", release=release), code=1)
    assert client.job_records("99999") == []
