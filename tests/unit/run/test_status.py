"""Status of runs, for combinations of state file, lease and Slurm's view of the job."""

import errno
import os
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcdist.config.loading import load_config
from hpcdist.errors import UserMistake
from hpcdist.host.json_files import read_json, write_json
from hpcdist.run import snapshot, status
from hpcdist.run.create import create_run
from hpcdist.run.folder import CHECKS_PER_S, WRITES_PER_S, RunDir, beat_interval_s, num_due_ranks, system_interval_s
from hpcdist.run.job_record import all_job_starts, job_starts
from hpcdist.run.lease import hold
from hpcdist.run.status import (
    QUERY_EVERY_S,
    QUERY_UNAVAILABLE_S,
    StatusWatch,
    close_if_lost,
    end,
    query_jobs,
    record_job_start,
    status_from,
    update_job_starts,
)
from hpcdist.slurm import client
from hpcdist.slurm.client import JobRef, JobSnapshot
from hpcdist.slurm.output import AccountedStart, JobInfo, SlurmError

PENDING = JobSnapshot(info=JobInfo(id="7", state="PENDING", reason="Priority"))
RUNNING = JobSnapshot(info=JobInfo(id="7", state="RUNNING", nodes="n1"))
ENDED = JobSnapshot(info=JobInfo(id="7", state="NODE_FAIL", nodes="n2", ended=1700.0))
UNKNOWN = JobSnapshot()
NO_ANSWER = JobSnapshot(error="no answer")
NO_SLURM = JobSnapshot(error="no scontrol here", installed=False)


def set_state(run: RunDir, **state: Any) -> None:
    run.write_state(replace(run.read_state(), **state))


@pytest.mark.parametrize(
    ("status", "snapshot", "held", "name", "final"),
    [
        # local runs: the lease decides
        ("running", None, True, "running", False),
        ("running", None, False, "lost", True),
        ("created", None, False, "created", False),
        ("stopped", None, False, "stopped", True),
        ("stopped", None, True, "stopped", False),
        # queued jobs
        ("queued", PENDING, False, "queued", False),
        ("queued", ENDED, False, "lost", True),
        ("queued", UNKNOWN, False, "lost", True),
        ("queued", NO_ANSWER, False, "queued", False),
        # running jobs
        ("running", RUNNING, True, "running", False),
        # dead supervisor, or a requeued job without a new supervisor yet
        ("running", RUNNING, False, "running", False),
        ("running", PENDING, False, "queued", False),
        ("running", ENDED, False, "lost", True),
        ("running", UNKNOWN, False, "lost", True),
        ("running", NO_ANSWER, False, "running", False),
        ("running", NO_SLURM, False, "lost", True),
        # ended, unless a supervisor or a job may continue the run
        ("stopped", RUNNING, False, "stopped", False),
        ("stopped", ENDED, False, "stopped", True),
        ("failed", RUNNING, True, "failed", False),
        ("finished", RUNNING, True, "finished", True),
    ],
    ids=str,
)
def test_status_from_state_lease_and_job(
    run: RunDir, status: str, snapshot: JobSnapshot | None, held: bool, name: str, final: bool
) -> None:
    set_state(run, status=status, reason="a reason")
    with hold(run) if held else nullcontext():
        found = status_from(run, snapshot)
    assert (found.name, found.final) == (name, final)
    if name == "lost" and snapshot is not None and snapshot.is_over:
        assert found.reason != "a reason"
    else:
        assert found.sentence == ("queued: requeued (a reason)" if name == "queued" else f"{name}: a reason")


# --- several runs


