"""Parsers of output recorded from Slurm 22.05, 24.11 and 26.05; the resources of a job's ranks."""

import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from slurm_recordings import FakeCommands, recorded

from hpcdist.config.cluster_schema import ClusterConfig, RoleRequest
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.errors import UserMistake
from hpcdist.job.launcher import job_resources
from hpcdist.job.submit import estimate_start
from hpcdist.run.attempt_times import NodeShare
from hpcdist.slurm import client, output
from hpcdist.slurm.output import SlurmError

pytestmark = pytest.mark.usefixtures("utc")


def at(clock: str) -> float:
    found = output.parse_time(f"2026-11-20T{clock}")
    assert found is not None
    return found


def job(info: output.JobInfo | None) -> output.JobInfo:
    assert info is not None
    return info


# --- scontrol, squeue and sacct


PARSERS = {"scontrol": output.parse_scontrol, "squeue": output.parse_squeue, "sacct": output.parse_sacct}


@pytest.mark.parametrize(
    ("release", "command", "section", "job_id", "sentence"),
    [
        ("22_05", "scontrol", "running", "1", "job 1 is RUNNING on n1"),
        ("22_05", "scontrol", "failed", "2", "job 2 ended as FAILED with exit code 3 on n1"),
        ("22_05", "scontrol", "killed", "3", "job 3 ended as FAILED (JobLaunchFailure) by signal 11 on n1"),
        ("22_05", "scontrol", "cancelled", "6", "job 6 was cancelled in the queue"),
        ("22_05", "scontrol", "array-task", "10_2", "job 10_2 waits (BeginTime)"),
        ("22_05", "squeue", "", "1", "job 1 is RUNNING on n1"),
        ("22_05", "squeue", "", "10_2", "job 10_2 waits (BeginTime)"),
        ("22_05", "sacct", "killed", "3", "job 3 ended as FAILED by signal 11 on n1"),
        ("22_05", "sacct", "cancelled", "6", "job 6 was cancelled in the queue"),
        ("22_05", "sacct", "requeued", "8", "job 8 is RUNNING on n3"),
        ("22_05", "sacct", "array-task", "18_1", "job 18_1 ended as COMPLETED on n1"),
        ("22_05", "sacct", "array-waiting", "10_2", None),  # pending tasks have no records of their own
        *(
            (release, *row)
            for release in ("24_11", "26_05")
            for row in (
                ("scontrol", "1", "1", "job 1 is RUNNING on n[1-2]"),
                ("scontrol", "2_1", "2_1", "job 2_1 ended as FAILED with exit code 3 on n1"),
                ("scontrol", "requeued", "1", "job 1 waits (BeginTime)"),
                ("squeue", "2", "2_1", "job 2_1 ended as FAILED on n1"),
                ("sacct", "1", "1", "job 1 ended as CANCELLED on n[2-3]"),
            )
        ),
    ],
)
def test_recorded_job(release: str, command: str, section: str, job_id: str, sentence: str | None) -> None:
    info = PARSERS[command](recorded(command, section, release=release), job_id)
    assert (info.sentence() if info else None) == sentence
    assert info is None or info.alive == ("waits" in info.sentence() or " is " in info.sentence())


def test_job_of_an_expedited_requeue_waits() -> None:
    info = output.parse_scontrol("JobId=7 JobState=EXPEDITING Reason=None Restarts=1 ExpeditedRequeue=Yes", "7")
    assert info is not None
    assert (info.alive, info.waiting, info.restarts) == (True, True, 1)


