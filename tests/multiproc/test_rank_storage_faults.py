"""Runs on a file system that fails for some calls of ranks, supervisor and shipper: the results do not change."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hpcdist_runs import TRAINING, Runs, assert_equals_control
from io_faults import Fault

#: Part of the command line of all hpcdist processes, but not of pytest.
ALL = "hpcdist"
#: Six calls in a row, after the start of the process.
SIX = {"first": 12, "count": 6}
heavy = pytest.mark.faults


@pytest.mark.parametrize(
    ("only", "fault"),
    [
        pytest.param(ALL, Fault(operation="*", path="journal/*", error=errno.EIO, **SIX), id="journal", marks=heavy),
        pytest.param(ALL, Fault(operation="*", path="checkpoints/*", error=errno.ESTALE, **SIX), id="checkpoints"),
        pytest.param(ALL, Fault(operation="*", path="attempts/001/*", error=errno.ESTALE, **SIX), id="a", marks=heavy),
        # Not all paths: before a supervisor holds the run, a command reports this error at once.
        pytest.param(ALL, Fault(operation="*", path="attempts/*", error=errno.EACCES, **SIX), id="denied", marks=heavy),
        pytest.param(
            "hpcdist.rank.", Fault(operation="*", path="*", error=errno.EACCES, **SIX), id="ranks denied", marks=heavy
        ),
        pytest.param(ALL, Fault(operation="fsync", path="*", error=errno.EIO, **SIX), id="fsync", marks=heavy),
        pytest.param(ALL, Fault(operation="*", path="*", error=errno.EINTR, **SIX), id="interrupted", marks=heavy),
        pytest.param(ALL, Fault(operation="write", path="*", short=True, count=0), id="short writes", marks=heavy),
        pytest.param(ALL, Fault(operation="read", path="*", short=True, count=0), id="short reads", marks=heavy),
        pytest.param(ALL, Fault(operation="*", path="*", error=errno.ESTALE, count=6), id="start", marks=heavy),
        pytest.param(ALL, Fault(operation="write", path="*.jsonl", first=9, delay_ms=60_000), id="hang", marks=heavy),
        pytest.param(
            # The library is loaded once, into the process that forks the ranks.
            "hpcdist.rank.", Fault(operation="open", path="checkpoints/*", first=5, delay_ms=60_000),
            id="save hangs", marks=heavy,
        ),
        pytest.param(
            "shipping.shipper", Fault(operation="*", path="*", error=errno.ESTALE, **SIX), id="shipper", marks=heavy
        ),
    ],
)  # fmt: skip
def test_failing_file_system_calls_do_not_change_the_results(
    runs: Runs,
    control_run: str,
    io_faults: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    only: str,
    fault: Fault,
) -> None:
    name = f"storage-{request.node.callspec.id.replace(' ', '-')}"
    fired = tmp_path / "fired"
    env = fault.environment(io_faults, runs.run_dir(name).path, only=only, fired=fired)
    code, output = runs.command("run", *runs.config(name, *TRAINING), **env)
    assert code == 0, output
    run = runs.run_dir(name)
    logs = [output, *(path.read_text() for path in (run.path / "shipper.log", *run.attempt(1).path.glob("*.log")))]
    assert not [text for text in logs if "Traceback" in text]
    assert len(fired.read_text().splitlines()) >= fault.count
    assert len(run.attempts()) == 1
    assert_equals_control(runs, name, control_run)
