"""Commands that run in the process of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hpcdist.run.folder import RunDir
from hpcdist.slurm.client import JobSnapshot
from hpcdist.slurm.output import JobInfo


class Result(NamedTuple):
    """Exit code, standard output and standard error of a command."""

    code: int
    out: str
    err: str


#: Runs a command with these arguments, see the fixture `hpcdist`.
Cli = Callable[..., Result]
#: Creates a run folder, see the fixture `make`.
Make = Callable[..., RunDir]
#: Sets the snapshot of every job, see the fixture `slurm`.
SetJob = Callable[[JobSnapshot], None]
#: What a replaced supervisor has received, see the fixture `supervised`.
Seen = dict[str, Any]


def one_line(result: Result, code: int = 2) -> str:
    """Return the message of a failed command: one line, and nothing else on standard error."""
    assert result.code == code
    assert result.err.startswith("hpcdist: ")
    assert result.err.count("\n") == 1
    return result.err.removeprefix("hpcdist: ").rstrip()


def job(state: str, **facts: Any) -> JobSnapshot:
    """Return a snapshot of job 7."""
    return JobSnapshot(info=JobInfo(id="7", state=state, **facts))