def test_requeued_job_of_scontrol() -> None:
    info = job(output.parse_scontrol(recorded("scontrol", "requeued"), "8"))
    times: dict[str, Any] = {"submitted": at("08:00:57"), "started": at("08:02:58"), "ended": at("09:02:58")}
    assert info == output.JobInfo(id="8", name="requeued", state="PENDING", reason="BeginTime", restarts=1, **times)
    assert info.describe(at("08:01:57")) == (
        "job 8 waits (BeginTime), expected to start at 2026-11-20 08:02, 1 min in the queue, requeued 1 time"
    )
    info = job(output.parse_scontrol(recorded("scontrol", "dependency"), "13"))
    assert info.describe(at("08:00:54")) == "job 13 waits (Dependency), 1 s in the queue"
    assert job(output.parse_scontrol(recorded("scontrol", "cancelled"), "6")).reason == "", "why it was pending"
    finished = output.JobInfo(id="1", state="COMPLETED", submitted=100.0, started=99.0)
    assert [replace(finished, started=start).queue_s(150.0) for start in (99.0, 130.0, None)] == [0.0, 30.0, None]


def test_steps_of_sacct() -> None:
    text = recorded("sacct", "timeout")
    info = job(output.parse_sacct(text, "1"))
    assert (info.step_states, info.out_of_memory) == (("CANCELLED",), False)
    text += "1.0|step|OUT_OF_MEMORY|0:125|x|x|x|n1\n1.1|step|FAILED|1:0|x|x|x|n1\n"
    info = job(output.parse_sacct(text, "1"))
    assert (info.step_states, info.out_of_memory) == (("CANCELLED", "OUT_OF_MEMORY", "FAILED"), True)


def test_job_that_lost_a_node_has_one_start() -> None:
    rows = [
        "7|j|RESIZING|0:0|2026-11-20T06:00:00|2026-11-20T06:00:05|2026-11-20T06:01:05|n[1-4]",
        "7|j|COMPLETED|0:0|2026-11-20T06:00:00|2026-11-20T06:01:05|2026-11-20T06:02:05|n[1-3]",
    ]
    info = job(output.parse_sacct("\n".join(rows), "7"))
    assert (info.restarts, info.state, info.started) == (0, "COMPLETED", at("06:00:05"))


# --- other releases and damaged lines


def test_lines_of_another_format_are_ignored() -> None:
    assert output.parse_scontrol("", "1") is None
    info = job(output.parse_scontrol(f"JobId=1 Restarts=x ExitCode={'9' * 5000}:0", "1"))
    assert (info.state, info.restarts, info.exit_code) == ("UNKNOWN", 0, 0)
    assert output.parse_squeue("slurm_load_jobs error\n1|RUNNING\n", "1") is None
    assert output.parse_sacct("1\n1|a|b\n", "1") is None
    rows = "1|a|COMPLETED|0:0||Unknown|None|n1\n1.0|s|COMPLETED|0:0||||n1\n"
    assert job(output.parse_sacct(rows, "1")).state == "COMPLETED"
    (partition,) = output.parse_partitions(
        f"PartitionName=p MaxNodes=² MinNodes={'9' * 5000}", "p|n/a|1|1|gpu:1|idle|n1\n"
    )
    assert partition.nodes == ()
    assert (partition.limit("MaxNodes"), partition.limit("MinNodes")) == (None, None)


@pytest.mark.parametrize(
    ("state", "alive", "sentence"),
    [
        ("RESV_DEL_HOLD", True, "job 1 waits (RESV_DEL_HOLD)"),
        ("HIBERNATING", True, "job 1 is HIBERNATING"),
        ("DEADLINE", False, "job 1 ended as DEADLINE"),
    ],
    ids=["held", "of-a-later-release", "ended"],
)
def test_job_has_ended_only_in_a_state_known_as_an_end(state: str, alive: bool, sentence: str) -> None:
    info = job(output.parse_scontrol(f"JobId=1 JobState={state}", "1"))
    assert (info.alive, info.sentence()) == (alive, sentence)


# --- Values and records in the output of Slurm's commands.


