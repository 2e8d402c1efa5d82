"""How a run goes on after its allocation: decisions over a fake job, and what ranks find in their environment."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from hpcdist.errors import HpcdistError
from hpcdist.files.atomic import write_json
from hpcdist.run.folder import RunDir, State, Status
from hpcdist.slurm.current_job import CurrentJob
from hpcdist.slurm.job import batch_step
from hpcdist.supervisor.restart_policy import Failure


class FakeJob:
    """Slurm's side of the decision; remembers whether it was asked to queue the job again."""

    def __init__(self, restart_count: int = 0, *, again: bool = False, refuses: str = "") -> None:
        self.id = "41"
        self.restart_count = restart_count
        self.requeues: list[list[str]] = []
        self._again = again
        self._refuses = refuses

    def is_requeued(self) -> bool:
        return self._again

    def requeue(self, *, exclude: Sequence[str]) -> None:
        if self._refuses:
            raise HpcdistError(self._refuses)
        self.requeues.append(list(exclude))


@pytest.fixture
def run(runs_dir: Path) -> RunDir:
    run = RunDir.create(runs_dir / "exp" / "first")
    run.new_attempt()
    return run


def after(
    run: RunDir, job: FakeJob, status: Status, by: str | None = None, avoid: tuple[str, ...] = (), max_requeues: int = 2
) -> State:
    """The state that follows an attempt which ended as `status`, stopped `by` someone."""
    if by is not None:
        run.attempt(1).send_request("stop", by=by, reason=f"asked by {by}")
    state = State(status=status, attempt=1, reason="a reason", ended=7.0)
    before = run.read_state()
    after = batch_step._after(run, cast(CurrentJob, job), state, avoid, max_requeues)
    assert run.read_state() == before, "nobody is to see a run that goes on as ended"
    return after


@pytest.mark.parametrize("by", ["SIGTERM", "signal"])
@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_what_slurm_has_queued_again_waits(run: RunDir, by: str, status: Status) -> None:
    job = FakeJob(again=True)
    state = after(run, job, status, by)
    assert (state.status, state.reason, state.ended, job.requeues) == ("queued", "a reason", None, [])


def test_a_cancelled_job_stays_stopped(run: RunDir) -> None:
    job = FakeJob(again=False)
    state = after(run, job, "stopped", "SIGTERM", avoid=("n2",))
    assert (state.status, state.ended, job.requeues) == ("stopped", 7.0, [])


@pytest.mark.parametrize("by", [batch_step.TIME_LIMIT, None])
def test_a_time_limit_queues_the_job_again(run: RunDir, by: str | None) -> None:
    """Nobody has asked where Slurm's own signal was first."""
    job = FakeJob()
    assert after(run, job, "stopped", by).status == "queued"
    assert job.requeues == [[]]


def test_a_node_that_failed_is_avoided(run: RunDir) -> None:
    job = FakeJob(1)
    assert after(run, job, "stopped", avoid=("n2",)).status == "queued"
    assert job.requeues == [["n2"]]


def test_a_stop_that_someone_asked_for_is_obeyed_also_where_a_node_was_lost(run: RunDir) -> None:
    job = FakeJob()
    assert after(run, job, "stopped", "ada", avoid=("n2",)).status == "stopped"
    assert job.requeues == []


def test_the_trips_through_the_queue_are_counted(run: RunDir) -> None:
    job = FakeJob(2)
    state = after(run, job, "stopped", batch_step.TIME_LIMIT)
    assert (state.status, state.reason) == ("failed", "a reason; cluster.max_requeues=2 is reached")
    assert (state.ended, job.requeues) == (7.0, [])


def test_a_job_that_slurm_does_not_queue_again_is_left_to_its_owner(run: RunDir) -> None:
    job = FakeJob(refuses="scontrol requeue 41: Requested operation is presently disabled")
    state = after(run, job, "stopped", batch_step.TIME_LIMIT)
    why = "Slurm does not requeue the job (scontrol requeue 41: Requested operation is presently disabled)"
    assert (state.status, state.reason, state.ended) == ("stopped", f"a reason; {why}", 7.0)


def test_a_run_that_failed_fails_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may depend on it."""
    monkeypatch.setattr(batch_step, "supervise", lambda run_dir: State(status="failed", reason=f"{run_dir} is broken"))
    with pytest.raises(HpcdistError, match=r"^/runs/first is broken$"):
        batch_step.supervise_in_job("/runs/first")
    monkeypatch.setattr(batch_step, "supervise", lambda run_dir: State(status="stopped", reason="by ada"))
    assert batch_step.supervise_in_job("/runs/first") == "stopped: by ada"


@pytest.mark.parametrize(
    ("status", "by"), [("finished", None), ("failed", None), ("stopped", "ada"), ("cancelled", "ada")]
)
def test_what_is_over_stays_over(run: RunDir, status: Status, by: str | None) -> None:
    job = FakeJob(again=True)
    assert after(run, job, status, by).status == status
    assert job.requeues == []


@pytest.mark.parametrize(
    ("status", "by", "over"),
    [
        ("finished", None, True),
        ("finished", "SIGTERM", True),
        ("cancelled", "ada", True),
        ("stopped", "ada", True),
        ("stopped", "SIGTERM", False),
        ("stopped", batch_step.TIME_LIMIT, False),
        ("stopped", None, False),
        ("failed", None, False),
        ("queued", None, False),
        ("running", "ada", False),
    ],
)
def test_a_job_that_is_started_again_goes_on_unless_someone_stopped_it(
    run: RunDir, status: Status, by: str | None, over: bool
) -> None:
    if by is not None:
        run.attempt(1).send_request("stop", by=by, reason="…")
    job = cast(CurrentJob, FakeJob(1))
    assert batch_step._is_over(run, State(status=status, attempt=1), job) == over


@pytest.mark.parametrize(
    ("status", "over"), [("queued", False), ("running", False), ("stopped", True), ("failed", True), ("finished", True)]
)
def test_a_supervisor_that_was_killed_is_followed_by_one_that_goes_on(run: RunDir, status: Status, over: bool) -> None:
    """In the same life of the job nothing but the supervisor's own last word makes an end."""
    assert batch_step._is_over(run, State(status=status, attempt=1), cast(CurrentJob, FakeJob(0))) == over


def test_the_jobs_log_tells_of_attempts_and_failures(
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
        f"rank 3 on n2 failed with ValueError: x at step 5 (full log: {tmp_path})\nline\n",
    ]


def test_what_the_ranks_find_of_the_network_is_told_once(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
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
    assert "preflight: late" not in caplog.messages, "looked for as long as the run lasts"


def test_where_the_job_runs_is_noted_once_the_first_ranks_are_started(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    noted: list[RunDir] = []
    monkeypatch.setattr(batch_step, "record_job_start", lambda life, _env: noted.append(life))
    report = batch_step.JobLog(life=run)
    assert noted == []
    report.attempt(run.attempt(1), 4)
    report.attempt(run.attempt(2), 4)
    assert noted == [run]

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(batch_step, "record_job_start", full)
    batch_step.JobLog(life=run).attempt(run.attempt(1), 4)
    assert caplog.messages[-1] == "the nodes and the queue time of this job are not recorded: No space left on device"
