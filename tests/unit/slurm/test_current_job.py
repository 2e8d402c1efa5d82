"""The current job as scontrol reports it, and its requeue; scripts stand in for Slurm's commands."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_recordings import FakeCommands

from hpcdist.errors import HpcdistError
from hpcdist.slurm import client
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.current_job import (
    CurrentJob,
    component_job_ids,
    job_id_of,
    running_steps,
    signal_named_steps,
    signal_steps,
)
from hpcdist.slurm.output import parse_time

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

LINE = (
    "JobId=41 JobName=digits/first UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 "
    "Partition=main ReqNodeList=(null) ExcNodeList=n[7-8] NodeList=n[1-2] "
    "StartTime=2026-11-20T06:35:00 EndTime=2026-11-20T07:05:00 Command=/shared/my run.sh --flag=a=b"
)
JOB = CurrentJob(id="41", restart_count=2, end_time=None, partition="main", nodes=("n1", "n2"), excluded=("n7", "n8"))
ENV = {"SLURM_JOB_ID": "41"}


@pytest.fixture(autouse=True)
def restored_sigterm() -> Iterator[None]:
    """Restore SIGTERM's handler: `requeue` makes the process ignore the signal."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """A folder with a scontrol that prints LINE, the only folder on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(client, "JOB_RETRY_S", 0.0)
    commands = FakeCommands(tmp_path)
    commands.add("scontrol", f"{LINE}\n")
    return commands


def test_job_from_the_environment(commands: FakeCommands) -> None:
    assert CurrentJob.from_env(ENV) == CurrentJob(
        id="41",
        restart_count=2,
        end_time=parse_time("2026-11-20T07:05:00"),
        partition="main",
        nodes=("n1", "n2"),
        excluded=("n7", "n8"),
    )
    assert commands.calls() == ["scontrol show job --oneliner 41"]


def test_heterogeneous_job_ends_with_the_component_that_ends_first(commands: FakeCommands) -> None:
    record = (
        "JobId={id} HetJobId=41 HetJobOffset={offset} JobState=RUNNING Restarts=1 EndTime=2026-11-20T0{hour}:05:00\n"
    )
    leader, second = record.format(id=41, offset=0, hour=7), record.format(id=42, offset=1, hour=6)
    commands.add("scontrol", leader + second)
    expected = CurrentJob(id="41", restart_count=1, end_time=parse_time("2026-11-20T06:05:00"))
    assert CurrentJob.from_env(ENV | {"SLURM_HET_SIZE": "2"}) == expected


def test_time_limit_and_permission_to_requeue(commands: FakeCommands) -> None:
    job = CurrentJob.from_env(ENV)
    assert (job.may_requeue, job.time_limit_min) == (True, None)
    commands.add("scontrol", LINE.replace("Requeue=1", "Requeue=0 TimeLimit=01:00:00") + "\n")
    job = CurrentJob.from_env(ENV)
    assert (job.may_requeue, job.time_limit_min) == (False, 60)


def test_without_a_job_or_an_answer(commands: FakeCommands) -> None:
    with pytest.raises(HpcdistError, match=r"^SLURM_JOB_ID is not set: this command runs inside a Slurm job only$"):
        CurrentJob.from_env({})
    commands.add("scontrol", error="slurm_load_jobs error: Invalid job id specified\n", code=1)
    with pytest.raises(HpcdistError, match=r"^Slurm does not know job 41, the one in SLURM_JOB_ID$"):
        CurrentJob.from_env(ENV)
    os.unlink(commands.folder / "scontrol")
    with pytest.raises(HpcdistError, match=r"^scontrol is not installed on this machine$"):
        CurrentJob.from_env(ENV)


def test_array_task_has_the_arrays_id_and_its_index() -> None:
    """The last task of an array has the array's id in SLURM_JOB_ID."""
    task = {"SLURM_JOB_ID": "41", "SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "2"}
    assert (job_id_of(ENV), job_id_of(task), component_job_ids(task)) == ("41", "41_2", ["41_2"])
    with pytest.raises(HpcdistError, match="SLURM_JOB_ID is not set"):
        job_id_of({"SLURM_ARRAY_TASK_ID": "2"})


def test_job_ids_of_components() -> None:
    het = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "41", "SLURM_JOB_ID_HET_GROUP_1": "42"}
    assert component_job_ids(ENV | het) == ["41", "42"]
    assert component_job_ids(ENV) == ["41"]


