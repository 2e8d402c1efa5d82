"""Runs on two simulated GPUs (`conftest.py`) with faults of a device, and what hpcdist says about them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hpcdist_runs import Runs, assert_states_equal, finish, wait_for

from hpcdist.checkpoint.state import load_weights

pytestmark = pytest.mark.processes

#: Each run fails or ends after a few steps.
SHORT = ["launch.device=cuda", "launch.max_restarts=0", "stop.max_steps=30"]


@pytest.fixture
def runs(tmp_path: Path, gpus: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Runs:
    for name, value in gpus.items():
        monkeypatch.setenv(name, value)
    return Runs(tmp_path)


def explain(runs: Runs, name: str) -> str:
    code, output = runs.command("explain", str(runs.run_dir(name).path))
    assert code == 0, output
    return output


def test_lost_gpu_is_named_and_metrics_come_from_nvml(runs: Runs, gpus: dict[str, str]) -> None:
    held = ("trainer=gated:train", "params.hold_at=20")
    process = runs.start("run", *runs.config("lost", *SHORT, *held))
    runs.wait_until_held("lost")
    journal = runs.run_dir("lost").path / "journal" / "attempt-001.rank-00000.jsonl"
    wait_for(lambda: "system/gpu_1" in journal.read_text(), "metrics of the GPUs")
    (Path(gpus["SIMGPU_FAULTS"]) / "1.lost").touch()
    runs.release("lost")
    code, output = finish(process)
    assert code == 1, output
    assert "CUDA error: CUDA-capable device(s) is/are busy or unavailable after step 20\n" in output
    text = explain(runs, "lost")
    assert "status:   failed: rank 1 on " in text
    assert "cause:    a GPU of the named rank is lost" in text
    points = {(key, value) for key, _, value in runs.points("lost")}
    assert {("system/gpu_0_utilization_percentage", 37), ("system/gpu_1_utilization_percentage", 37)} <= points


def test_full_memory_is_explained(runs: Runs) -> None:
    code, output = runs.command("run", *runs.config("full", *SHORT), SIMGPU_MEMORY_MB="2")
    assert code == 1, output
    assert "cause:    the GPU's memory is full" in explain(runs, "full")


def test_more_ranks_than_gpus_are_refused(runs: Runs) -> None:
    code, output = runs.command("run", *runs.config("many", *SHORT, "launch.num_ranks=3"))
    assert (code, output.strip()) == (
        2,
        "hpcdist: launch.num_ranks=3, but 2 GPUs are visible: lower it, or use launch.device=cpu",
    )


def test_late_copies_leave_checkpoints_as_they_are(runs: Runs) -> None:
    """A checkpoint after each step is copied to pinned memory while the next step changes the weights."""
    every_step = ("checkpoint.every_steps=1", "checkpoint.keep_last=20", "stop.max_steps=12")
    for name, delay in (("quick", "0"), ("late", "3000")):
        code, output = runs.command("run", *runs.config(name, *SHORT, *every_step), SIMGPU_COPY_US=delay)
        assert code == 0, output
    assert runs.checkpoint_steps("late") == runs.checkpoint_steps("quick") == list(range(1, 13))
    for quick in sorted(runs.run_dir("quick").checkpoints.glob("step-*")):
        late = runs.run_dir("late").checkpoints / quick.name
        assert_states_equal(load_weights(late), load_weights(quick))