@pytest.fixture
def jobs(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[RunDir], list[Any], dict[str, JobSnapshot]]:
    """Three submitted runs, the queries that reach Slurm, and Slurm's answers by job."""
    runs = [RunDir.create(runs_dir / "exp" / f"run-{number}") for number in range(3)]
    for number, run in enumerate(runs):
        write_json(run.path / "slurm.json", {"job_id": f"7_{number}"})
        set_state(run, status="queued")
    queries: list[Any] = []
    answers: dict[str, JobSnapshot] = {}

    def query_all(ids: list[str]) -> dict[str, JobInfo]:
        queries.append(ids)
        if error := answers.get("error"):
            raise SlurmError(error.error, installed=True)
        return {job: answer.info for job, answer in answers.items() if answer.info is not None}

    def take_snapshot(job: JobRef, *, history: bool = False) -> JobSnapshot:
        queries.append(job.id)
        return answers.get(job.id, JobSnapshot())

    monkeypatch.setattr(client, "query_jobs", query_all)
    monkeypatch.setattr(client, "take_snapshot", take_snapshot)
    return runs, queries, answers


def test_several_jobs_take_one_query(jobs: Any, runs_dir: Path) -> None:
    runs, queries, answers = jobs
    local = RunDir.create(runs_dir / "exp" / "local")
    set_state(runs[1], status="failed")
    answers["7_0"] = PENDING
    found = query_jobs([*runs, local])
    assert found == {runs[0].path: PENDING, runs[1].path: UNKNOWN, runs[2].path: UNKNOWN}
    assert queries == [["7_0", "7_1", "7_2"], "7_2"], (
        "second query: the run has not ended, and squeue does not know its job"
    )
    assert query_jobs(runs, skip_ended=True).keys() == {runs[0].path, runs[2].path}
    answers["error"] = NO_ANSWER
    assert {snapshot.error for snapshot in query_jobs(runs).values()} == {"no answer"}
    assert query_jobs([local]) == {}


def test_run_is_lost_only_after_two_snapshots(jobs: Any) -> None:
    runs, queries, answers = jobs
    now = 0.0
    watch = StatusWatch(clock=lambda: now)

    def poll() -> list[tuple[str, bool]]:
        return [(status.name, status.final) for status in watch.poll(runs)]

    answers |= {"7_0": PENDING, "7_1": PENDING, "7_2": PENDING}
    assert poll() == [("queued", False)] * 3
    del answers["7_1"]
    now += QUERY_EVERY_S
    assert [poll(), poll()] == [[("queued", False)] * 3] * 2, "the second poll reads the same snapshot"
    set_state(runs[2], status="finished")
    now += QUERY_EVERY_S
    assert poll() == [("queued", False), ("lost", True), ("finished", True)]
    num_queries = len(queries)
    write_json(runs[1].path / "slurm.json", {"job_id": "8"})
    answers["8"] = JobSnapshot(info=JobInfo(id="8", state="PENDING"))
    assert poll()[1] == ("queued", False), "submitted again"
    assert len(queries) > num_queries
    answers["error"] = NO_ANSWER
    now += QUERY_EVERY_S
    assert [status.slurm_error for status in watch.poll(runs)] == ["no answer"] * 3
    num_queries, now = len(queries), now + QUERY_UNAVAILABLE_S - 1
    watch.poll(runs)
    assert len(queries) == num_queries, "less often while it does not answer"
    now += 1
    watch.poll(runs)
    assert len(queries) == num_queries + 1


# --- recording the end of lost runs


