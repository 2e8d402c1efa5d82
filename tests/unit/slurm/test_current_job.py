"""What is read from scontrol, and what is asked of it; a script stands in for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcdist.errors import HpcdistError
from hpcdist.slurm import current_job
from hpcdist.slurm.current_job import (
    CurrentJob,
    job_id_of,
    job_ids,
    node_features,
    parse_minutes,
    parse_records,
    rebooted_since,
    signal_steps,
    steps,
    why_no_het_jobs,
)
from hpcdist.slurm.job_info import parse_time

LINE = (
    "JobId=41 JobName=digits/first UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 "
    "Partition=main ReqNodeList=(null) ExcNodeList=n[7-8] NodeList=n[1-2] "
    "StartTime=2026-11-20T06:35:00 EndTime=2026-11-20T07:05:00 Command=/shared/my run.sh --flag=a=b"
)
JOB = CurrentJob(id="41", restart_count=2, end_time=None, partition="main", nodes=("n1", "n2"), excluded=("n7", "n8"))


@pytest.fixture(autouse=True)
def sigterm_as_before() -> Iterator[None]:
    """A requeue makes this process deaf to it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def fake_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that alone is on PATH: `says` is printed, `fails` makes it fail, `asked` has the arguments."""
    script = tmp_path / "scontrol"
    script.write_text(
        f"#!/bin/sh\ncd {tmp_path}\necho \"$@\" >> asked\n"
        "if test -e fails; then read -r line < fails; echo \"$line\" >&2; exit 1; fi\n"
        "while read -r line; do echo \"$line\"; done < says\n"
    )  # fmt: skip
    script.chmod(0o755)
    (tmp_path / "says").write_text(LINE + "\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


HET = (
    "JobId=41 HetJobId=41 HetJobOffset=0 HetJobIdSet=41-42 JobState=RUNNING Restarts=1 EndTime=2026-11-20T07:05:00\n"
    "JobId=42 HetJobId=41 HetJobOffset=1 HetJobIdSet=41-42 JobState=RUNNING Restarts=1 EndTime=2026-11-20T06:05:00\n"
)


def test_a_heterogeneous_job_has_a_record_for_each_component(fake_scontrol: Path) -> None:
    assert [(facts["JobId"], facts["HetJobOffset"]) for facts in parse_records(HET)] == [("41", "0"), ("42", "1")]
    (fake_scontrol / "says").write_text(HET)
    env = {"SLURM_JOB_ID": "41", "SLURM_HET_SIZE": "2"}
    # It ends with the component that ends first.
    assert CurrentJob.here(env) == CurrentJob(id="41", restart_count=1, end_time=parse_time("2026-11-20T06:05:00"))
    assert job_ids(env | {"SLURM_JOB_ID_HET_GROUP_0": "41", "SLURM_JOB_ID_HET_GROUP_1": "42"}) == ["41", "42"]
    assert job_ids({"SLURM_JOB_ID": "41"}) == ["41"]
    assert job_ids({"SLURM_JOB_ID": "41", "SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "2"}) == ["41_2"]


def test_features_of_nodes(fake_scontrol: Path) -> None:
    (fake_scontrol / "says").write_text(
        "NodeName=n1 Arch=x86_64 AvailableFeatures=a,b,c ActiveFeatures=a,b\n"
        "NodeName=n2 AvailableFeatures=(null) ActiveFeatures=(null)\n"
    )
    assert node_features(["n1", "n2"]) == {"n1": {"a", "b"}, "n2": set()}
    assert (fake_scontrol / "asked").read_text() == "show node --oneliner n1,n2\n"


def test_nodes_that_have_booted_since(fake_scontrol: Path) -> None:
    (fake_scontrol / "says").write_text(
        "NodeName=n1 BootTime=2026-11-20T06:35:00\n"
        "NodeName=n2 BootTime=2026-11-20T07:35:00\n"
        "NodeName=n3 BootTime=None\n"
    )
    since = parse_time("2026-11-20T07:00:00")
    assert since is not None
    assert rebooted_since(["n1", "n2", "n3"], since) == ["n2"]


def test_a_slurm_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("squeue", "scancel", "scontrol"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho x >> {tmp_path}/calls\nexec sleep 1000\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setattr(current_job, "ANSWER_S", 0.2)
    assert steps() is None
    signal_steps(["41.0"], "KILL")
    signal_steps([], "KILL")
    with pytest.raises(HpcdistError, match=r"^scontrol requeue 41: no answer within 0\.2 s$"):
        JOB.requeue()
    assert (tmp_path / "calls").read_text() == "x\n" * 3


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ("SchedulerParameters     = bf_interval=1\nSchedulerType           = sched/backfill\n", ""),
        ("SchedulerType           = sched/builtin\n", "SchedulerType=sched/builtin"),
        (
            "SchedulerParameters = a=1,disable_hetjob_steps\nSchedulerType = sched/backfill\n",
            "SchedulerParameters=disable_hetjob_steps",
        ),
    ],
)
def test_whether_a_cluster_has_heterogeneous_jobs(fake_scontrol: Path, says: str, why: str) -> None:
    (fake_scontrol / "says").write_text("Configuration data as of 2026-11-20T08:00:00\n" + says)
    assert why_no_het_jobs() == why
    assert (fake_scontrol / "asked").read_text() == "show config\n"


def test_the_last_task_of_an_array_does_not_go_by_the_arrays_id() -> None:
    assert job_id_of({"SLURM_JOB_ID": "41"}) == "41"
    task = {"SLURM_JOB_ID": "41", "SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "2"}
    assert job_id_of(task) == "41_2"
    with pytest.raises(HpcdistError, match="SLURM_JOB_ID is not set"):
        job_id_of({"SLURM_ARRAY_TASK_ID": "2"})


def test_the_job_around_this_process(fake_scontrol: Path) -> None:
    job = CurrentJob.here({"SLURM_JOB_ID": "41"})
    assert job == CurrentJob(
        id="41",
        restart_count=2,
        end_time=parse_time("2026-11-20T07:05:00"),
        partition="main",
        nodes=("n1", "n2"),
        excluded=("n7", "n8"),
    )
    assert (fake_scontrol / "asked").read_text() == "show job --oneliner 41\n"


def test_outside_a_job_there_is_none() -> None:
    with pytest.raises(HpcdistError, match=r"^SLURM_JOB_ID is not set: this is for the inside of a Slurm job$"):
        CurrentJob.here({})


@pytest.mark.parametrize(("restarts", "again"), [(2, False), (3, True)])
def test_slurm_has_queued_it_when_it_counts_one_more(fake_scontrol: Path, restarts: int, again: bool) -> None:
    (fake_scontrol / "says").write_text(LINE.replace("Restarts=2", f"Restarts={restarts}") + "\n")
    assert JOB.will_run_again() == again


def test_a_requeue_is_asked_for(fake_scontrol: Path) -> None:
    JOB.requeue()
    assert (fake_scontrol / "asked").read_text() == "requeue 41\n"


def test_nodes_are_avoided_besides_those_that_were(fake_scontrol: Path) -> None:
    JOB.requeue(exclude=["n2"])
    assert (fake_scontrol / "asked").read_text() == "requeue 41\nupdate JobId=41 ExcNodeList=n7,n8,n2\n"


def test_slurms_sigterm_does_not_end_a_process_that_has_asked_for_a_requeue(fake_scontrol: Path) -> None:
    JOB.requeue()
    os.kill(os.getpid(), signal.SIGTERM)


LIKE = "(null)|gpu:2|8|32768"


@pytest.mark.parametrize(
    ("others", "idle_only", "enough"),
    [
        ([], True, False),
        ([f"n3|idle|{LIKE}"], True, True),
        ([f"n3|mix|{LIKE}"], True, False),
        ([f"n3|mix|{LIKE}"], False, True),
        ([f"n3|down*|{LIKE}"], False, False),
        ([f"n7|idle|{LIKE}"], False, False),  # avoided already
        (["n3|idle|(null)|(null)|8|32768"], False, False),  # without the GPUs that the job's nodes have
    ],
)
def test_a_node_is_replaceable_where_there_are_others_of_its_kind(
    fake_scontrol: Path, others: list[str], idle_only: bool, enough: bool
) -> None:
    (fake_scontrol / "scontrol").rename(fake_scontrol / "sinfo")
    (fake_scontrol / "says").write_text("\n".join([f"n1|alloc|{LIKE}", f"n2|alloc|{LIKE}", *others]) + "\n")
    assert JOB.replaceable(["n2"], idle_only=idle_only) == enough
    assert (fake_scontrol / "asked").read_text() == ("--noheader --Node --partition=main --format=%N|%t|%f|%G|%c|%m\n")


def test_of_two_requeues_at_once_the_second_is_content(fake_scontrol: Path) -> None:
    (fake_scontrol / "fails").write_text("Job is pending execution for job 41\n")
    JOB.requeue()


def test_another_refusal_is_told(fake_scontrol: Path) -> None:
    (fake_scontrol / "fails").write_text("Requested operation is presently disabled for job 41\n")
    with pytest.raises(HpcdistError, match=r"^scontrol requeue 41: Requested operation is presently disabled for job"):
        JOB.requeue()


def test_without_scontrol_the_error_names_it(fake_scontrol: Path) -> None:
    os.unlink(fake_scontrol / "scontrol")
    with pytest.raises(HpcdistError, match=r"^scontrol show job --oneliner 41: .*No such file .*: 'scontrol'"):
        CurrentJob.here({"SLURM_JOB_ID": "41"})


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("1-00:00:00", 1440),
        ("00:30:00", 30),
        ("2-12", 3600),
        ("90", 90),
        ("10:30", 10.5),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_time_limits(text: str, minutes: float | None) -> None:
    assert parse_minutes(text) == minutes


def test_whether_a_job_may_be_queued_again(fake_scontrol: Path) -> None:
    job = CurrentJob.here({"SLURM_JOB_ID": "41"})
    assert (job.may_requeue, job.time_limit_min) == (True, None)
    (fake_scontrol / "says").write_text(LINE.replace("Requeue=1", "Requeue=0 TimeLimit=01:00:00") + "\n")
    job = CurrentJob.here({"SLURM_JOB_ID": "41"})
    assert (job.may_requeue, job.time_limit_min) == (False, 60)
