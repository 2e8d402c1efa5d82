"""Commands within a time limit."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from hpcdist.machine.timed_command import last_line, run_within

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


def test_what_a_command_prints() -> None:
    done = run_within(["sh", "-c", "echo $WHO; echo oops >&2; exit 3"], 60, env={"WHO": "me", "PATH": "/usr/bin:/bin"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "me\n", "oops\n")
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        run_within(["no-such-command"], 60)


def test_a_command_that_does_not_answer_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    """Its output is there, although a process that it has left behind holds it open."""
    script = f"trap '' TERM; sleep 1000 & echo $! > {tmp_path}/pid; echo early; wait; sleep 1000"
    began = time.monotonic()
    done = run_within(["sh", "-c", script], 0.5)
    assert time.monotonic() - began < 500
    assert (done.returncode, done.stdout, done.stderr) == (-1, "early\n", "\nno answer within 0.5 s\n")
    child = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_the_last_line_that_says_something() -> None:
    assert last_line("one\n  two \n\n") == "two"
    assert last_line("x" * 300) == "x" * 200
    assert last_line("\n") == ""
