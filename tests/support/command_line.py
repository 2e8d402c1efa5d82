"""Commands that run in the process of the test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hpcdist.host.json_files import write_json
from hpcdist.run.folder import RunDir, State
from hpcdist.run.sweeps import SweepDir
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
#: How a replaced cell of a sweep ends, by the last part of its name, see the fixture `cells`.
Ends = dict[str, Callable[[RunDir], State]]
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


def make_sweep(experiment: Path, *cells: str) -> SweepDir:
    """Write a sweep `grid` with these runs as its cells."""
    sweep = SweepDir(experiment / "grid")
    sweep.path.mkdir(parents=True, exist_ok=True)
    rows = [{"name": cell, "label": cell, "values": {"seed": 1}} for cell in cells]
    write_json(sweep.file, {"uid": "u", "created": 19.0, "keys": ["seed"], "base": {}, "cells": rows})
    return sweep
