"""`hpcdist stop` and `hpcdist cancel`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Cli, Result, job, one_line

from hpcdist.host.files import read_json, write_json
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import hold, user_name
from hpcdist.slurm.client import JobSnapshot

#: These tests may start processes.
pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("stop", "first will save and stop; `hpcdist status first` shows its progress\n"),
        ("cancel", "first will end at once\n"),
    ],
)
def test_request_is_written_to_the_last_attempt(
    hpcdist: Cli, make: Callable[..., RunDir], command: str, output: str
) -> None:
    run = make("first", status="running", attempt=2)
    with hold(run):
        assert hpcdist(command, "first") == Result(0, output, "")
    request = read_json(run.attempt(2).request) or {}
    assert request["action"] == command
    assert (request["cause"], request["by"]) == ("user", f"`hpcdist {command}` by {user_name()}")
    assert not run.attempt(1).request.exists()


def test_stop_of_a_plain_script_does_not_promise_a_save(
    hpcdist: Cli, make: Callable[..., RunDir], tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    run = make("first", f"trainer.script=[{tmp_path}/train.py]", status="running", attempt=1)
    with hold(run):
        assert hpcdist("stop", "first").out == (
            "first: train.py gets SIGTERM, and SIGKILL unless it ends within launch.stop_grace_s;"
            " `hpcdist status first` shows what it has saved\n"
        )


@pytest.mark.parametrize("command", ["stop", "cancel"])
@pytest.mark.parametrize(
    ("status", "attempt", "held"), [("running", 1, False), ("finished", 1, False), ("created", 0, True)]
)
def test_stop_and_cancel_reject_a_run_that_is_not_running(
    hpcdist: Cli, make: Callable[..., RunDir], command: str, status: str, attempt: int, held: bool
) -> None:
    run = make("first", status=status, attempt=attempt)
    holding: AbstractContextManager[None] = hold(run) if held else nullcontext()
    with holding:
        message = one_line(hpcdist(command, "first"))
    assert message.startswith("run first is not running")
    assert repr(status) in message
    assert list(run.path.rglob("request.json")) == []


@pytest.mark.parametrize(("command", "status"), [("stop", "stopped"), ("cancel", "cancelled")])
@pytest.mark.parametrize("before", ["queued", "running"])
def test_stop_and_cancel_remove_a_queued_run_from_the_queue(
    hpcdist: Cli,
    make: Callable[..., RunDir],
    slurm: Callable[[JobSnapshot], None],
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    command: str,
    status: str,
) -> None:
    run = make("first", status=before, attempt=1)
    write_json(run.path / "slurm.json", {"job_id": "7"})
    slurm(job("PENDING", reason="Resources"))
    cancelled: list[tuple[str, bool]] = []

    def scancel(job_id: str, *, pending_only: bool) -> None:
        cancelled.append((job_id, pending_only))
        slurm(job("CANCELLED"))

    monkeypatch.setattr("hpcdist.slurm.client.cancel_job", scancel)
    output = "job 7 of first was taken out of the queue; `hpcdist resume first` submits it again\n"
    assert hpcdist(command, "first") == Result(0, output, "")
    assert cancelled == [("7", True)]
    state = run.read_state()
    assert state.status == status
    assert state.reason.startswith(f"taken out of the queue (`hpcdist {command}` by ")


def test_stop_sends_a_request_if_the_job_starts_meanwhile(
    hpcdist: Cli, make: Callable[..., RunDir], slurm: Callable[[JobSnapshot], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("first", status="queued")
    write_json(run.path / "slurm.json", {"job_id": "7"})
    slurm(job("PENDING"))
    monkeypatch.setattr("hpcdist.slurm.client.cancel_job", lambda job_id, pending_only: slurm(job("RUNNING")))
    holding = hold(run)

    def supervisor_starts(seconds: float) -> None:
        run.new_attempt()
        run.write_state(replace(run.read_state(), status="running", attempt=1))
        holding.__enter__()

    monkeypatch.setattr("hpcdist.run.commands.time.sleep", supervisor_starts)
    assert hpcdist("stop", "first").out.startswith("first will save and stop")
    holding.__exit__(None, None, None)
    assert (read_json(run.attempt(1).request) or {})["action"] == "stop"
    assert run.read_state().status == "running"


@pytest.mark.parametrize(
    ("snapshot", "message"),
    [
        (
            JobSnapshot(error="no squeue here"),
            "run first has no supervisor, and Slurm does not answer about job 7: no squeue here",
        ),
        (
            JobSnapshot(),
            "run first is not running: it is lost: Slurm no longer knows job 7, and its supervisor did",
        ),
    ],
    ids=["unavailable", "unknown job"],
)
def test_stop_reports_an_unknown_state_of_the_job(
    hpcdist: Cli, make: Callable[..., RunDir], slurm: Callable[[JobSnapshot], None], snapshot: JobSnapshot, message: str
) -> None:
    run = make("first", status="queued")
    write_json(run.path / "slurm.json", {"job_id": "7"})
    slurm(snapshot)
    assert one_line(hpcdist("stop", "first")).startswith(message)
    assert run.read_state().status == "queued"
