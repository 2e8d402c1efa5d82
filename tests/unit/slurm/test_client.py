"""The client of Slurm: which commands run, with which options, and how their failures are reported; the current job."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from subprocess import CompletedProcess
from typing import Any

import pytest
from slurm_recordings import FakeCommands, recorded

from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.host.time_limits import run_within
from hpcdist.slurm import client
from hpcdist.slurm.output import JobInfo, SlurmError, parse_time

#: All tests of this file may start processes.
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("utc")]

UNKNOWN_JOB = "slurm_load_jobs error: Invalid job id specified\n"
NO_CONTROLLER = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
NO_ACCOUNTING = "Slurm accounting storage is disabled\n"


# --- running commands


def test_failure_is_reported_with_the_last_line_of_errors(commands: FakeCommands) -> None:
    commands.add("scontrol", error=f"warning\nscontrol: {NO_CONTROLLER}", code=1)
    with pytest.raises(SlurmError, match=r"^scontrol: slurm_load_jobs error: Unable to contact slurm controller"):
        client.run("scontrol", "ping")
    commands.add("scontrol", code=3)
    with pytest.raises(SlurmError, match=r"^scontrol: exit code 3$"):
        client.run("scontrol", "ping")
    with pytest.raises(SlurmError, match=r"^squeue is not installed on this machine$") as caught:
        client.query_jobs(["8"])
    assert not caught.value.installed


def test_cancelled_task_of_a_waiting_array_is_unknown(commands: FakeCommands) -> None:
    commands.add("scontrol", "Job 26_1 not found\n", code=1)  # Slurm 22.05, while it knows other tasks
    commands.add("sacct", "")
    assert client.query_job("26_1") is None


def test_failing_query_is_repeated_for_a_limited_time(commands: FakeCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    commands.add_script(
        "squeue", "read -r number < tries; echo $((number + 1)) > tries; test $number -ge 2 && echo '7.0 a'"
    )
    (commands.folder / "tries").write_text("0\n")
    assert client.running_steps(retry_s=60) == {"7.0": "a"}
    assert len(commands.calls()) == 3
    commands.add("squeue", error=NO_CONTROLLER, code=1)
    with pytest.raises(SlurmError, match="Unable to contact"):
        client.running_steps(retry_s=0.1)


def test_settings_of_the_users_shell_change_no_output(commands: FakeCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"SLURM_TIME_FORMAT": "relative", "SQUEUE_FORMAT": "%A", "SACCT_FORMAT": "JobID", "SINFO_STATES": "idle"}
    for name, value in {**settings, "LC_ALL": "de_DE.UTF-8", "SLURM_CONF": "/etc/other.conf"}.items():
        monkeypatch.setenv(name, value)
    shown = "$SLURM_TIME_FORMAT $SQUEUE_FORMAT $SACCT_FORMAT $SINFO_STATES $LC_ALL $SLURM_CONF"
    commands.add_script("scontrol", f'echo "{shown}"')
    assert client.run("scontrol", "ping").split() == ["%s", "C", "/etc/other.conf"]


def test_machine_without_slurm_conf_is_told_in_one_sentence(commands: FakeCommands) -> None:
    lines = [
        "error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host",
        "error: fetch_config: DNS SRV lookup failed",
        "fatal: Could not establish a configuration source",
    ]
    for program in ("scontrol", "sbatch", "srun"):
        commands.add(program, error="".join(f"{program}: {line}\n" for line in lines), code=1)
    expected = "Slurm's commands find no slurm.conf on this machine, nor a controller by DNS: use a login node"
    with pytest.raises(SlurmError) as caught:
        client.query_job("7")
    assert str(caught.value) == expected
    assert client.srun_option_error("label", True) is None, "srun does not read it"
    with pytest.raises(UserMistake) as refused:
        client.estimate_start("#!/bin/sh\n")
    assert str(refused.value) == f"{expected}, or show the script with --dry-run"


# --- jobs


@pytest.mark.parametrize(
    ("controller", "job", "sacct", "state"),
    [(UNKNOWN_JOB, "7", "node-fail", "NODE_FAIL"), (NO_CONTROLLER, "8", "requeued", "RUNNING")],
)
def test_job_unknown_to_the_controller_is_read_from_accounting(
    commands: FakeCommands, controller: str, job: str, sacct: str, state: str
) -> None:
    commands.add("scontrol", error=controller, code=1)
    commands.add("sacct", recorded("sacct", sacct))
    info = client.query_job(job)
    assert info is not None
    assert (info.state, commands.programs()) == (state, ["scontrol", "sacct"])
    if controller == NO_CONTROLLER:
        commands.add("sacct", error=NO_ACCOUNTING, code=1)
        with pytest.raises(SlurmError, match=r"^scontrol: slurm_load_jobs error: Unable to contact slurm controller"):
            client.query_job(job)


def test_unknown_job_is_none(commands: FakeCommands) -> None:
    commands.add("scontrol", error=UNKNOWN_JOB, code=1)
    assert client.query_job("8") is None, "sacct is not installed"
    commands.add("sacct", error=NO_ACCOUNTING, code=1)
    assert client.query_job("8") is None
    for text in ("", recorded("sacct", "requeued")):  # the second one has no end of the job
        commands.add("sacct", text)
        assert client.query_job("8") is None


def test_history_is_read_from_accounting(commands: FakeCommands) -> None:
    commands.add("scontrol", recorded("scontrol", "requeued"))
    commands.add("sacct", recorded("sacct", "requeued"))
    info = client.query_job("8", history=True)
    assert info is not None
    assert (info.state, info.reason, info.step_states) == ("PENDING", "BeginTime", ("RUNNING",))
    commands.add("sacct", error=NO_ACCOUNTING, code=1)
    assert client.query_job("8", history=True) == replace(info, step_states=())


def test_many_jobs_take_one_command(commands: FakeCommands) -> None:
    commands.add("squeue", recorded("squeue"))
    found = client.query_jobs(["1", "10_2", "99"])
    assert {job: info.state for job, info in found.items()} == {"1": "RUNNING", "10_2": "PENDING"}
    assert commands.programs() == ["squeue"]
    assert client.query_jobs([]) == {}
    commands.add("squeue", error=UNKNOWN_JOB, code=1)
    assert client.query_jobs(["99"]) == {}


# --- cluster


def test_failed_nodes_are_down_or_have_booted(commands: FakeCommands) -> None:
    states = ("allocated", "down*", "drained", "idle*", "idle", "failing")
    lines = "".join(f"n{n}|{state}|(null)|(null)|8|32768|Unknown|root|none\n" for n, state in enumerate(states, 1))
    commands.add("sinfo", lines)
    booted = {"n1": "2026-11-20T06:35:00", "n3": "None", "n5": "2026-11-20T07:35:00"}
    commands.add("scontrol", "".join(f"NodeName={name} BootTime={at}\n" for name, at in booted.items()))
    since = parse_time("2026-11-20T07:00:00")
    assert since is not None
    assert client.failed_nodes([f"n{n}" for n in range(1, 7)], since) == ["n2", "n4", "n5", "n6"]
    assert commands.calls()[-1] == "scontrol show node --oneliner n1,n2,n3,n4,n5,n6"


# --- Snapshots of a run's job.


RUNNING = JobInfo(id="1", name="timeout", state="RUNNING")


@pytest.mark.parametrize(
    ("answer", "job", "expected"),
    [
        (RUNNING, client.JobRef(id="1", name="timeout"), client.JobSnapshot(info=RUNNING)),
        (RUNNING, client.JobRef(id="1"), client.JobSnapshot(info=RUNNING)),
        (RUNNING, client.JobRef(id="1", name="digits/first"), client.JobSnapshot()),  # an id that is used again
        (None, client.JobRef(id="1", cluster="here"), client.JobSnapshot()),
        (
            None,
            client.JobRef(id="1", cluster="there"),
            client.JobSnapshot(error="job 1 is on cluster there, this is here"),
        ),
        (SlurmError("no answer"), client.JobRef(id="8"), client.JobSnapshot(error="no answer")),
        (
            SlurmError("none", installed=False),
            client.JobRef(id="8"),
            client.JobSnapshot(error="none", installed=False),
        ),
    ],
)
def test_snapshot_of_a_job_is_over_only_by_slurms_answer(
    monkeypatch: pytest.MonkeyPatch,
    answer: JobInfo | SlurmError | None,
    job: client.JobRef,
    expected: client.JobSnapshot,
) -> None:
    def query_job(job_id: str, *, history: bool) -> JobInfo | None:
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    monkeypatch.setattr(client, "query_job", query_job)
    monkeypatch.setattr(client, "cluster_name", lambda: "here")
    snapshot = client.take_snapshot(job)
    assert (snapshot, snapshot.is_over) == (expected, expected == client.JobSnapshot())


# --- The current job as scontrol reports it, and its requeue.

LINE = (
    "JobId=41 JobName=digits/first UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 "
    "Partition=main ReqNodeList=(null) ExcNodeList=n[7-8] NodeList=n[1-2] "
    "StartTime=2026-11-20T06:35:00 EndTime=2026-11-20T07:05:00 Command=/shared/my run.sh --flag=a=b"
)
JOB = client.CurrentJob(
    id="41", restart_count=2, end_time=None, partition="main", nodes=("n1", "n2"), excluded=("n7", "n8")
)
ENV = {"SLURM_JOB_ID": "41"}


@pytest.fixture(autouse=True)
def restored_sigterm() -> Iterator[None]:
    """Restore SIGTERM's handler: `requeue` makes the process ignore the signal."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def of_job(commands: FakeCommands, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """A scontrol that prints LINE."""
    monkeypatch.setattr(client, "JOB_RETRY_S", 0.0)
    commands.add("scontrol", f"{LINE}\n")
    return commands


