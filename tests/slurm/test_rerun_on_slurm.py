"""`hpcdist rerun` of a run of Slurm: submitted again, and repeated on this machine."""

from __future__ import annotations

import re

import pytest
from hpcdist_runs import LAST_STEP
from slurm_runs import SlurmRuns

PAUSE_STEP = 20


@pytest.mark.faults
def test_a_submitted_run_is_submitted_again_and_repeated_here(slurm_runs: SlurmRuns) -> None:
    job = slurm_runs.submit("to-repeat")
    assert slurm_runs.wait_end("to-repeat", job).reason == f"trained {LAST_STEP} steps, 2 epochs"
    # Four metrics at every second step. The job is not requeued after its pause.
    result = f"no value differs: {4 * PAUSE_STEP // 2} values of 4 metrics at {PAUSE_STEP // 2} steps"

    code, output = slurm_runs.command("rerun", "to-repeat", "--steps", str(PAUSE_STEP), "--wait", "--detach")
    assert code == 0, output
    found = re.search(r"^(\S+) is job (\d+)", output, re.MULTILINE)
    assert found is not None, output
    name, again = found.groups()
    assert output.splitlines()[-1] == result
    state = slurm_runs.wait_end(name, again)
    assert (state.status, state.attempt) == ("stopped", 1)
    assert slurm_runs.hosts(name) == slurm_runs.hosts("to-repeat")

    code, output = slurm_runs.command("rerun", "to-repeat", "--steps", str(PAUSE_STEP), "--here")
    assert code == 0, output
    assert "4 × cpu" in output
    assert output.splitlines()[-1] == result
