"""`slurm/run.sbatch`: runs in jobs that the user submits with sbatch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hpcdist_runs import HOLD_OVERRIDES, HOLD_STEP, HPCDIST, LAST_STEP, wait_for
from slurm_cluster import WAIT_S, DevCluster
from slurm_runs import NUM_RANKS, ON_FOUR_RANKS, SlurmRuns

COUNTING = ("trainer=counting:train", "params.until=1000000")
SCRIPT = Path(__file__).resolve().parents[2] / "slurm" / "run.sbatch"


def sbatch(runs: SlurmRuns, name: str, *flags: str, overrides: tuple[str, ...] = ()) -> str:
    """Submit the script with a short run that is held in the second epoch; return the job id."""
    command = ["sbatch", "--parsable", f"--output={runs.folder.parent}/{name}.log", *flags, str(SCRIPT)]
    done = subprocess.run(
        [*command, *runs.config(name, *ON_FOUR_RANKS, *HOLD_OVERRIDES, *overrides)],
        cwd=runs.project,
        env=runs.env(HPCDIST=str(HPCDIST)),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def job_log(runs: SlurmRuns, name: str) -> str:
    return (runs.folder.parent / f"{name}.log").read_text()


def test_requeued_job_resumes_until_it_is_stopped(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    """The ranks only count."""
    name = "by-hand-counting"
    job = sbatch(
        slurm_runs, name, "--ntasks-per-node=1", overrides=("launch.num_ranks=2", *COUNTING, "checkpoint.every_steps=5")
    )
    wait_for(lambda: slurm_runs.checkpoint_steps(name), "a checkpoint", timeout_s=WAIT_S)
    devcluster.run("scontrol", "requeue", job)
    saved = slurm_runs.wait_queued_again(name)
    slurm_runs.start_now(job)
    wait_for(slurm_runs.attempt(name, 2).beat(1).exists, "the ranks to start again", timeout_s=WAIT_S)
    code, output = slurm_runs.command("stop", name)
    assert code == 0, output
    state = slurm_runs.wait_end(name, job)
    assert (state.status, state.attempt, state.restarts) == ("stopped", 2, 0)
    assert slurm_runs.resumed_at(name, 2) == saved
    assert slurm_runs.checkpoint_steps(name)[-1] > saved
    assert devcluster.job(job)["Restarts"] == "1"
    assert "(`hpcdist stop` by " in state.reason


@pytest.mark.slow
def test_requeued_job_resumes_at_the_last_step(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str
) -> None:
    name = "by-hand"
    job = sbatch(slurm_runs, name)
    slurm_runs.wait_until_held(name, NUM_RANKS)
    devcluster.run("scontrol", "requeue", job)
    slurm_runs.release(name)
    saved = slurm_runs.wait_queued_again(name)
    assert HOLD_STEP <= saved < LAST_STEP, "stopped in the middle of the second epoch"
    slurm_runs.start_now(job)

    slurm_runs.assert_finished_as(name, job, slurm_control)
    assert slurm_runs.resumed_at(name, 2) == saved
    assert (devcluster.job(job)["Restarts"], slurm_runs.state(name).restarts) == ("1", 0)
    assert f"finished: trained {LAST_STEP} steps, 2 epochs" in job_log(slurm_runs, name)


@pytest.mark.faults
def test_job_requeues_itself_ahead_of_the_time_limit(slurm_runs: SlurmRuns, slurm_control: str) -> None:
    name = "by-hand-time-limit"
    flags = ("--time=2", "--signal=USR2@60")
    job = sbatch(slurm_runs, name, *flags, overrides=("cluster.signal_lead_s=60",))
    state = slurm_runs.run_dir(name).path / "state.json"
    wait_for(state.exists, "the run folder")
    saved = slurm_runs.wait_queued_again(name)
    assert 0 < saved < LAST_STEP
    slurm_runs.start_now(job)
    slurm_runs.assert_finished_as(name, job, slurm_control)
    assert slurm_runs.resumed_at(name, 2) == saved


@pytest.mark.faults
def test_run_of_a_job_without_requeue_stops_and_can_be_resumed(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str
) -> None:
    """SIGUSR2 is the signal that Slurm sends ahead of the time limit."""
    name = "by-hand-once"
    job = sbatch(slurm_runs, name, "--no-requeue")
    slurm_runs.wait_until_held(name, NUM_RANKS)
    assert "WARNING Slurm will not requeue this job: " in job_log(slurm_runs, name)
    devcluster.run("scancel", "--signal=USR2", job)
    slurm_runs.release(name)
    state = slurm_runs.wait_end(name, job)
    assert state.status == "stopped"
    assert "; Slurm does not requeue the job (scontrol: Requested operation is presently disabled" in state.reason
    assert devcluster.job(job)["JobState"] == "COMPLETED"
    saved = slurm_runs.checkpoint_steps(name)[-1]
    assert saved >= HOLD_STEP

    # A profile would say that the nodes see this folder in /tmp.
    code, output = slurm_runs.command("resume", name, "--detach", "cluster.shared_runs=true")
    assert code == 0, output
    second = slurm_runs.job_id(name)
    fields = devcluster.job(second)
    assert (fields["NumNodes"].partition("-")[0], fields["TimeLimit"]) == ("2", "00:30:00")
    slurm_runs.assert_finished_as(name, second, slurm_control)
    assert slurm_runs.resumed_at(name, 2) == saved
