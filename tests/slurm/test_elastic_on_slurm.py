"""Runs that go on in their allocation when nodes fail, and grow again (`cluster.min_nodes`, `cluster.spare_nodes`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hpcdist_runs import assert_states_equal, wait_for
from slurm_cluster import WAIT_S
from slurm_runs import SlurmRuns

from hpcdist.devcluster import nodes
from hpcdist.files.atomic import read_json
from hpcdist.run.attempt_times import read_times
from hpcdist.run.folder import ENDED

#: One rank on each node. A step takes at least `pace_s`, so that the run outlasts the faults.
ELASTIC = [
    *("data.global_batch_size=24", "elastic.exact=true", "elastic.micro_batches=4", "checkpoint.every_steps=5"),
    *("stop.max_steps=60", "preflight=off", "launch.num_threads=1"),
]
PACED = ["trainer=paced:train", "params.pace_s=0.5", "cluster.tasks_per_node=1"]


@pytest.fixture
def runs(slurm_runs: SlurmRuns) -> Iterator[SlurmRuns]:
    """The runs of the dev cluster, whose nodes are started again afterwards."""
    yield slurm_runs
    slurm_runs.cluster.restore_nodes()


@pytest.fixture
def slow_slurm(runs: SlurmRuns) -> Iterator[None]:
    """A Slurm that takes as long as by default to declare a node down."""
    conf = Path(runs.cluster.env["SLURM_CONF"])
    text = conf.read_text()
    assert "SlurmdTimeout=15\n" in text
    conf.write_text(text.replace("SlurmdTimeout=15\n", "SlurmdTimeout=300\n"))
    runs.cluster.run("scontrol", "reconfigure")
    yield
    conf.write_text(text)
    runs.cluster.run("scontrol", "reconfigure")


@pytest.fixture(scope="module")
def control(slurm_runs: SlurmRuns) -> str:
    """Name of an undisturbed run of one rank on this machine."""
    name = "elastic-control"
    code, output = slurm_runs.command("run", *slurm_runs.config(name, *ELASTIC, "launch.num_ranks=1"))
    assert code == 0, output
    return name


def submit(runs: SlurmRuns, name: str, *overrides: str) -> str:
    """Submit a paced run with one rank per node; return its job id."""
    arguments = [*runs.config(name, *ELASTIC, *PACED, *overrides), "--cluster", "devcluster"]
    code, output = runs.command("submit", *arguments)
    assert code == 0, output
    return runs.job_id(name)


def wait_step(runs: SlurmRuns, name: str, attempt: int, steps: int) -> None:
    """Wait until rank 0 of an attempt has done a number of steps."""
    beat, log = runs.attempt(name, attempt).beat(0), runs.attempt(name, attempt).log(0)

    def has_done() -> bool:
        assert runs.state(name).status not in ENDED, runs.job_log(name)
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


def kill(runs: SlurmRuns, *names: str) -> None:
    for name in names:
        nodes.kill_node(runs.cluster.layout, name)


def assert_finished(runs: SlurmRuns, name: str, job: str, control: str) -> None:
    """Assert that a run ends with the weights of the undisturbed run, and leaves no process."""
    state = runs.wait_end(name, job)
    assert state.status == "finished", f"{state}\n{runs.job_log(name)}"
    # The other file holds the random number generators of each rank.
    assert_states_equal(*(runs.final_state(one)["model.pt"] for one in (name, control)))
    assert state.world_size == len(hosts(runs, name)[-1])
    assert state.restarts + int(runs.cluster.job(job)["Restarts"]) == state.attempt - 1
    runs.assert_no_process_left(name)


@pytest.mark.quick_fault
def test_spare_node_takes_the_place_of_a_dead_node(runs: SlurmRuns, control: str) -> None:
    name = "spare-node"
    job = submit(runs, name, "cluster.nodes=2", "cluster.spare_nodes=1", "params.pace_s=0.1")
    wait_step(runs, name, 1, 6)
    kill(runs, "n2")
    assert_finished(runs, name, job, control)
    assert "no answer from n2: n3 takes over" in runs.job_log(name)
    assert hosts(runs, name) == [["n1", "n2"], ["n1", "n3"]]
    assert runs.cluster.job(job)["Restarts"] == "0", "the same allocation"


@pytest.mark.faults
@pytest.mark.usefixtures("slow_slurm")
def test_run_shrinks_and_grows_with_its_nodes(runs: SlurmRuns, control: str) -> None:
    """4 nodes, 3 (one dies), 4 (it is back), 2 (preempted), 4 (requeued)."""
    name, cluster = "elastic", runs.cluster
    job = submit(runs, name, "cluster.nodes=2-4")
    script = next((runs.run_dir(name).path / "submitit").glob("*.sh")).read_text()
    assert re.search(r"^#SBATCH --nodes=2-4$", script, re.MULTILINE)
    wait_step(runs, name, 1, 6)
    kill(runs, "n3")
    wait_step(runs, name, 2, 1)
    assert cluster.job(job)["NumNodes"] == "4", "Slurm has not noticed it"
    nodes.start_node(cluster.layout, "n3")
    wait_step(runs, name, 3, 3)
    assert cluster.job(job)["Restarts"] == "0", "the same allocation"
    high = cluster.sbatch("sleep 3600", "--partition=high", "--exclusive", "--nodelist=n1,n2")
    runs.wait_requeued(name)
    cluster.wait_job_state(high, "RUNNING")
    runs.start_now(job)
    wait_step(runs, name, 4, 3)
    cluster.run("scancel", high)
    cluster.wait_until(lambda: not cluster.run("squeue", "--noheader", f"--jobs={high}"), "the other job to end")
    cluster.run("scontrol", "requeue", job)
    cluster.wait_job_state(job, "PENDING")
    runs.start_now(job)
    assert_finished(runs, name, job, control)
    log = runs.job_log(name)
    assert "no answer from n3: continuing on 3 of 4 nodes" in log
    assert "to restart on more nodes: n3 answers again" in log
    all_nodes = ["n1", "n2", "n3", "n4"]
    found = hosts(runs, name)
    assert found[:5] == [all_nodes, ["n1", "n2", "n4"], all_nodes, ["n3", "n4"], all_nodes]
    # Once a rank on n3 was killed in the last start of the job, perhaps by a signal that Slurm had kept for the dead
    # node: steps of the next start have the same ids. The ranks restart on the same nodes then.
    assert all(own == all_nodes for own in found[5:])
