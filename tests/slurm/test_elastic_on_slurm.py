"""Runs that go on in their allocation when nodes fail, and grow again (`cluster.min_nodes`, `cluster.spare_nodes`)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hpcdist_runs import wait_for
from slurm_cluster import WAIT_S
from slurm_runs import SlurmRuns

from hpcdist.devcluster import nodes
from hpcdist.files.atomic import read_json
from hpcdist.run.attempt_times import read_times

#: One rank on each node; a step takes at least this long, so that the run outlasts the faults.
PACE_S = 0.3
ONE_RANK_PER_NODE = ["cluster.tasks_per_node=1", "data.batch_size=8", "checkpoint.every_steps=5"]
SLOW = ["trainer=paced:train", f"params.pace_s={PACE_S}"]


@pytest.fixture
def runs(slurm_runs: SlurmRuns) -> Iterator[SlurmRuns]:
    """The runs of the dev cluster, whose nodes are started again afterwards."""
    yield slurm_runs
    slurm_runs.cluster.restore_nodes()


def submit(runs: SlurmRuns, name: str, *overrides: str) -> str:
    """Submit a slow run with one rank per node; return its job id."""
    return runs.submit(name, *ONE_RANK_PER_NODE, *SLOW, *overrides)


def wait_step(runs: SlurmRuns, name: str, attempt: int, steps: int) -> None:
    """Wait until rank 0 of an attempt has done a number of steps."""
    beat, log = runs.attempt(name, attempt).beat(0), runs.attempt(name, attempt).log(0)

    def has_done() -> bool:
        assert runs.state(name).status != "failed", runs.job_log(name)
        step = int((read_json(beat) or {}).get("step", 0))
        return log.exists() and step >= runs.resumed_at(name, attempt) + steps

    wait_for(has_done, f"{steps} steps of attempt {attempt}", timeout_s=WAIT_S)


def hosts(runs: SlurmRuns, name: str) -> list[list[str]]:
    """Return the nodes with ranks, by attempt."""
    found = []
    for attempt in runs.run_dir(name).attempts():
        times = read_times(attempt)
        assert times is not None
        found.append([node for node in times.nodes if node not in times.idle])
    return found


def kill(runs: SlurmRuns, node: str) -> None:
    nodes.kill_node(runs.cluster.layout, node)


@pytest.mark.quick_fault
def test_run_goes_on_without_a_dead_node_and_grows_when_it_is_back(runs: SlurmRuns) -> None:
    name = "elastic"
    job = submit(runs, name, "cluster.nodes=2-4", "stop.max_epochs=3")
    wait_step(runs, name, 1, 6)
    began = runs.cluster.job(job)["StartTime"]
    kill(runs, "n3")
    wait_step(runs, name, 2, 1)
    assert runs.cluster.job(job)["NumNodes"] in ("3", "4")
    nodes.start_node(runs.cluster.layout, "n3")
    state = runs.wait_end(name, job)
    log = runs.job_log(name)
    assert state.status == "finished", log
    assert "no answer from n3: continuing on 3 of 4 nodes" in log
    assert (runs.cluster.job(job)["Restarts"], runs.cluster.job(job)["StartTime"]) == ("0", began), "one allocation"
    found = hosts(runs, name)
    assert found[:2] == [["n1", "n2", "n3", "n4"], ["n1", "n2", "n4"]]
    if "Slurm has taken n3 out of the job" not in log:  # on a slow machine Slurm may notice the failure first
        assert found[2:] == [["n1", "n2", "n3", "n4"]]
        assert "n3 answers again" in log
    assert state.world_size == len(found[-1])
    assert state.restarts == len(found) - 1
    runs.assert_no_process_left(name)
    assert re.search(
        r"^#SBATCH --nodes=2-4$", next((runs.run_dir(name).path / "submitit").glob("*.sh")).read_text(), re.M
    )
