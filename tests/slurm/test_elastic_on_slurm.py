"""Runs that go on in their allocation when nodes fail, and grow again (`cluster.min_nodes`, `cluster.spare_nodes`)."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hpcdist_runs import assert_states_equal, wait_for
from slurm_cluster import WAIT_S
from slurm_faults import Cell
from slurm_runs import SlurmRuns

from hpcdist.devcluster import node_faults
from hpcdist.run.attempt_times import read_times
from hpcdist.run.folder import ENDED, RunDir

#: One rank on each node; one epoch of 60 steps. A step takes at least `pace_s`, so that the run outlasts the faults.
ELASTIC = [
    *("data.global_batch_size=24", "elastic.exact=true", "elastic.micro_batches=4", "checkpoint.every_steps=5"),
    *("stop.max_epochs=1", "preflight=off", "launch.num_threads=1"),
]
NUM_SAMPLES, NUM_STEPS = 1433, 60
PACED = ["trainer=audited:train", "params.pace_s=0.5", "cluster.tasks_per_node=1"]
ALL_NODES = ["n1", "n2", "n3", "n4"]


@pytest.fixture
def runs(slurm_runs: SlurmRuns) -> Iterator[SlurmRuns]:
    """The runs of the dev cluster; its nodes are started again afterwards."""
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
    words = slurm_runs.config(name, *ELASTIC, "launch.num_ranks=1")
    code, output = slurm_runs.command("run", *words, **slurm_runs.unshipped)
    assert code == 0, output
    code, output = slurm_runs.command("sync", name)
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
    log = runs.attempt(name, attempt).log(0)

    def has_done() -> bool:
        assert runs.state(name).status not in ENDED, runs.job_log(name)
        return log.exists() and runs.step(name, attempt) >= runs.resumed_at(name, attempt) + steps

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
        node_faults.kill_node(runs.cluster.layout, name)


def assert_finished(runs: SlurmRuns, name: str, job: str, control: str, cell: Cell) -> None:
    """Assert that a run ends with the results of the undisturbed run, and leaves no process.

    Its weights are bit-equal, each sample counts once, and MLflow has each point of the metrics once.
    """
    state = runs.wait_end(name, job)
    num_requeues = int(runs.cluster.job(job)["Restarts"])
    cell.starts, cell.attempts, cell.restarts = num_requeues + 1, state.attempt, state.restarts
    assert state.status == "finished", f"{state}\n{runs.job_log(name)}"
    cell.weights = "differ"
    # The other file holds the random number generators of each rank.
    assert_states_equal(*(runs.final_state(one)["model.pt"] for one in (name, control)))
    cell.weights = "equal"
    assert state.world_size == len(hosts(runs, name)[-1])
    assert state.restarts + num_requeues == state.attempt - 1
    assert_each_sample_counts_once(runs.run_dir(name), num_samples=NUM_SAMPLES, num_steps=NUM_STEPS)
    runs.assert_no_process_left(name)
    assert_series_complete(runs, name, control, cell)


def assert_series_complete(runs: SlurmRuns, name: str, control: str, cell: Cell) -> None:
    """Assert that MLflow has the points of the undisturbed run, each once, and the number of ranks of each step."""
    code, output = runs.command("sync", name)
    assert code == 0, output
    cell.points = "wrong"
    expected, found = runs.series(control), runs.series(name)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # The loss is summed in another order.
        assert found[key] == pytest.approx(value, rel=1e-6), key
    sizes = {step: int(value) for key, step, value in runs.points(name) if key == "world_size"}
    assert sizes.keys() >= set(range(2, NUM_STEPS + 1, 2))
    used = [len(nodes) for nodes in hosts(runs, name)]
    assert set(sizes.values()) <= set(used)
    assert (sizes[1], sizes[NUM_STEPS]) == (used[0], used[-1])
    cell.points = "once"
    cell.mlflow = runs.mlflow_status(name)
    assert cell.mlflow == "FINISHED"


@pytest.mark.quick_fault
def test_spare_node_takes_the_place_of_a_dead_node(runs: SlurmRuns, control: str, cell: Cell) -> None:
    cell.fault = "node dead, a spare one takes over"
    name = "spare-node"
    # Paced until the node is killed.
    job = submit(runs, name, "cluster.nodes=2", "cluster.spare_nodes=1", "params.pace_s=[0.5,0]")
    wait_step(runs, name, 1, 6)
    kill(runs, "n2")
    assert_finished(runs, name, job, control, cell)
    assert "no answer from n2: n3 takes over" in runs.job_log(name)
    assert hosts(runs, name) == [["n1", "n2"], ["n1", "n3"]]
    assert runs.cluster.job(job)["Restarts"] == "0", "the same allocation"


@pytest.mark.faults
@pytest.mark.usefixtures("slow_slurm")
def test_run_shrinks_and_grows_with_its_nodes(runs: SlurmRuns, control: str, cell: Cell) -> None:
    """4 nodes, 3 (one dies), 4 (it is back), 2 (preempted), 4 (requeued)."""
    cell.fault = "4 nodes, 3, 4, 2, 4"
    name, cluster = "elastic", runs.cluster
    job = submit(runs, name, "cluster.nodes=2-4")
    script = next((runs.run_dir(name).path / "submitit").glob("*.sh")).read_text()
    assert re.search(r"^#SBATCH --nodes=2-4$", script, re.MULTILINE)
    wait_step(runs, name, 1, 6)
    kill(runs, "n3")
    wait_step(runs, name, 2, 1)
    assert cluster.job(job)["NumNodes"] == "4", "Slurm has not noticed it"
    node_faults.start_node(cluster.layout, "n3")
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
    assert_finished(runs, name, job, control, cell)
    log = runs.job_log(name)
    assert "no answer from n3: continuing on 3 of 4 nodes" in log
    assert "to restart on more nodes: n3 answers again" in log
    found = hosts(runs, name)
    assert found[:5] == [ALL_NODES, ["n1", "n2", "n4"], ALL_NODES, ["n3", "n4"], ALL_NODES]
    # Once a rank on n3 was killed in the last start of the job, perhaps by a signal that Slurm had kept for the dead
    # node: steps of the next start have the same ids. The ranks restart on the same nodes then.
    assert all(own == ALL_NODES for own in found[5:])


@pytest.mark.faults
def test_run_goes_back_into_the_queue_if_too_few_nodes_remain(runs: SlurmRuns, control: str, cell: Cell) -> None:
    """Three of four nodes die at once."""
    cell.fault = "three of four nodes dead"
    name = "too-few-nodes"
    job = submit(runs, name, "cluster.nodes=2-4", "params.pace_s=0.2")
    wait_step(runs, name, 1, 6)
    kill(runs, "n2", "n3", "n4")
    runs.wait_requeued(name)
    for node in ("n2", "n3", "n4"):
        node_faults.start_node(runs.cluster.layout, node)
    runs.start_now(job)
    assert_finished(runs, name, job, control, cell)
    assert len(hosts(runs, name)[-1]) >= 2


@pytest.mark.faults
def test_run_goes_on_after_the_death_of_two_nodes_at_once(runs: SlurmRuns, control: str, cell: Cell) -> None:
    cell.fault = "two nodes dead at once"
    name = "two-dead-nodes"
    job = submit(runs, name, "cluster.nodes=1-4", "params.pace_s=0.2")
    wait_step(runs, name, 1, 6)
    kill(runs, "n2", "n4")
    assert_finished(runs, name, job, control, cell)
    assert runs.cluster.job(job)["Restarts"] == "0", "the same allocation"
    assert hosts(runs, name)[-1] == ["n1", "n3"]


@pytest.mark.faults
def test_job_is_requeued_after_the_death_of_its_batch_host(runs: SlurmRuns, control: str, cell: Cell) -> None:
    cell.fault = "elastic: batch host dead"
    name = "batch-host-dead"
    job = submit(runs, name, "cluster.nodes=2-4", "params.pace_s=0.2")
    wait_step(runs, name, 1, 6)
    assert runs.cluster.job(job)["BatchHost"] == "n1"
    kill(runs, "n1")
    runs.wait_restarted(job)
    assert_finished(runs, name, job, control, cell)
    # The watchdog's output ends with the batch host. Slurm itself would requeue the job "due to failure of node n1".
    _, removed, later = runs.controller_log(job).partition("Removing failed node n1 from")
    assert removed, "Slurm has taken the node out of the job"
    assert "Requeuing JobId=" in later
    assert "due to failure of node" not in later
    assert "n1" not in hosts(runs, name)[-1]


@pytest.mark.faults
@pytest.mark.usefixtures("slow_slurm")
def test_node_that_is_lost_twice_is_not_used_again(runs: SlurmRuns, control: str, cell: Cell) -> None:
    cell.fault = "node dead, back, dead, back"
    name = "flapping-node"
    job = submit(runs, name, "cluster.nodes=2-4")
    wait_step(runs, name, 1, 6)
    for attempt in (2, 4):
        kill(runs, "n3")
        wait_step(runs, name, attempt, 1)
        node_faults.start_node(runs.cluster.layout, "n3")
        if attempt == 2:
            wait_step(runs, name, 3, 3)
    assert_finished(runs, name, job, control, cell)
    three = ["n1", "n2", "n4"]
    assert hosts(runs, name) == [ALL_NODES, three, ALL_NODES, three]
    assert runs.cluster.job(job)["Restarts"] == "0", "the same allocation"


@pytest.mark.faults
@pytest.mark.parametrize(("moment", "attempt", "rank"), [("save", 1, 0), ("restore", 2, 2), ("rendezvous", 2, 2)])
def test_node_dies_at_a_moment(runs: SlurmRuns, control: str, cell: Cell, moment: str, attempt: int, rank: int) -> None:
    """During a save, rank 0 is killed as well, because the ranks on the other nodes end."""
    cell.fault = f"node dead during a {moment}"
    name = f"dead-during-{moment}"
    job = submit(runs, name, "cluster.nodes=2-4", "params.pace_s=0.1", f"launch.env.HOLD_AT={moment}:{attempt}:{rank}")
    expected = [ALL_NODES]
    if attempt == 2:
        wait_step(runs, name, 1, 6)
        kill(runs, "n4")
        expected.append(["n1", "n2", "n3"])
    wait_for((runs.attempt(name, attempt).path / "held").exists, f"the {moment}", timeout_s=WAIT_S)
    kill(runs, "n3")
    assert_finished(runs, name, job, control, cell)
    expected.append([node for node in expected[-1] if node != "n3"])
    assert hosts(runs, name) == expected
    if moment == "save":
        assert runs.resumed_at(name, 2) == 5, "the half of a checkpoint does not count"
    assert runs.cluster.job(job)["Restarts"] == "0", "the same allocation"


# --- The samples that a run of `audited.py` has counted: each once an epoch, whatever has happened to its ranks.


def counted_samples(run: RunDir) -> dict[int, dict[int, list[int]]]:
    """Return the samples by step and micro-batch; steps that a later attempt has repeated count in that attempt alone.

    Asserts that no attempt has computed a micro-batch twice.
    """
    counted: dict[int, dict[int, list[int]]] = {}
    for attempt in run.attempts():
        found: dict[int, dict[int, list[int]]] = {}
        for path in sorted(attempt.path.glob("samples-*.jsonl")):
            for line in path.read_text().splitlines():
                step, number, samples = json.loads(line)
                assert number not in found.setdefault(step, {}), f"attempt {attempt.number}: step {step}, {number}"
                found[step][number] = samples
        # The attempt has continued at its first step.
        first = min(found, default=math.inf)
        counted = {step: parts for step, parts in counted.items() if step < first} | found
    return counted


def assert_each_sample_counts_once(run: RunDir, *, num_samples: int, num_steps: int) -> None:
    """Assert that the steps of the only epoch have each sample once."""
    counted = counted_samples(run)
    assert sorted(counted) == list(range(num_steps))
    found = [sample for step in counted.values() for samples in step.values() for sample in samples]
    assert sorted(found) == list(range(num_samples))