def test_free_text_is_not_searched_for_keys() -> None:
    """Keys that plain jobs lack, such as ArrayTaskId, must not come from the user's texts; the first value counts."""
    line = (
        "JobId=1 JobName=a JobState=FAILED b UserId=ada(7) JobState=RUNNING NodeList=n1 NodeList=n9 Command=/x"
        " HetJobOffset=1 SubmitLine=sbatch ArrayTaskId=2 WorkDir=/tmp Comment=Restarts=9"
    )
    expected = {"JobId": "1", "JobName": "a JobState=FAILED b", "UserId": "ada(7)", "JobState": "RUNNING"}
    assert output.parse_record(line) == expected | {"NodeList": "n1", "Command": "/x"}


@pytest.mark.parametrize(
    ("parse", "values"),
    [
        (output.parse_text, {"n1": "n1", "(null)": "", "None assigned": "", "": "", None: ""}),
        (output.parse_count, {"12": 12, "UNLIMITED": None, "²": None, "9" * 5000: None, "": None}),
        (
            output.parse_time,
            {"1795824300": 1795824300.0, "0": None, "Unknown": None, "N/A": None, "": None, None: None, "None": None},
        ),
        (output.parse_minutes, {"1-00:00:00": 1440, "00:30:00": 30, "2-12": 3600, "90": 90, "10:30": 10.5, "": None}),
        (output.parse_minutes, {"UNLIMITED": None}),
        (output.parse_seconds, {"30 sec": 30, "2 min": 120, "30": 30, "soon": None, "": None}),
        (
            output.parse_memory_mb,
            {"2000": 2000, "64gb": 65536, "1T": 1048576, "2048K": 2, "0": 0, "lots": None, "": None},
        ),
    ],
)
def test_values(parse: Callable[[Any], Any], values: dict[str | None, Any]) -> None:
    assert {text: parse(text) for text in values} == values


@pytest.mark.parametrize(
    ("parse", "text"),
    [(output.parse_time, "Tomorr 07:05"), (output.parse_time, "20 Nov"), (output.parse_minutes, "1 day")],
)
def test_unreadable_value_is_no_missing_value(parse: Callable[[str], float | None], text: str) -> None:
    """A job with an unreadable end has an end: it must be asked for again, or shown as unknown."""
    with pytest.raises(SlurmError, match=re.escape(repr(text))):
        parse(text)


def test_times_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        seconds = output.parse_time("2026-11-20T07:05:00")
        assert seconds is not None
        assert time.strftime("%H:%M", time.localtime(seconds)) == "07:05"
    finally:
        monkeypatch.undo()
        time.tzset()


# --- Partitions and nodes parsed from the output of scontrol and sinfo.


PARTITIONS = (
    "PartitionName=gpu AllowGroups=ALL AllowAccounts=ada,bob Default=YES MaxNodes=4 MinNodes=0"
    " MaxTime=1-00:00:00 State=UP\n"
    "PartitionName=empty AllowGroups=staff AllowAccounts=ALL MaxNodes=UNLIMITED State=DOWN\n"
)
NODES = "gpu|2|64|256000|gpu:a100:4(S:0-1)|mixed|n[1-2]\ngpu|1|16+|64000+|(null)|drained*|n3\nnot a line\n"


def test_partitions_and_their_nodes() -> None:
    gpu, empty = output.parse_partitions(PARTITIONS, NODES)
    assert gpu.nodes == (
        output.NodeGroup(
            partition="gpu",
            num_nodes=2,
            cpus=64,
            memory_mb=256000,
            gpus=4,
            gpu_types={"a100": 4},
            usable=True,
            names="n[1-2]",
        ),
        output.NodeGroup(partition="gpu", num_nodes=1, cpus=16, memory_mb=64000, gpus=0, usable=False, names="n3"),
    )
    assert (gpu.limit("MaxNodes"), empty.limit("MaxNodes"), empty.limit("MaxMemPerNode")) == (4, None, None)
    assert (gpu.allowed("Accounts"), gpu.allowed("Groups")) == (("ada", "bob"), None)
    assert empty.allowed("Groups") == ("staff",)
    assert (empty.name, empty.nodes) == ("empty", ())


