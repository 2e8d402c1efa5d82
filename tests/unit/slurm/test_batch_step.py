"""The state of a run after its attempts in a job, with a fake job, and the job's log."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from absent_torch import hide_torch

from hpcdist.config.launch_schema import ClusterConfig
from hpcdist.config.loading import load_config
from hpcdist.errors import ConfigError, HpcdistError
from hpcdist.host.files import write_json
from hpcdist.run.create import create_run
from hpcdist.run.folder import Cause, Request, RunDir, State, Status
from hpcdist.run.lease import Held
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.current_job import CurrentJob
from hpcdist.slurm.job import batch_step, submitit_entry
from hpcdist.slurm.job.batch_step import SupervisedJob
from hpcdist.slurm.job.launcher import SlurmLauncher
from hpcdist.supervisor.launcher import NodeChanges
from hpcdist.supervisor.restart_policy import Failure
from hpcdist.supervisor.watch import Allocation


class FakeJob:
    """A job that records its requeues."""

    def __init__(
        self, restart_count: int = 0, *, requeued: bool = False, error: str = "", ending: bool | None = False
    ) -> None:
        self.id = "41"
        self.end_time: float | None = None
        self.restart_count = restart_count
        self.requeues: list[list[str]] = []
        self._requeued = requeued
        self._error = error
        self._ending = ending

    def is_requeued(self) -> bool:
        return self._requeued

    def is_ending(self) -> bool:
        if self._ending is None:
            raise SlurmError("scontrol did not answer within 60 s")
        return self._ending

    def requeue(self, *, exclude: Sequence[str]) -> None:
        if self._error:
            raise HpcdistError(self._error)
        self.requeues.append(list(exclude))


@pytest.fixture
def run(runs_dir: Path) -> RunDir:
    run = RunDir.create(runs_dir / "exp" / "first")
    run.new_attempt()
    return run


def supervised(run: RunDir, job: FakeJob, launcher: Any = None, **cluster: Any) -> SupervisedJob:
    return SupervisedJob(run, ClusterConfig(**cluster), cast(CurrentJob, job), launcher)


def after(
    run: RunDir,
    job: FakeJob,
    status: Status,
    cause: Cause | None = None,
    avoid: tuple[str, ...] = (),
    max_requeues: int = 2,
) -> State:
    """Return the state after an attempt that ended with `status` on a request."""
    if cause is not None:
        run.attempt(1).send_request(Request(cause=cause))
    state = State(status=status, attempt=1, reason="a reason", ended=7.0)
    before = run.read_state()
    launcher = cast(SlurmLauncher, SimpleNamespace(avoid=list(avoid), nodes=NodeChanges()))
    after = supervised(run, job, launcher, max_requeues=max_requeues).requeue(state)
    assert run.read_state() == before, "a run that continues is never recorded as ended"
    return after


@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_run_of_a_requeued_job_is_queued(run: RunDir, status: Status) -> None:
    job = FakeJob(requeued=True)
    state = after(run, job, status, "preemption")
    assert (state.status, state.reason, state.ended, job.requeues) == ("queued", "a reason", None, [])


def test_run_of_a_cancelled_job_is_stopped(run: RunDir) -> None:
    job = FakeJob(requeued=False)
    state = after(run, job, "stopped", "preemption", avoid=("n2",))
    assert (state.status, state.ended, job.requeues) == ("stopped", 7.0, [])


def test_allocation_ends_the_ranks_before_the_job(run: RunDir) -> None:
    job = FakeJob()
    launcher = SimpleNamespace(nodes=NodeChanges())
    assert supervised(run, job, launcher).allocation is None
    job.end_time = 1000.0
    found = supervised(run, job, launcher, signal_lead_s=90)
    assert (found.allocation, found.nodes) == (Allocation(910.0, 1000.0), launcher.nodes)


def test_job_of_an_unknown_state_is_not_ending(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    assert [supervised(run, FakeJob(ending=ending)).is_ending() for ending in (False, None, True)] == [
        False,
        False,
        True,
    ]
    assert caplog.messages == ["the state of the job is unknown: scontrol did not answer within 60 s"]


@pytest.mark.parametrize("cause", ["time_limit", "growth", None])
def test_time_limit_requeues_the_job(run: RunDir, cause: Cause | None) -> None:
    """There is no request if Slurm's own signal came first."""
    job = FakeJob()
    assert after(run, job, "stopped", cause).status == "queued"
    assert job.requeues == [[]]


def test_requeue_excludes_failed_nodes(run: RunDir) -> None:
    job = FakeJob(1)
    assert after(run, job, "stopped", avoid=("n2",)).status == "queued"
    assert job.requeues == [["n2"]]


def test_stop_requested_by_a_user_is_obeyed_after_a_node_failure(run: RunDir) -> None:
    job = FakeJob()
    assert after(run, job, "stopped", "user", avoid=("n2",)).status == "stopped"
    assert job.requeues == []


def test_run_fails_after_max_requeues(run: RunDir) -> None:
    job = FakeJob(2)
    state = after(run, job, "stopped", "time_limit")
    assert (state.status, state.reason) == ("failed", "a reason; cluster.max_requeues=2 is reached")
    assert (state.ended, job.requeues) == (7.0, [])


def test_run_is_stopped_if_slurm_rejects_the_requeue(run: RunDir) -> None:
    job = FakeJob(error="scontrol requeue 41: Requested operation is presently disabled")
    state = after(run, job, "stopped", "time_limit")
    why = "Slurm does not requeue the job (scontrol requeue 41: Requested operation is presently disabled)"
    assert (state.status, state.reason, state.ended) == ("stopped", f"a reason; {why}", 7.0)


