"""Tests of commands with a time limit."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import wait_for

from hpcdist.host.commands import last_line, run_within

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


def test_result_has_exit_code_and_output() -> None:
    done = run_within(
        ["sh", "-c", "echo $NAME; echo oops >&2; exit 3"], 60, env={"NAME": "me", "PATH": "/usr/bin:/bin"}
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "me\n", "oops\n")
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        run_within(["no-such-command"], 60)


def test_end_of_a_command_is_awaited_without_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        pytest.fail("it polls")

    monkeypatch.setattr(time, "sleep", sleep)
    assert run_within(["sleep", "0.1"], 60).returncode == 0


def test_hanging_command_is_ended_with_its_children(tmp_path: Path) -> None:
    """The output is available although a leftover child process holds it open."""
    script = f"trap '' TERM; sleep 1000 & echo $! > {tmp_path}/pid; echo early; wait; sleep 1000"
    began = time.monotonic()
    done = run_within(["sh", "-c", script], 3)
    assert time.monotonic() - began < 500
    assert (done.returncode, done.stdout, done.stderr) == (-1, "early\n", "\nno answer within 3 s\n")
    child = int((tmp_path / "pid").read_text())
    wait_for(lambda: has_ended(child), "the killed child to end")


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_last_line_is_not_empty_and_cut() -> None:
    assert last_line("one\n  two \n\n") == "two"
    assert last_line("x" * 300) == "x" * 200
    assert last_line("\n") == ""