@pytest.mark.parametrize(
    ("gres", "gpus", "types"),
    [("(null)", 0, {}), ("gpu:4(S:0-1)", 4, {}), ("gpu:a100:2,gpu:v100:3(S:1)", 5, {"a100": 2, "v100": 3}),
     ("gpu:a100:no_consume:4", 4, {"a100": 4}), ("gpu:a100:2(S:0),gpu:a100:2(S:1)", 4, {"a100": 4}),
     ("shard:8,gpu:1g.5gb:7", 7, {"1g.5gb": 7}), ("license:3", 0, {})],
)  # fmt: skip
def test_gpus_and_states_of_nodes(gres: str, gpus: int, types: dict[str, int]) -> None:
    usable = ["idle", "mixed", "allocated", "idle~", "planned", "reserved"]
    for state in [*usable, "down", "drained", "draining", "idle*", "fail", "down*"]:
        (partition,) = output.parse_partitions("PartitionName=p", f"p|1|1|1|{gres}|{state}|n1")
        (group,) = partition.nodes
        assert (group.gpus, group.gpu_types, group.usable) == (gpus, types, state in usable)


def test_node_states_with_reason() -> None:
    """sinfo prints a line per node and partition; a reason may contain the separator."""
    two, one = output.parse_node_states(
        "n2|drained|(null)|(null)|8|32768|2026-11-20T14:50:00|root|bad DIMM in slot 4 | see ticket\n"
        "n1|idle|a,b|gpu:2|8|32768|Unknown|Unknown|none\nn1|idle|a,b|gpu:2|8|32768|Unknown|Unknown|none\nnot a line\n"
    )
    assert one == output.NodeState(name="n1", state="idle", hardware="a,b|gpu:2|8|32768")
    assert (two.user, two.reason) == ("root", "bad DIMM in slot 4 | see ticket")
    assert two.since == output.parse_time("2026-11-20T14:50:00")


# --- the starts of a job, and the resources of its ranks


SACCT = """\
41|train|2026-11-20T06:00:00|2026-11-20T06:00:05|2026-11-20T06:01:05|n[1-2]|8|billing=8,cpu=8,gres/gpu=4,node=2|0|PREEMPTED
41|train|2026-11-20T06:01:05|2026-11-20T06:03:05|Unknown|n[3-4]|8|cpu=8,gres/gpu:a100=4,gres/gpu=4,mem=4G,node=2|7200|RUNNING
41|train|2026-11-20T06:04:05|Unknown|Unknown|None assigned|0|||PENDING
4|other|2026-11-20T06:00:00|2026-11-20T06:00:05|2026-11-20T06:01:05|n1|1|cpu=1||CANCELLED by 1000
41|no job
"""


def test_each_start_of_a_job_is_read() -> None:
    more = {"name": "train", "cores": 8, "gpus": 4, "resized": None, "last_nodes": ""}
    first = {"began": at("06:00:05"), "ended": at("06:01:05"), "queue_s": 5.0, "nodes": "n[1-2]", "energy_j": None}
    second = {"began": at("06:03:05"), "ended": None, "queue_s": 120.0, "nodes": "n[3-4]", "energy_j": 7200.0}
    assert list(map(asdict, output.parse_starts(SACCT, "41"))) == [
        first | more | {"state": "PREEMPTED"},
        second | more | {"state": "RUNNING"},
    ]
    assert output.parse_starts("", "41") == []
    assert [start.state for start in output.parse_starts(SACCT, "4")] == ["CANCELLED"]
    # Slurm submits a requeued job again some seconds after its end, when its nodes are cleaned up.
    late = SACCT.replace("41|train|2026-11-20T06:01:05", "41|train|2026-11-20T06:01:13")
    assert [start.queue_s for start in output.parse_starts(late, "41")] == [5.0, 120.0]
    other = late.replace("41|train|2026-11-20T06:01:13", "41|another|2026-11-20T06:01:13")
    assert [start.queue_s for start in output.parse_starts(other, "41")] == [5.0, 112.0], "a job with a reused id"


