"""Runs through a real Slurm: submitted, requeued, hurt and ended; no bit of them differs from an undisturbed run."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hpcdist_runs import HOLD_AT, LAST_STEP
from slurm_cluster import DevCluster
from slurm_runs import SlurmRuns


@pytest.fixture(autouse=True)
def no_jobs_left(devcluster: DevCluster) -> Iterator[None]:
    yield
    devcluster.cancel_all()


def test_a_run_from_the_queue_to_its_end(slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str) -> None:
    name = "plain"
    job = slurm_runs.submit(name, "cluster.sbatch.begin=now+1hour", "cluster.env.NCCL_DEBUG=WARN")
    assert slurm_runs.mlflow_status(name) == "SCHEDULED"
    facts = devcluster.job(job)
    assert (facts["JobState"], facts["JobName"], facts["NumNodes"]) == ("PENDING", f"digits/{name}", "2-2")
    assert (facts["Requeue"], facts["TimeLimit"], facts["Partition"]) == ("1", "00:30:00", "main")
    code, output = slurm_runs.command("status", name)
    assert code == 0, output
    slurm_runs.start_now(job)

    slurm_runs.assert_finished_as(name, job, slurm_control)
    assert slurm_runs.hosts(name) == ["n1", "n1", "n2", "n2"]
    folder = slurm_runs.run_dir(name).path
    assert {path.name for path in folder.iterdir()} >= {"config.yaml", "environment.json", "slurm.json", "submitit"}
    assert "partition: main\n" in (folder / "config.yaml").read_text()
    (script,) = (folder / "submitit").glob("*_submission.sh")
    assert "#SBATCH --signal=USR2@30\n" in script.read_text()
    assert "export NCCL_DEBUG=WARN\n" in script.read_text()
    assert f"finished: trained {LAST_STEP} steps, 2 epochs" in slurm_runs.job_log(name)


def test_a_requeue_in_the_middle_loses_no_step(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str
) -> None:
    name = "requeued"
    job = slurm_runs.submit_held(name)
    devcluster.run("scontrol", "requeue", job)
    slurm_runs.release(name)
    assert slurm_runs.wait_status(name, "queued").reason == "stopped with everything saved (SIGTERM to the supervisor)"
    saved = slurm_runs.checkpoint_steps(name)[-1]
    assert HOLD_AT <= saved < LAST_STEP, "stopped in the middle of the second epoch"
    slurm_runs.start_now(job)

    slurm_runs.assert_finished_as(name, job, slurm_control)
    assert slurm_runs.resumed_at(name, 2) == saved
    assert devcluster.job(job)["Restarts"] == "1"
    state = slurm_runs.state(name)
    assert (state.attempt, state.restarts) == (2, 0)


def test_a_killed_rank_is_restarted_in_place(slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str) -> None:
    name = "rank-killed"
    job = slurm_runs.submit_held(name)
    started = devcluster.job(job)["StartTime"]
    victim = int((slurm_runs.attempt(name).path / "held-3").read_text())
    os.kill(victim, signal.SIGKILL)
    slurm_runs.release(name)

    slurm_runs.assert_finished_as(name, job, slurm_control)
    facts = devcluster.job(job)
    assert (facts["Restarts"], facts["StartTime"]) == ("0", started)
    assert "rank 3 on n2 was killed by SIGKILL (out of memory?) at step " in slurm_runs.job_log(name)
    state = slurm_runs.state(name)
    assert (state.attempt, state.restarts) == (2, 1)
    assert slurm_runs.resumed_at(name, 2) == 45


def test_stop_and_cancel_reach_a_run_on_other_nodes(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    for action, status in (("stop", "stopped"), ("cancel", "cancelled")):
        name = f"to-{action}"
        job = slurm_runs.submit_held(name)
        code, output = slurm_runs.command(action, name)
        assert code == 0, output
        state = slurm_runs.wait_end(name, job)
        assert (state.status, state.attempt) == (status, 1)
        assert f"(`hpcdist {action}` by " in state.reason
        assert devcluster.job(job)["JobState"] == "COMPLETED"
        slurm_runs.assert_no_process_left(name)
        if action == "stop":
            # Started again all the same: what someone has stopped stays so.
            devcluster.run("scontrol", "requeue", job)
            slurm_runs.start_now(job)
            devcluster.until(lambda job=job: devcluster.job(job)["Restarts"] == "1", "the job runs again")  # type: ignore[misc]
            assert slurm_runs.wait_end(name, job) == state
            assert "nothing is left to do: stopped: " in slurm_runs.job_log(name)


@pytest.mark.faults
def test_scancel_ends_a_run_as_stopped(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    name = "scancelled"
    job = slurm_runs.submit_held(name)
    devcluster.run("scancel", job)
    slurm_runs.release(name)
    state = slurm_runs.wait_end(name, job)
    assert (state.status, state.reason) == ("stopped", "stopped with everything saved (SIGTERM to the supervisor)")
    assert slurm_runs.checkpoint_steps(name)[-1] >= HOLD_AT
    slurm_runs.assert_no_process_left(name)


# --- what a user can get wrong


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("cluster.partition=nowhere", "invalid partition specified: nowhere"),
        ("cluster.account=nobody", "Invalid account or account/partition combination specified"),
        ("cluster.nodes=9", "Requested node configuration is not available"),
    ],
)
def test_what_slurm_refuses_is_told_in_one_line(slurm_runs: SlurmRuns, override: str, reason: str) -> None:
    name = "refused"
    code, output = slurm_runs.command(
        "submit", *slurm_runs.config(name), "--cluster", "devcluster", override, "name=refused"
    )
    assert code == 2, output
    assert output.startswith("hpcdist: Slurm would not take this job: ")
    assert reason in output
    assert output.count("\n") == 1
    assert not slurm_runs.run_dir(name).path.exists()


def test_without_slurm_the_script_is_shown_and_nothing_submitted(slurm_runs: SlurmRuns, tmp_path: Path) -> None:
    name = "no-slurm"
    for command in ("git", "sh"):
        (tmp_path / command).symlink_to(shutil.which(command) or command)
    arguments = ["submit", *slurm_runs.config(name), "--cluster", "devcluster"]
    code, output = slurm_runs.command(*arguments, PATH=str(tmp_path))
    wanted = "hpcdist: no sbatch here: submit from a login node, or look at the script with --dry-run\n"
    assert (code, output) == (2, wanted)
    code, output = slurm_runs.command(*arguments, "--dry-run", PATH=str(tmp_path))
    assert code == 0, output
    assert output.startswith("#!/bin/bash\n")
    assert "\n#SBATCH --partition=main\n" in output
    assert "\n# srun --job-name=attempt-001 --nodes=2 --ntasks=4 --ntasks-per-node=2 " in output
    assert not slurm_runs.run_dir(name).path.exists()


def test_slurm_estimates_the_start_and_nothing_is_submitted(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    name = "estimated"
    code, output = slurm_runs.command("submit", *slurm_runs.config(name), "--cluster", "devcluster", "--test")
    assert code == 0, output
    assert " to start at 20" in output
    assert not slurm_runs.run_dir(name).path.exists()
    assert devcluster.run("squeue", "--noheader") == ""
