"""Sweeps on a real Slurm: one job array, each task of which is a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hpcdist_runs import wait_for
from slurm_cluster import DevCluster
from slurm_runs import SlurmRuns
from sweep_results import mlflow_runs, repair_trainer

from hpcdist.host.files import read_json

SMALL = ["launch.max_restarts=0", "cluster.nodes=1", "cluster.tasks_per_node=1"]


@pytest.fixture
def sweeps(tmp_path: Path, slurm_runs: SlurmRuns, devcluster: DevCluster) -> SlurmRuns:
    """A separate folder, since the tests change the user's code."""
    return SlurmRuns(tmp_path, slurm_runs.database, devcluster)


def arguments(runs: SlurmRuns, *overrides: str) -> list[str]:
    return ["submit", *runs.config("tune", *SMALL, *overrides), "--cluster", "devcluster", "--sweep", "seed=1,2,3"]


def beat(runs: SlurmRuns, name: str, attempt: int) -> int:
    """Return the step of rank 0's last heartbeat."""
    return int((read_json(runs.attempt(name, attempt).beat(0)) or {}).get("step", -1))


def test_sweep_is_a_job_array_and_resubmission_runs_only_the_failed_cell(
    sweeps: SlurmRuns, devcluster: DevCluster
) -> None:
    submit = arguments(sweeps, "trainer=picky:train", "params.until=5")
    code, output = sweeps.command(*submit, "--array-parallelism", "2", "cluster.sbatch.begin=now+1hour")
    assert code == 0, output
    cells = [f"tune-seed_{seed}" for seed in (1, 2, 3)]
    array = sweeps.job_id(cells[0]).partition("_")[0]
    assert [sweeps.job_id(name) for name in cells] == [f"{array}_{index}" for index in range(3)]
    assert f"tune is jobs {array}_0 to {array}_2\n" in output
    fields = devcluster.job(array)
    assert (fields["ArrayTaskId"], fields["ArrayTaskThrottle"], fields["JobName"]) == ("0-2%2", "2", "digits/tune")
    assert {name: run[:2] for name, run in mlflow_runs(sweeps.database, "tune").items()} == {
        "tune": ("SCHEDULED", None),
        **{f"seed={seed}": ("SCHEDULED", "tune") for seed in (1, 2, 3)},
    }

    code, output = sweeps.command(*submit)
    assert code == 0, output
    assert "sweep tune: 3 cells, 0 to run, in " in output
    assert output.count("(queued (pending))") == 3

    devcluster.run("scontrol", "update", f"JobId={array}", "StartTime=now")
    states = [sweeps.wait_end(name, sweeps.job_id(name)).status for name in cells]
    assert states == ["finished", "failed", "finished"]
    assert "attempt 1: starting 1 ranks" in sweeps.job_log(cells[0])
    repair_trainer(sweeps.project)
    code, output = sweeps.command(*submit, "--follow")
    assert code == 0, output
    assert "  0: seed=2 (failed)  tune-seed_2\n" in output
    assert "seed=2: finished counted to 5\n" in output
    assert "sweep tune: 3 finished\n" in output
    assert "_" not in sweeps.job_id(cells[1]), "a single cell is an ordinary job"
    assert [sweeps.state(name).attempt for name in cells] == [1, 2, 1]
    found = mlflow_runs(sweeps.database, "tune")
    assert set(found) == {"tune", "seed=1", "seed=2", "seed=3"}
    assert {run.status for run in found.values()} == {"FINISHED"}


@pytest.mark.faults
def test_requeue_and_cancel_of_the_last_task_do_not_affect_other_tasks(
    sweeps: SlurmRuns, devcluster: DevCluster
) -> None:
    """SLURM_JOB_ID of the last task is the id of the array, which Slurm's commands apply to all tasks."""
    code, output = sweeps.command(*arguments(sweeps, "trainer=counting:train", "params.until=100000"))
    assert code == 0, output
    first, middle, last = (f"tune-seed_{seed}" for seed in (1, 2, 3))
    for name in (first, middle, last):
        wait_for(sweeps.attempt(name).beat(0).exists, f"a step of {name}")
    job = sweeps.job_id(last)
    assert devcluster.job(job)["JobId"] == job.partition("_")[0]

    for name in (first, last):
        devcluster.run("scontrol", "requeue", sweeps.job_id(name))
        state = sweeps.wait_requeued(name)
        assert state.reason == "everything saved (Slurm ends the job)"
        saved = sweeps.checkpoint_steps(name)[-1]
        sweeps.start_now(sweeps.job_id(name))
        log = sweeps.attempt(name, 2).log(0)
        wait_for(lambda log=log: log.exists() and "resumed at step " in log.read_text(), f"{name} to resume")  # type: ignore[misc]
        assert sweeps.resumed_at(name, 2) == saved
    restarts = [devcluster.job(sweeps.job_id(name))["Restarts"] for name in (first, middle, last)]
    assert restarts == ["1", "0", "1"]

    code, output = sweeps.command("cancel", last)
    assert code == 0, output
    assert sweeps.wait_end(last, job).status == "cancelled"
    for name, attempt in ((first, 2), (middle, 1)):
        step = beat(sweeps, name, attempt)
        wait_for(lambda name=name, attempt=attempt, step=step: beat(sweeps, name, attempt) > step, "another step")  # type: ignore[misc]
        assert (sweeps.state(name).status, sweeps.state(name).attempt) == ("running", attempt)
    code, output = sweeps.command(*arguments(sweeps, "trainer=counting:train", "params.until=100000"), "--dry-run")
    assert "  0: seed=3 (cancelled)  tune-seed_3\n" in output
    assert output.count(" (running)\n") == 2
