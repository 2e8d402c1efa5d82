"""Tests of `tests/multiproc` on simulated GPUs (`conftest.py`): trainers continue exactly after a stop or a kill.

A parent that has imported torch forks the ranks. As with CUDA, they would fail if it had used a GPU before.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from containers import CHECKOUT

pytestmark = pytest.mark.processes

DDP = "test_runs.py::test_run_"
KILLED = "test_role_trainers.py::test_run_restarts_exactly_after_a_rank_is_killed"
#: Number of GPUs, and tests whose ranks use one each.
CASES = [
    (2, [f"{DDP}stopped_in_the_middle_of_an_epoch_is_resumed"]),
    pytest.param(
        4,
        [
            *(f"{KILLED}[{rank}]" for rank in ("rl-2-observer:1", "rnn-1-trainer:1", "hybrid-2-parameter_server:0")),
            f"{KILLED}[pipeline-1-stage:1]",
        ],
        marks=pytest.mark.slow,
    ),
    pytest.param(
        2,
        [
            f"{DDP}resumes_from_the_last_checkpoint_after_a_killed_rank",
            "test_live_commands.py::test_running_run_saves_is_profiled_and_stops_by_tag",
        ],
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("num_gpus", "tests"), CASES, ids=["ddp", "roles", "ddp: more"])
def test_trainers_on_gpus_continue_exactly(gpus: dict[str, str], num_gpus: int, tests: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", *tests, "-m", "", "-q", "-p", "no:cacheprovider"]
    env = {**gpus, "SIMGPU_DEVICES": str(num_gpus), "TEST_DEVICE": "cuda"}
    folder = CHECKOUT / "tests" / "multiproc"
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert f"{len(tests)} passed" in done.stdout
    assert "context on device 1" in Path(gpus["SIMGPU_LOG"]).read_text()
