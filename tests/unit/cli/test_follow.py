"""`follow` and `logs -f` continue through restarts and requeues until the run ends."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Make, SetJob, job
from rich.console import Console

from hpcdist.checks.doctor import status_check
from hpcdist.cli import run_views as following
from hpcdist.cli.run_views import follow, stream_log
from hpcdist.host.files import write_json
from hpcdist.run import status
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import hold
from hpcdist.slurm import client
from hpcdist.slurm.client import JobSnapshot


@pytest.fixture
def make(make_bare: Make) -> Make:
    return make_bare


# --- logs


def test_log_is_that_of_the_rank_that_failed_first(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(status="failed", attempt=1)
    attempt = run.attempt(1)
    for rank in range(2):
        attempt.log(rank).write_text(f"rank {rank}\n")
    write_json(attempt.failure, {"rank": 1})
    assert "".join(stream_log(run, None, None, follow=False)) == "rank 1\n"
    assert capsys.readouterr().err == "hpcdist: the log of rank 1, which failed first\n"
    assert "".join(stream_log(run, 0, None, follow=False)) == "rank 0\n"


class Events:
    """Events of a run while a command follows it: one at each pause of the command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, events: list[Callable[[], object]]) -> None:
        self._events: Iterator[Callable[[], object]] = iter(events)
        monkeypatch.setattr(following, "Event", lambda: self)

    def wait(self, timeout_s: float) -> None:
        assert timeout_s == following.POLL_S
        next(self._events, lambda: pytest.fail("the command waits after the last event"))()


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def test_followed_log_continues_through_all_attempts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(status="running", attempt=1)
    log = run.attempt(1).log(0)

    def two_restarts() -> None:
        """An attempt that starts and ends between two polls."""
        append(log, "c")
        for number in (2, 3):
            run.new_attempt()
            run.attempt(number).log(0).write_text(f" attempt {number} ")
        run.write_state(replace(run.read_state(), attempt=3))

    def finish() -> None:
        append(run.attempt(3).log(0), "last")
        run.write_state(replace(run.read_state(), status="finished"))

    Events(monkeypatch, [lambda: log.write_text("a"), lambda: append(log, "b"), two_restarts, finish])
    with hold(run):
        assert "".join(stream_log(run, 0, None, follow=True)) == "abc attempt 2  attempt 3 last"


def test_followed_log_ends_with_a_lost_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(status="running", attempt=1)
    run.attempt(1).log(0).write_text("the whole log")
    Events(monkeypatch, [])
    assert "".join(stream_log(run, 0, None, follow=True)) == "the whole log"


# --- jobs of Slurm


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=60)


