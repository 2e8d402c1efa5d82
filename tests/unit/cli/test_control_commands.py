"""`hpcdist save` and `hpcdist profile`; the ranks are replaced."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from command_line import Cli, Result, one_line

from hpcdist.cli import runs
from hpcdist.host.files import write_json
from hpcdist.run.commands import CommandResult, read_command, write_result
from hpcdist.run.folder import Request, RunDir
from hpcdist.run.lease import hold

#: These tests may start processes.
pytestmark = pytest.mark.processes


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what happens while a command waits for the ranks."""

    def act(action: Callable[[], None]) -> None:
        class Clock:
            time = staticmethod(time.time)

            @staticmethod
            def sleep(seconds: float) -> None:
                action()

        monkeypatch.setattr(runs, "time", Clock)

    return act


def running(make: Callable[..., RunDir], *overrides: str) -> RunDir:
    return make("first", *overrides, status="running", attempt=1, world_size=4)


def test_save_waits_for_the_checkpoint(hpcdist: Cli, make: Callable[..., RunDir], ranks: Callable[..., None]) -> None:
    run = running(make)
    ranks(lambda: write_result(run.attempt(1), 1, 0, CommandResult(step=7, path="checkpoints/step-00000007")))
    with hold(run):
        assert hpcdist("save", "first") == Result(
            0, f"rank 0: saved step 7: {run.path}/checkpoints/step-00000007\n", ""
        )
    command = read_command(run.attempt(1), 1)
    assert command is not None
    assert command.action == "save"


def test_profile_reports_each_rank(hpcdist: Cli, make: Callable[..., RunDir], ranks: Callable[..., None]) -> None:
    run = running(make)

    def finish() -> None:
        write_result(run.attempt(1), 1, 0, CommandResult(step=7, num_steps=4, path="artifacts/t"))
        write_result(run.attempt(1), 1, 3, CommandResult(error="disk full"))

    ranks(finish)
    with hold(run):
        code, out, err = hpcdist("profile", "first", "--steps", "4", "--ranks", "3,0,3")
    assert (code, err) == (1, "")
    assert out == f"rank 0: profiled 4 steps from step 7 on: {run.path}/artifacts/t\nrank 3: disk full\n"
    command = read_command(run.attempt(1), 1)
    assert command is not None
    assert (command.num_steps, command.ranks) == (4, [0, 3])


def test_end_of_the_attempt_ends_the_wait(
    hpcdist: Cli, make: Callable[..., RunDir], ranks: Callable[..., None]
) -> None:
    run = running(make)
    ranks(lambda: run.write_state(replace(run.read_state(), attempt=2)))
    with hold(run):
        assert hpcdist("profile", "first") == Result(1, "rank 0: attempt 1 ended before it was done\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("profile", "first", "--ranks", "1,4"), "run first has no rank 4: its ranks are 0 to 3"),
        (("profile", "first", "--ranks", "-1"), "--ranks '-1': expected ranks, separated by commas, such as 0,3"),
        (("profile", "first", "--steps", "1001"), "a profile has 1 to 1000 steps, got 1001"),
        (
            ("profile", "first", "--ranks", "2"),
            "rank 2 of run first (trainer:2) has no steps to profile: choose another rank",
        ),
    ],
)
def test_impossible_profiles_are_refused(
    hpcdist: Cli, make: Callable[..., RunDir], arguments: tuple[str, ...], message: str
) -> None:
    run = running(make)
    account = {"cause": "idle", "seconds": {"start": 1.0, "idle": 2.0}}
    beat = {"time": 1.0, "step": 0, "total_steps": None, "metrics": {}, "account": account}
    write_json(run.attempt(1).beat(2), beat)
    with hold(run):
        assert one_line(hpcdist(*arguments)) == message
    assert not run.attempt(1).command(1).exists()


@pytest.mark.parametrize("command", ["save", "profile"])
def test_runs_that_cannot_obey(hpcdist: Cli, make: Callable[..., RunDir], command: str) -> None:
    run = running(make)
    assert one_line(hpcdist(command, "first")) == "run first is not running: its state is 'running'"
    with hold(run):
        run.attempt(1).send_request(Request(cause="user", by="`hpcdist stop` by me"))
        assert one_line(hpcdist(command, "first")) == "run first is ending (`hpcdist stop` by me)"
    assert not run.attempt(1).command(1).exists()


def test_scripts_without_steps(hpcdist: Cli, make: Callable[..., RunDir]) -> None:
    run = running(make, "trainer.script=[train.py]")
    with hold(run):
        for command in ("save", "profile"):
            assert one_line(hpcdist(command, "first")) == (
                "run first reports no steps: its script must call hpcdist.should_stop(step) after each step"
            )