def test_job_from_the_environment(of_job: FakeCommands) -> None:
    end = parse_time("2026-11-20T07:05:00")
    assert client.CurrentJob.from_env(ENV) == replace(JOB, end_time=end)
    assert of_job.calls() == ["scontrol show job --oneliner 41"]
    of_job.add("scontrol", LINE.replace("Requeue=1", "Requeue=0 TimeLimit=01:00:00") + "\n")
    limited = replace(JOB, end_time=end, may_requeue=False, time_limit_min=60)
    assert client.CurrentJob.from_env(ENV) == limited


def test_without_a_job_or_an_answer(of_job: FakeCommands) -> None:
    with pytest.raises(HpcdistError, match=r"^SLURM_JOB_ID is not set: this command runs inside a Slurm job only$"):
        client.CurrentJob.from_env({})
    of_job.add("scontrol", error="slurm_load_jobs error: Invalid job id specified\n", code=1)
    with pytest.raises(HpcdistError, match=r"^Slurm does not know job 41, the one in SLURM_JOB_ID$"):
        client.CurrentJob.from_env(ENV)
    os.unlink(of_job.folder / "scontrol")
    with pytest.raises(HpcdistError, match=r"^scontrol is not installed on this machine$"):
        client.CurrentJob.from_env(ENV)