@pytest.fixture
def slurm(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Callable[[JobSnapshot], None]:
    """Return a function that sets Slurm's answer about job 7, which is the run's job."""
    write_json(run.path / "slurm.json", {"job_id": "7"})
    answers: list[JobSnapshot] = []
    monkeypatch.setattr(client, "take_snapshot", lambda job, history=False: answers[-1])
    return answers.append


@pytest.mark.parametrize(
    ("snapshot", "status", "reason"),
    [
        (ENDED, "failed", "job 7 ended as NODE_FAIL on n2"),
        (JobSnapshot(info=JobInfo(id="7", state="CANCELLED")), "cancelled", "job 7 was cancelled in the queue"),
        (JobSnapshot(info=JobInfo(id="7", state="PREEMPTED", nodes="n1")), "stopped", "job 7 ended as PREEMPTED on n1"),
        (JobSnapshot(info=JobInfo(id="7", state="COMPLETED", nodes="n1")), "failed",
         "job 7 ended as COMPLETED on n1, its supervisor exited without recording a status"),
        (UNKNOWN, "failed", "Slurm no longer knows job 7, and its supervisor did not record a status"),
    ],
)  # fmt: skip
def test_lost_run_is_closed_with_the_end_of_its_job(
    run: RunDir, slurm: Callable[[JobSnapshot], None], snapshot: JobSnapshot, status: str, reason: str
) -> None:
    set_state(run, status="queued", attempt=1)
    for alive in (PENDING, NO_ANSWER):
        slurm(alive)
        assert close_if_lost(run) == ""
    slurm(snapshot)
    assert close_if_lost(run) == reason
    state = run.read_state()
    assert (state.status, state.reason, state.attempt) == (status, reason, 1)
    assert state.ended is not None
    assert (state.ended == 1700.0) == (snapshot is ENDED)


def test_job_that_left_the_queue_early_had_no_supervisor(run: RunDir) -> None:
    write_json(run.slurm, {"job_id": "7"})
    set_state(run, status="queued")
    found = status_from(run, UNKNOWN)
    reason = "Slurm no longer knows job 7: it was cancelled in the queue, or failed before an attempt"
    assert (found.name, found.reason) == ("lost", reason)
    assert close_if_lost(run) == ""


def test_lease_of_an_ended_job_on_another_host_is_void(run: RunDir, slurm: Callable[[JobSnapshot], None]) -> None:
    set_state(run, status="running", attempt=1)
    other = {"host": "n9", "pid": 1, "started": 0.0, "user": "ada", "acquired": 0.0, "renewed": time.time()}
    write_json(run.lease, other | {"job_id": "7"})
    slurm(UNKNOWN)
    assert close_if_lost(run) == "", "a renewed lease takes precedence over a job that Slurm does not know"
    slurm(ENDED)
    assert close_if_lost(run) == "job 7 ended as NODE_FAIL on n2"
    assert not run.lease.exists()


def test_request_waits_for_the_first_attempt_of_a_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "POLL_S", 0.0)
    polls = []

    def begin(_: float) -> None:
        polls.append(1)
        if len(polls) == 3:
            set_state(run, status="running", attempt=run.new_attempt().number)

    monkeypatch.setattr("time.sleep", begin)
    with hold(run):
        assert end(run, "stop").startswith(f"{run.name} will save and stop")
    assert run.attempt(1).request.exists()