def test_sizes_of_a_job_that_loses_nodes_are_one_start() -> None:
    lines = [
        "7|j|2026-11-20T06:00:00|2026-11-20T06:00:05|2026-11-20T06:01:05|n[1-4]|8|cpu=8|5|RESIZING",
        "7|j|2026-11-20T06:00:00|2026-11-20T06:01:05|2026-11-20T06:02:05|n[1,3-4]|6|cpu=6|7|REQUEUED",
        "7|j|2026-11-20T06:02:05|2026-11-20T06:04:10|Unknown|n[1-4]|8|cpu=8||RUNNING",
    ]
    first, second = output.parse_starts("\n".join(lines), "7")
    assert (first.nodes, first.cores, first.energy_j, first.state) == ("n[1-4]", 8, 12.0, "REQUEUED")
    assert (first.began, first.ended) == (at("06:00:05"), at("06:02:05"))
    assert (first.resized, first.last_nodes) == (at("06:01:05"), "n[1,3-4]")
    assert second.resized is None
    assert (second.began, second.ended, second.cores) == (at("06:04:10"), None, 8)
    lines[1] = lines[1].replace("06:01:05", "06:00:05", 1)
    assert [start.cores for start in output.parse_starts("\n".join(lines), "7")] == [8, 8], "lost in its first second"


# --- resources


def test_allocated_cores_include_those_without_ranks() -> None:
    config = Config(cluster=ClusterConfig(nodes=2, tasks_per_node=2, cpus_per_task=2))
    env = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "8,4"}
    found = job_resources(config, ["n1", "n2"], env)
    assert found.unit == "core"
    assert found.nodes == {
        "n1": NodeShare(allocated=8, share=2, ranks=[0, 1]),
        "n2": NodeShare(allocated=4, share=2, ranks=[2, 3]),
    }
    assert job_resources(config, ["n1", "n2"], {}).nodes["n1"].allocated == 4, "as requested"
    damaged = env | {"SLURM_JOB_CPUS_PER_NODE": "many"}
    assert job_resources(config, ["n1", "n2"], damaged).nodes["n1"].allocated == 4


def test_nodes_without_ranks_and_unused_gpus_are_allocated_too() -> None:
    config = Config(cluster=ClusterConfig(nodes=2, tasks_per_node=2, spare_nodes=1))
    env = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_CPUS_PER_NODE": "2(x3)"}
    found = job_resources(config, ["n1", "n3"], env, ["n2"])
    assert found.nodes["n2"] == NodeShare(allocated=2, share=1, ranks=[])
    assert (found.nodes["n3"].ranks, found.idle) == ([2, 3], ("n2",))
    config = replace(config, cluster=replace(config.cluster, gpus_per_node=4))
    found = job_resources(config, ["n1", "n3"], env, ["n2"])
    assert (found.unit, found.nodes["n2"]) == ("GPU", NodeShare(allocated=4, share=1, ranks=[]))
    assert found.nodes["n1"] == NodeShare(allocated=4, share=1, ranks=[0, 1])
    on_cpu = job_resources(replace(config, launch=LaunchConfig(device="cpu")), ["n1", "n3"], env)
    assert on_cpu.nodes["n1"] == NodeShare(allocated=4, share=1, ranks=[])


def test_roles_without_a_gpu_have_no_share() -> None:
    roles: dict[str, Any] = {"agent": RoleRequest(nodes=1, gpus_per_node=2), "observer": RoleRequest(gpus_per_node=0)}
    config = Config(roles={"agent": 2, "observer": 4}, cluster=ClusterConfig(nodes=3, tasks_per_node=2, roles=roles))
    found = job_resources(config, ["g1", "n1", "n2"], {})
    other = NodeShare(allocated=2, share=1, ranks=[])
    assert found.nodes == {"g1": NodeShare(allocated=2, share=1, ranks=[0, 1]), "n1": other, "n2": other}