def lines_of(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> SetJob:
    """Set the job snapshot that Slurm returns; each poll returns a new one."""
    now: list[JobSnapshot] = []
    monkeypatch.setattr(client, "take_snapshot", lambda job, history=False: replace(now[-1]))
    monkeypatch.setattr(status, "QUERY_EVERY_S", 0.0)
    monkeypatch.setattr(status, "QUERY_UNAVAILABLE_S", 0.0)
    return now.append


def submitted(run: RunDir) -> RunDir:
    write_json(run.path / "slurm.json", {"job_id": "7"})
    return run


def test_follow_prints_each_straggler_event_once(make: Make, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(status="running", attempt=1)

    def report(text: str) -> None:
        line = {"role": "trainer", "name": "n3", "event": "slow", "text": text}
        append(run.attempt(1).stragglers, json.dumps(line) + "\n")

    def finish() -> None:
        run.write_state(replace(run.read_state(), status="finished"))

    Events(
        monkeypatch, [lambda: report("n3 is slow"), lambda: None, lambda: report("n3 is slower"), lambda: None, finish]
    )
    with hold(run):
        follow(console, run)
    assert [line for line in lines_of(console) if line.startswith("n3")] == ["n3 is slow", "n3 is slower"]


def test_follow_continues_through_a_requeue(
    make: Make, console: Console, slurm: SetJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(make(status="queued"))

    def state(**changes: Any) -> None:
        run.write_state(replace(run.read_state(), **changes))

    def beat(step: int) -> None:
        write_json(run.attempt(1).beat(0), {"time": 1.0, "step": step, "total_steps": 9, "metrics": {}})

    holding = hold(run, job_id="7")

    def starts() -> None:
        holding.__enter__()
        slurm(job("RUNNING", nodes="n[1-2]"))
        run.new_attempt()
        state(status="running", attempt=1)
        beat(4)

    def preempted() -> None:
        """The supervisor has written the state, which looks like the end, but still runs."""
        state(status="stopped", reason="everything saved (SIGTERM)")

    def supervisor_exits() -> None:
        """No supervisor holds the lease, and the job is in the queue."""
        holding.__exit__(None, None, None)
        state(status="queued")
        slurm(job("PENDING", reason="BeginTime"))

    def starts_again() -> None:
        """The supervisor has not written a state yet."""
        slurm(job("RUNNING", nodes="n3"))

    def runs_again() -> None:
        state(status="running", reason="")

    def ends() -> None:
        state(status="finished", reason="all done")

    slurm(job("PENDING", reason="Priority"))
    events = [lambda: slurm(job("PENDING", reason="Resources")), starts, preempted, supervisor_exits]
    Events(monkeypatch, [*events, starts_again, runs_again, ends])
    assert follow(console, run).status == "finished"
    assert lines_of(console) == [
        "queued: job 7 waits (Priority)",
        "queued: job 7 waits (Resources)",
        "running: job 7 on n[1-2]",
        "step 4/9",
        "stopped: everything saved (SIGTERM); job 7 is RUNNING on n[1-2]",
        "queued: requeued (everything saved (SIGTERM)); job 7 waits (BeginTime)",
        "starting: job 7 is RUNNING on n3",
        "running: job 7 on n3",
    ]


def test_follow_without_progress_prints_states_only(
    make: Make, console: Console, slurm: SetJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(make(status="running", attempt=1))
    write_json(run.attempt(1).beat(0), {"time": 1.0, "step": 4, "total_steps": 9, "metrics": {}})
    slurm(job("RUNNING"))
    Events(monkeypatch, [lambda: run.write_state(replace(run.read_state(), status="finished"))])
    with hold(run, job_id="7"):
        assert follow(console, run, progress=False).status == "finished"
    assert lines_of(console) == ["running: job 7"]


def test_follow_closes_a_run_whose_job_died_without_a_status(
    make: Make, console: Console, slurm: SetJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers of Slurm must agree, since a network file system may show changes of the folder later."""
    run = submitted(make(status="queued"))
    slurm(job("FAILED", exit_code=1, nodes="n1"))
    Events(monkeypatch, [lambda: None])
    state = follow(console, run)
    assert (state.status, state.reason) == ("failed", "job 7 ended as FAILED with exit code 1 on n1")
    assert run.read_state() == state


def test_follow_prints_a_note_if_slurm_is_unavailable(
    make: Make, console: Console, slurm: SetJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(make(status="running", attempt=1))
    slurm(JobSnapshot(error="Unable to contact slurm controller (connect failure)"))
    Events(monkeypatch, [lambda: None, lambda: run.write_state(replace(run.read_state(), status="finished"))])
    assert follow(console, run).status == "finished"
    assert lines_of(console) == [
        "running",
        "Slurm does not report the state of the job (Unable to contact slurm controller (connect failure))",
    ]


def test_follow_closes_a_local_run_without_a_lease(
    make: Make, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(status="running", attempt=1)
    Events(monkeypatch, [])
    state = follow(console, run)
    assert (state.status, state.reason) == ("failed", "its supervisor died")


def test_end_of_the_job_of_a_lost_run_is_shown_once(make: Make, slurm: SetJob) -> None:
    """The reason of such a run is the end of its job, also after another process has recorded it."""
    run = submitted(make(status="running", attempt=1))
    slurm(job("NODE_FAIL"))
    for name in ("lost", "failed"):
        found = status.status_of(run)
        sentence = f"{name}: {found.reason}"
        assert (following._status_line(found), status_check(run, found).text) == (sentence, sentence)
        status.close_if_lost(run)
