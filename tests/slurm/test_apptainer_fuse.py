"""apptainer mounts the .sif of an ordinary user with squashfuse_ll, a process of the step that Slurm may signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import runtime_cases
from containers import Containers, mismatch
from hpcdist_runs import HOLD_STEP, LAST_STEP
from runtime_cases import RuntimeCase, assert_nothing_left
from slurm_cluster import DevCluster
from slurm_runs import SlurmRuns

CASE = "apptainer-sif"


@pytest.fixture
def apptainer(
    containers: Containers, slurm_runs: SlurmRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RuntimeCase]:
    """apptainer with a .sif, and its variables."""
    if (reason := mismatch() or runtime_cases.missing_program(CASE)) is not None:
        assert os.environ.get("HPCDIST_REQUIRE_CONTAINERS") != "1", reason
        pytest.skip(reason)
    with runtime_cases.prepared(CASE, containers, slurm_runs, tmp_path) as case:
        for name, value in case.env.items():
            monkeypatch.setenv(name, value)
        yield case


@pytest.mark.faults
def test_mounted_image_survives_the_signals_of_a_step(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str, apptainer: RuntimeCase
) -> None:
    """proctrack/linuxproc signals all processes of a step; the signals are sent here, whatever the cluster uses."""
    name = "fuse-requeued"
    # With --userns root's image is mounted like that of an ordinary user.
    *settings, extra_args = apptainer.overrides
    key, _, flags = extra_args.partition("=[")
    assert key == "container.extra_args"
    job = slurm_runs.submit_held(name, *settings, f"{key}=['--userns',{flags}")
    mounts = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "squashfuse_ll"]
    assert len(mounts) == 4
    for number in (signal.SIGUSR2, signal.SIGTERM):
        for process in mounts:
            process.send_signal(number)
    devcluster.run("scontrol", "requeue", job)
    assert all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in mounts)
    slurm_runs.release(name)
    slurm_runs.wait_requeued(name)
    saved = slurm_runs.checkpoint_steps(name)[-1]
    assert HOLD_STEP <= saved < LAST_STEP
    assert_nothing_left(apptainer, slurm_runs, name)
    slurm_runs.start_now(job)
    slurm_runs.assert_finished_as(name, job, slurm_control)
    assert slurm_runs.resumed_at(name, 2) == saved
    assert_nothing_left(apptainer, slurm_runs, name)