def test_cores_of_roles_with_different_requests() -> None:
    roles: dict[str, Any] = {"agent": RoleRequest(nodes=1, cpus_per_task=4), "observer": RoleRequest(nodes=2)}
    config = Config(roles={"agent": 1, "observer": 4}, cluster=ClusterConfig(nodes=3, roles=roles))
    env = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_CPUS_PER_NODE": "8(x3)"}
    found = job_resources(config, ["n1", "n2", "n3"], env)
    assert [(share.allocated, share.share, share.ranks) for share in found.nodes.values()] == [
        (8, 4, [0]),
        (8, 1, [1, 2]),
        (8, 1, [3, 4]),
    ]


# --- All parsers of the outputs of Slurm 22.05, 24.11 and 26.05, recorded on the dev cluster: the same facts from each.


RELEASES = ["22_05", "24_11", "26_05"]


@pytest.mark.parametrize("release", RELEASES)
def test_recorded_cluster(release: str) -> None:
    text = recorded("nodes", release=release)
    assert list(output.parse_boot_times(text)) == ["n1", "n2"]
    settings = output.parse_settings(recorded("config", release=release))
    assert settings["SLURM_VERSION"].startswith(release.replace("_", "."))
    assert (settings["ClusterName"], settings["PreemptMode"]) == ("hpcdist", "REQUEUE")
    assert (output.parse_seconds(settings["KillWait"]), output.parse_seconds(settings["UnkillableStepTimeout"])) == (
        5,
        60,
    )
    found = output.parse_partitions(recorded("partition", release=release), recorded("sinfo", release=release))
    assert [(part.name, part.facts["MaxTime"], part.facts["PreemptMode"], part.facts["Default"]) for part in found] == [
        ("main", "1-00:00:00", "REQUEUE", "YES"),
        ("high", "1-00:00:00", "OFF", "NO"),
    ]
    for part in found:
        assert (part.limit("MaxNodes"), part.allowed("Accounts")) == (None, None)
        (group,) = part.nodes
        assert (group.num_nodes, group.cpus, group.memory_mb, group.gpus) == (4, 8, 32768, 2)
        assert (group.names, group.usable) == ("n[1-4]", True)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.processes
def test_estimated_start_and_rejections(release: str, commands: FakeCommands) -> None:
    def estimate(section: str, code: int = 0) -> str:
        commands.add("sbatch", error=recorded("messages", section, release=release), code=code)
        return estimate_start(load_config("ddp_digits", ["name=a"]))

    text = estimate("test-only")
    assert text.startswith("the job would start at 2026-11-21T23:4")
    assert text.endswith(" using 2 processors on nodes n[1-2] in partition main")
    assert len(text.split()) == 15
    # As Slurm prints it in the environment of hpcdist's commands.
    commands.add("sbatch", error="sbatch: Job 7 to start at 1795880000 using 2 processors on nodes n1\n")
    text = estimate_start(load_config("ddp_digits", ["name=a"]))
    assert text == "the job would start at 2026-11-28T15:33:20 using 2 processors on nodes n1"
    reasons = {
        "test-only-account": "Invalid account or account/partition combination specified",
        "test-only-gpus": "Requested node configuration is not available",
        "test-only-part": "invalid partition specified: nosuch allocation failure: Invalid partition name specified",
    }
    for section, reason in reasons.items():
        with pytest.raises(UserMistake, match=f"^Slurm rejects this job: {reason}$"):
            estimate(section, 1)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.processes
def test_second_requeue_and_unknown_job(release: str, commands: FakeCommands) -> None:
    commands.add("scontrol", error=recorded("messages", "requeue-again", release=release), code=1)
    client.requeue_job("1")
    commands.add("scontrol", error="Access/permission denied for job 1\n", code=1)
    with pytest.raises(SlurmError, match="Access/permission denied"):
        client.requeue_job("1")
    commands.add("scontrol", error=recorded("messages", "unknown-job", release=release), code=1)
    assert client.job_record("99999") == {}