# --- steps


def test_steps_are_those_of_the_current_job(commands: FakeCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    commands.add("squeue", "41.0 attempt-001\n41.1 preflight\n")
    commands.add("scancel")
    assert running_steps() == {"41.0": "attempt-001", "41.1": "preflight"}
    assert signal_named_steps("preflight", "KILL")
    assert not signal_named_steps("attempt-002", "KILL")
    assert [line for line in commands.calls() if "scancel" in line] == ["scancel --signal=KILL 41.1"]


def test_a_controller_that_hangs_costs_the_time_limit_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = FakeCommands(tmp_path)
    for name in ("squeue", "scancel", "scontrol"):
        commands.add_script(name, "exec sleep 1000")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setattr(client, "JOB_TIMEOUT_S", 0.2)
    assert not signal_named_steps("attempt-001", "KILL")
    signal_steps(["41.0"], "KILL")
    with pytest.raises(SlurmError, match=r"^scontrol did not answer within 0\.2 s$"):
        JOB.requeue()
    assert commands.programs() == ["squeue", "scancel", "scontrol"]


# --- requeue


@pytest.mark.parametrize(("restarts", "requeued"), [(2, False), (3, True)])
def test_requeued_job_has_a_higher_restart_count(commands: FakeCommands, restarts: int, requeued: bool) -> None:
    commands.add("scontrol", LINE.replace("Restarts=2", f"Restarts={restarts}") + "\n")
    assert JOB.is_requeued() == requeued


@pytest.mark.parametrize(
    ("state", "ending"),
    [("RUNNING", False), ("SUSPENDED", False), ("COMPLETING", True), ("PENDING", True), ("CANCELLED", True)],
)
def test_job_that_slurm_ends(commands: FakeCommands, state: str, ending: bool) -> None:
    commands.add("scontrol", LINE.replace("RUNNING", state) + "\n")
    assert JOB.is_ending() == ending
    over = replace(JOB, end_time=time.time() - 1)
    assert not over.is_ending(), "the job ends because of its time limit"
    commands.add("scontrol", error="slurm_load_jobs error: Invalid job id specified\n", code=1)
    assert not JOB.is_ending()


def test_requeue_adds_nodes_to_those_that_are_excluded(commands: FakeCommands) -> None:
    JOB.requeue()
    JOB.requeue(exclude=["n2"])
    requeue = "scontrol requeue 41"
    assert commands.calls() == [requeue, requeue, "scontrol update JobId=41 ExcNodeList=n7,n8,n2"]


def test_process_that_requeues_its_job_ignores_sigterm(commands: FakeCommands) -> None:
    JOB.requeue()
    os.kill(os.getpid(), signal.SIGTERM)


HARDWARE = "(null)|gpu:2|8|32768"


@pytest.mark.parametrize(
    ("others", "idle_only", "enough"),
    [
        ([], True, False),
        ([f"n3|idle|{HARDWARE}"], True, True),
        ([f"n3|mixed|{HARDWARE}"], True, False),
        ([f"n3|mixed|{HARDWARE}"], False, True),
        ([f"n3|down*|{HARDWARE}"], False, False),
        ([f"n7|idle|{HARDWARE}"], False, False),  # excluded already
        (["n3|idle|(null)|(null)|8|32768"], False, False),  # without the GPUs of the job's nodes
    ],
)
def test_node_is_replaceable_if_the_partition_has_another_with_its_hardware(
    commands: FakeCommands, others: list[str], idle_only: bool, enough: bool
) -> None:
    nodes = [f"n1|allocated|{HARDWARE}", f"n2|allocated|{HARDWARE}", *others]
    commands.add("sinfo", "".join(f"{line}|Unknown|Unknown|none\n" for line in nodes))
    assert JOB.replaceable(["n2"], idle_only=idle_only) == enough
