"""Detection of a slow node on a real Slurm."""

from __future__ import annotations

import pytest
from hpcdist_runs import wait_for
from slurm_cluster import WAIT_S
from slurm_runs import SlurmRuns

#: The detection needs measurements of a whole minute.
pytestmark = pytest.mark.faults


def test_only_the_slow_one_of_four_nodes_is_reported(slurm_runs: SlurmRuns) -> None:
    name = "uneven"
    job = slurm_runs.submit(
        name,
        "trainer=uneven:train",
        "params.forward_s=0.04",
        "params.slow_host=n3",
        "cluster.nodes=4",
        "cluster.tasks_per_node=1",
        "tracking.log_every_steps=50",
        # `submit` ships records until there are no new ones.
        "tracking.system_interval_s=10",
    )
    attempt = slurm_runs.attempt(name)
    wait_for(attempt.straggler_events, "the straggler's line", timeout_s=WAIT_S)
    assert slurm_runs.command("stop", name)[0] == 0
    slurm_runs.wait_end(name, job)

    lines = attempt.straggler_events()
    assert {(line["name"], line["event"], line["rank"]) for line in lines} == {("n3", "slow", 2)}
    assert lines[0]["slower"] >= 0.2
    assert lines[0]["compute_s"] - lines[0]["others_compute_s"] >= 0.01
    text = lines[0]["text"]
    assert " % slower than the median node (compute " in text
    assert "over the last minute" in text
    assert text in slurm_runs.job_log(name)

    code, output = slurm_runs.command("sync", name)
    assert code == 0, output
    points = {key: value for key, _, value in slurm_runs.points(name)}
    assert {
        f"time/nodes_{kind}/{part}_s" for kind in ("min", "mean", "max") for part in ("step", "data", "compute")
    } <= points.keys()
    assert points["time/nodes_max/compute_s"] >= 1.2 * points["time/nodes_min/compute_s"]
    assert text in slurm_runs.command("explain", name)[1]