def test_job_of_a_failed_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_step, "supervise", lambda run_dir: State(status="failed", reason=f"{run_dir} is broken"))
    with pytest.raises(HpcdistError, match=r"^/runs/first is broken$"):
        submitit_entry.supervise_in_job("/runs/first")
    monkeypatch.setattr(batch_step, "supervise", lambda run_dir: State(status="stopped", reason="by ada"))
    assert submitit_entry.supervise_in_job("/runs/first") == "stopped: by ada"


def test_batch_step_of_a_requeued_job_does_not_end_within_the_second_of_the_requeue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(submitit_entry, "time", SimpleNamespace(sleep=slept.append))
    for status in ("stopped", "queued"):
        state = State(status=cast(Status, status), reason="time limit")
        monkeypatch.setattr(batch_step, "supervise", lambda _, state=state: state)
        assert submitit_entry.supervise_in_job("/runs/first") == f"{status}: time limit"
    assert slept == [submitit_entry.CREDENTIAL_S]


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        ("finished", None),
        ("failed", None),
        ("stopped", "user"),
        ("stopped", "config"),
        ("stopped", "signal"),
        ("cancelled", "user"),
    ],
)
def test_ended_run_is_not_requeued(run: RunDir, status: Status, cause: Cause | None) -> None:
    job = FakeJob(requeued=True)
    assert after(run, job, status, cause).status == status
    assert job.requeues == []


@pytest.mark.parametrize(
    ("status", "cause", "over"),
    [
        ("finished", None, True),
        ("finished", "preemption", True),
        ("cancelled", "user", True),
        ("stopped", "user", True),
        ("stopped", "config", True),
        ("stopped", "signal", True),
        ("stopped", "preemption", False),
        ("stopped", "time_limit", False),
        ("stopped", "growth", False),
        ("stopped", None, False),
        ("failed", None, False),
        ("queued", None, False),
        ("running", "user", False),
    ],
)
def test_restarted_job_continues_its_run_unless_a_user_stopped_it(
    run: RunDir, status: Status, cause: Cause | None, over: bool
) -> None:
    if cause is not None:
        run.attempt(1).send_request(Request(cause=cause))
    job = cast(CurrentJob, FakeJob(1))
    assert batch_step._is_over(run, State(status=status, attempt=1), job) == over


@pytest.mark.parametrize(
    ("status", "over"), [("queued", False), ("running", False), ("stopped", True), ("failed", True), ("finished", True)]
)
def test_restarted_supervisor_continues_unless_the_run_has_an_end_status(
    run: RunDir, status: Status, over: bool
) -> None:
    """The job itself was not restarted."""
    assert batch_step._is_over(run, State(status=status, attempt=1), cast(CurrentJob, FakeJob(0))) == over


def test_job_log_contains_attempts_notes_and_failures(
    run: RunDir, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    report, beat = batch_step.JobLog(), cast(Mapping[str, Any], {"step": 1})
    with caplog.at_level(logging.INFO, "hpcdist"):
        report.attempt(run.attempt(1), 4)
        report.progress(beat)
        report.output("not for this log")
        report.note("a note")
        failure = Failure(kind="error", rank=3, host="n2", step=5, error="ValueError: x", traceback=("line\n",))
        report.failure(failure, tmp_path)
    assert caplog.messages == [
        f"attempt 1: starting 4 ranks, logs in {run.attempt(1).path}",
        "a note",
        f"rank 3 on n2 failed with ValueError: x after step 5 (full log: {tmp_path})\nline\n",
    ]


def test_network_report_of_the_ranks_is_logged_once(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    report, attempt = batch_step.JobLog(), run.attempt(1)
    attempt.path.mkdir(exist_ok=True)
    with caplog.at_level(logging.INFO, "hpcdist"):
        report.attempt(attempt, 4)
        report.progress({})
        write_json(attempt.network, {"text": "0.2 ms, 9 GB/s", "warnings": ["NCCL goes over TCP"]})
        report.progress({})
        report.progress({"step": 1})
    assert caplog.messages[1:] == ["preflight: 0.2 ms, 9 GB/s", "preflight: NCCL goes over TCP"]
    attempt.network.unlink()
    report.attempt(attempt, 4)
    report.progress({"step": 1})
    write_json(attempt.network, {"text": "late", "warnings": []})
    report.progress({"step": 2})
    assert "preflight: late" not in caplog.messages, "only a report from before the second step is logged"


def test_start_of_the_job_is_recorded_with_the_first_attempt(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded: list[RunDir] = []
    monkeypatch.setattr(batch_step, "record_job_start", lambda run, _env: recorded.append(run))
    report = batch_step.JobLog(run)
    assert recorded == []
    report.attempt(run.attempt(1), 4)
    report.attempt(run.attempt(2), 4)
    assert recorded == [run]

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(batch_step, "record_job_start", fail)
    batch_step.JobLog(run).attempt(run.attempt(1), 4)
    assert caplog.messages[-1] == "the nodes and the queue time of this job are not recorded: No space left on device"


@pytest.mark.processes
def test_supervisor_starts_no_ranks_without_torch(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_torch(monkeypatch)
    config = load_config("ddp_digits", [f"runs_dir={runs_dir}", "name=first"])
    run = create_run(config, tmp_path, launcher="slurm")
    with pytest.raises(ConfigError, match=r"^trainer\.target=ddp needs torch, .* or set container\.image or cluster"):
        batch_step._supervise(run, cast(CurrentJob, FakeJob()), cast(Held, None))