def test_array_task_has_the_arrays_id_and_its_index() -> None:
    """The last task of an array has the array's id in SLURM_JOB_ID."""
    task = {"SLURM_JOB_ID": "41", "SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "2"}
    assert (client.job_id_of(ENV), client.job_id_of(task)) == ("41", "41_2")
    with pytest.raises(HpcdistError, match="SLURM_JOB_ID is not set"):
        client.job_id_of({"SLURM_ARRAY_TASK_ID": "2"})


# --- steps


def test_steps_are_those_of_the_current_job(of_job: FakeCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    of_job.add("squeue", "41.0 ranks-001\n  41.1 preflight\n")
    of_job.add("scancel")
    assert client.running_steps() == {"41.0": "ranks-001", "41.1": "preflight"}
    assert client.signal_named_steps("preflight", "KILL")
    assert not client.signal_named_steps("ranks-002", "KILL")
    query = "squeue --steps --jobs=41 --noheader --format=%i %j"
    assert of_job.calls() == [query, query, "scancel --signal=KILL 41.1", query]


def test_controller_that_hangs_costs_the_limit_of_each_question(
    of_job: FakeCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("squeue", "scancel", "scontrol"):
        of_job.add_script(name, "exec sleep 1000")
    monkeypatch.setenv("PATH", f"{of_job.folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setattr(client, "JOB_TIMEOUT_S", 0.2)
    asked: list[str] = []

    def note(command: Sequence[str], *arguments: Any, **options: Any) -> CompletedProcess[str]:
        """Note the program here: on a busy machine it may be ended before it has begun."""
        asked.append(command[0])
        return run_within(command, *arguments, **options)

    monkeypatch.setattr(client, "run_within", note)
    assert not client.signal_named_steps("ranks-001", "KILL")
    client.signal_steps(["41.0"], "KILL")
    with pytest.raises(SlurmError, match=r"^scontrol did not answer within 0\.2 s$"):
        JOB.requeue()
    # The last question is whether the job has been requeued nevertheless.
    assert asked == ["squeue", "scancel", "scontrol", "scontrol"]


# --- requeue


def test_job_that_slurm_requeues_or_ends(of_job: FakeCommands) -> None:
    """A job that Slurm has requeued has a higher restart count."""
    states = {"RUNNING": False, "SUSPENDED": False, "COMPLETING": True, "PENDING": True, "CANCELLED": True}
    for state, ending in states.items():
        of_job.add("scontrol", LINE.replace("RUNNING", state) + "\n")
        assert (JOB.is_ending(), JOB.is_requeued()) == (ending, False), state
    over = replace(JOB, end_time=time.time() - 1)
    assert not over.is_ending(), "the job ends because of its time limit"
    of_job.add("scontrol", LINE.replace("Restarts=2", "Restarts=3") + "\n")
    assert JOB.is_requeued()
    of_job.add("scontrol", error="slurm_load_jobs error: Invalid job id specified\n", code=1)
    assert not JOB.is_ending()


def test_requeue_adds_nodes_to_those_that_are_excluded(of_job: FakeCommands, caplog: pytest.LogCaptureFixture) -> None:
    JOB.requeue()
    JOB.requeue(exclude=["n2"])
    requeue = "scontrol requeue 41"
    assert of_job.calls() == [requeue, requeue, "scontrol update JobId=41 ExcNodeList=n7,n8,n2"]
    os.kill(os.getpid(), signal.SIGTERM)  # with which Slurm ends the batch step; the process ignores it
    refusal = "Requested operation not supported on this system for job 41"
    of_job.add_script("scontrol", f"case $1 in update) echo '{refusal}' >&2; exit 1;; esac")
    JOB.requeue(exclude=["n2"])
    assert caplog.messages == [f"the job may get n2 again: scontrol: {refusal}"]


HARDWARE = "(null)|gpu:2|8|32768"


@pytest.mark.parametrize(
    ("others", "idle_only", "enough"),
    [
        ([], True, False),
        ([f"n3|idle|{HARDWARE}"], True, True),
        ([f"n3|mixed|{HARDWARE}"], True, False),
        ([f"n3|mixed|{HARDWARE}"], False, True),
        ([f"n7|idle|{HARDWARE}"], False, False),  # excluded already
        (["n3|idle|(null)|(null)|8|32768"], False, False),  # without the GPUs of the job's nodes
    ],
)
def test_node_is_replaceable_by_one_with_equal_hardware(
    of_job: FakeCommands, others: list[str], idle_only: bool, enough: bool
) -> None:
    nodes = [f"n1|allocated|{HARDWARE}", f"n2|allocated|{HARDWARE}", *others]
    of_job.add("sinfo", "".join(f"{line}|Unknown|Unknown|none\n" for line in nodes))
    assert JOB.replaceable(["n2"], idle_only=idle_only) == enough
