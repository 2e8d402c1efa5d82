"""A user's own script with MLflow's autologging in a Slurm job: every value is in the run of hpcdist once."""

from __future__ import annotations

from collections import Counter

import pytest
from slurm_runs import SlurmRuns

#: Lightning and MLflow take long to import on several ranks at once.
pytestmark = pytest.mark.faults
NUM_EPOCHS = 4


def test_autologged_metrics_of_a_job_arrive_once(slurm_runs: SlurmRuns) -> None:
    name = "autologged"
    cluster = ["cluster.nodes=2", "cluster.tasks_per_node=1"]
    # `export=True`: with the MLflow of this environment.
    arguments = slurm_runs.config(name, "trainer.script=[autologged.py, --fail]", *cluster, export=True)
    code, output = slurm_runs.command("submit", *arguments, "--cluster", "devcluster")
    assert code == 0, output
    job = slurm_runs.job_id(name)
    state = slurm_runs.wait_end(name, job)
    logs = [slurm_runs.attempt(name, state.attempt).log(rank).read_text() for rank in range(2)]
    assert state.status == "finished", f"{state}\n{logs[0]}"
    assert state.attempt == 2, "the script fails once, after its second epoch"
    for log in logs:
        assert "of 2 ranks" in log, "the ranks are one process group on two nodes"
    code, output = slurm_runs.command("sync", name)
    assert code == 0, output
    counts = Counter((key, step) for key, step, _ in slurm_runs.points(name))
    assert set(counts.values()) == {1}
    assert sorted(step for key, step in counts if key == "train_loss") == list(range(NUM_EPOCHS))
    assert slurm_runs.param(name, "optimizer_name") == "SGD"
    assert slurm_runs.param(name, "epochs") == str(NUM_EPOCHS)
    assert slurm_runs._query("select count(*) from runs where name like 'autologged%'") == [(1,)], "the run of hpcdist"
    assert slurm_runs.mlflow_status(name) == "FINISHED"
