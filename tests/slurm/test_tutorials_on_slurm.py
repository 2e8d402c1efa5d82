"""The programs of examples/tutorials as jobs of two nodes."""

import pytest
import torch
from slurm_runs import SlurmRuns
from tutorials import TUTORIALS, Tutorial


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.name)
def test_program_as_a_job(tutorial: Tutorial, slurm_runs: SlurmRuns) -> None:
    name = tutorial.name.replace("_", "-")
    uri = f"tracking.uri=sqlite:///{slurm_runs.database}"
    config = [f"tutorial_{tutorial.name}", f"name={name}", "experiment=digits", tutorial.script, uri]
    code, output = slurm_runs.command("submit", *config, "tracking.system_interval_s=0", "--cluster", "devcluster")
    assert code == 0, output
    job = slurm_runs.job_id(name)
    state = slurm_runs.wait_end(name, job)
    assert state.status == "finished", f"{state}\n{slurm_runs.job_log(name)}"
    assert slurm_runs.cluster.job(job)["NumNodes"] == "2"
    code, output = slurm_runs.command("sync", name)
    assert code == 0, output
    assert tutorial.metric in {key for key, _, _ in slurm_runs.points(name)}
    assert torch.load(slurm_runs.run_dir(name).checkpoints / tutorial.weights, weights_only=True)
