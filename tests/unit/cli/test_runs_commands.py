"""`hpcdist runs`, `status`, `logs`, `follow` and `explain`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from command_line import Cli, Result, one_line
from rich.console import Console

from hpcdist.cli import doctor
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import hold

#: These tests may start processes.
pytestmark = pytest.mark.processes


def test_runs_lists_runs_by_creation_time(
    hpcdist: Cli, make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("first", status="finished", attempt=1)
    make("second", status="failed", attempt=1)
    for arguments in (["runs"], ["runs", "--runs-dir", "./runs"]):
        result = hpcdist(*arguments)
        assert result.code == 0
        assert result.out.index("exp/first") < result.out.index("exp/second")
    assert hpcdist("runs", "--runs-dir", "elsewhere").out.startswith("no runs under ")
    monkeypatch.setenv("HPCDIST_RUNS_DIR", "elsewhere")
    assert hpcdist("runs").out.startswith("no runs under ")


def test_status_accepts_a_prefix_of_the_name(hpcdist: Cli, make: Callable[..., RunDir]) -> None:
    make("first", status="failed", attempt=1, reason="a reason")
    result = hpcdist("status", "fir")
    assert result.code == 0
    assert result.out.splitlines()[:2] == ["status       failed: a reason", "folder       runs/exp/first"]


def test_explanation_is_indented_on_a_terminal(
    hpcdist: Cli, make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("first", status="stopped", attempt=1, reason="a reason that is longer than a line of this narrow terminal")
    monkeypatch.setattr(doctor, "console", lambda: Console(width=40, force_terminal=True, color_system=None))
    lines = hpcdist("explain", "first").out.splitlines()
    assert lines[0].startswith("status:   stopped: a reason")
    assert {line[:10] for line in lines} >= {" " * 10, "cause:    "}
    assert max(map(len, lines)) <= 40


@pytest.mark.parametrize("command", ["status", "logs", "stop", "cancel", "resume", "sync"])
def test_ambiguous_name_is_an_error_with_the_matches(
    hpcdist: Cli, make: Callable[..., RunDir], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real module imports mlflow, which takes seconds.
    monkeypatch.setitem(sys.modules, "hpcdist.tracking.shipper", SimpleNamespace(sync=None))
    make("first")
    make("fire")
    assert one_line(hpcdist(command, "fir")) == (
        "'fir' matches 2 runs (exp/fire, exp/first): write more of the name, or the folder"
    )


def test_logs_prints_the_log_of_a_rank_and_attempt(hpcdist: Cli, make: Callable[..., RunDir]) -> None:
    run = make("first", status="finished", attempt=2)
    for attempt, rank in ((1, 0), (2, 0), (2, 1)):
        run.attempt(attempt).log(rank).write_text(f"attempt {attempt} rank {rank}\n")
    assert hpcdist("logs", "first") == Result(0, "attempt 2 rank 0\n", "")
    assert hpcdist("logs", "first", "-f", "--rank", "1").out == "attempt 2 rank 1\n"
    assert hpcdist("logs", "first", "--attempt", "1").out == "attempt 1 rank 0\n"
    assert one_line(hpcdist("logs", "first", "--rank", "2")).startswith("no log of rank 2 in attempt 2 of first (")


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("stopped", 0), ("failed", 1), ("cancelled", 130)])
def test_follow_of_an_ended_run_prints_its_status(
    hpcdist: Cli, make: Callable[..., RunDir], status: str, code: int
) -> None:
    make("first", status=status, attempt=1, reason="a reason")
    result = hpcdist("follow", "first")
    assert (result.code, result.out.splitlines()[-1]) == (code, f"{status}: a reason")


def test_follow_leaves_the_run_running_on_ctrl_c(
    hpcdist: Cli, make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("first", status="running", attempt=1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpcdist.cli.run_views.Event", lambda: SimpleNamespace(wait=interrupt))
    with hold(run):
        result = hpcdist("follow", "first", "--wait")
    assert result.code == 130
    assert result.out.splitlines() == [
        "running",
        "run first continues: `hpcdist follow first` shows it again, `hpcdist stop` stops it",
    ]
    assert not run.attempt(1).request.exists()


def test_follow_rejects_a_run_that_was_never_started(hpcdist: Cli, make: Callable[..., RunDir]) -> None:
    make("first")
    message = one_line(hpcdist("follow", "first"))
    assert message == "run first was never started: `hpcdist resume first` starts it"


def test_explain_prints_findings(hpcdist: Cli, make: Callable[..., RunDir]) -> None:
    make("first", status="finished", attempt=1, reason="all epochs are done")
    assert hpcdist("explain", "first") == Result(0, "finished: all epochs are done; nothing to explain\n", "")