def test_request_to_a_run_that_does_not_begin_is_refused(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_START_TIMEOUT_S", 0.0)
    with hold(run), pytest.raises(UserMistake, match="is being prepared and has no attempt yet: repeat the command"):
        end(run, "stop")


def test_local_run_is_closed_if_its_holder_is_dead(run: RunDir) -> None:
    assert close_if_lost(run) == "", "the run waits for its start"
    dead = {"host": socket.gethostname(), "pid": 2**22 + 1, "started": 0.0, "renewed": 500.0, "acquired": 0}
    write_json(run.lease, dead)
    assert close_if_lost(run) == "its supervisor died"
    assert (run.read_state().status, run.read_state().ended) == ("failed", 500.0)


# --- starts of a job


def test_each_start_of_a_job_is_recorded(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    queries: list[str] = []
    facts: JobInfo | None = JobInfo(id="41", state="RUNNING", submitted=100.0, started=130.0, nodes="n[1-2]")

    def take_snapshot(job: JobRef) -> JobSnapshot:
        queries.append(job.id)
        return JobSnapshot(info=facts)

    def no_accounting(job_id: str) -> list[AccountedStart]:
        raise SlurmError("sacct: accounting is disabled")

    monkeypatch.setattr(client, "take_snapshot", take_snapshot)
    monkeypatch.setattr(client, "accounted_starts", no_accounting)
    write_json(run.path / "slurm.json", {"job_id": "40_1"})
    env = {"SLURM_JOB_ID": "41", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "1"}
    record_job_start(run, env)
    assert facts is not None
    facts = replace(facts, restarts=1, submitted=200.0, started=207.0, nodes="n3")
    record_job_start(run, env)
    assert queries == ["40_1", "40_1"]
    first = {"nodes": "n[1-2]", "queue_s": 30.0, "began": 130.0}
    second = {"nodes": "n3", "queue_s": 7.0, "began": 207.0}
    assert job_starts(run) == [first, second]
    write_json(run.path / "slurm.json", {"job_id": "42"})
    assert job_starts(run) == [], "the records belong to another job"
    record_job_start(run, {"SLURM_JOB_ID": "42"})
    facts = None
    record_job_start(run, {"SLURM_JOB_ID": "42"})
    assert job_starts(run) == [second], "without an answer of Slurm, nothing is recorded"
    assert [start.began for start in all_job_starts(run)] == [130.0, 207.0, 207.0], "also of the earlier job"


def accounted(began: float, state: str, nodes: str) -> AccountedStart:
    return AccountedStart(
        name="digits/first", began=began, ended=began + 0.5, queue_s=0.0, nodes=nodes, cores=4, gpus=0,
        energy_j=None, state=state,
    )  # fmt: skip


def test_nodes_that_ended_a_start_are_recorded_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    queries: list[tuple[list[str], float]] = []

    def start(number: int, state: str, nodes: str = "n[1-2]") -> AccountedStart:
        return accounted(now - 300.0 + number, state, nodes)

    def failed_nodes(names: list[str], since: float) -> list[str]:
        queries.append((names, since))
        return names[1:]

    starts = [start(0, "PREEMPTED"), start(20, "NODE_FAIL"), start(40, "COMPLETED", "n[3-4]")]
    monkeypatch.setattr(client, "accounted_starts", lambda job_id: starts)
    monkeypatch.setattr(client, "failed_nodes", failed_nodes)
    write_json(run.path / "slurm.json", {"job_id": "41", "job_name": "digits/first"})
    update_job_starts(run)
    assert queries == [(["n1", "n2"], starts[1].began)]
    assert [one.failed_nodes for one in all_job_starts(run)] == ["", "n2", ""]
    record = read_json(run.path / "job.json") or {}
    record["starts"]["2"].pop("ended")
    write_json(run.path / "job.json", record)
    update_job_starts(run)
    assert len(queries) == 1, "the nodes of the second start are known"


# --- Polling intervals: bounded load and timely heartbeats for any number of ranks.


@pytest.mark.parametrize("num_ranks", [1, 2, 64, 65, 1000, 28_000])
def test_heartbeats_and_checks_of_many_ranks_are_bounded(num_ranks: int) -> None:
    default_s = 1800.0
    rates = [1 / beat_interval_s(rank, num_ranks, default_s) for rank in range(num_ranks)]
    assert sum(rates) <= WRITES_PER_S + 1
    assert rates[0] == 1, "heartbeats of rank 0 show the progress"
    assert num_ranks > 64 or set(rates) == {1}
    assert num_due_ranks(num_ranks, 0.2, default_s) <= max(1, 0.2 * CHECKS_PER_S + 1)
    assert num_due_ranks(num_ranks, 0.0, default_s) == 1, "also directly after the last check"
    assert num_due_ranks(num_ranks, 1e6, default_s) == num_ranks
    for hang_timeout_s in (0.5, 60.0, default_s):  # a heartbeat is read within half of it
        written, poll_s = beat_interval_s(num_ranks - 1, num_ranks, hang_timeout_s), min(0.2, hang_timeout_s / 8)
        num_polls = -(-num_ranks // num_due_ranks(num_ranks, poll_s, hang_timeout_s))
        assert written + num_polls * poll_s <= 0.51 * hang_timeout_s + 2 * poll_s
    assert (system_interval_s(10.0, 512), system_interval_s(0.0, 10_000)) == (10.0, 0.0), "0: turned off"
    assert num_ranks / system_interval_s(10.0, num_ranks) <= WRITES_PER_S


# --- Creation of a run folder that fails halfway.


def test_failed_creation_removes_the_folder(runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = load_config("ddp_digits", [f"runs_dir={runs_dir}", "name=first"])
    monkeypatch.setattr(snapshot, "take", fail)
    with pytest.raises(OSError, match="No space left"):
        create_run(config, tmp_path)
    assert not config.folder.exists()
