"""The trainer `lm` on a real Slurm: it trains the same model after faults and on fewer nodes, up to rounding.

On as many nodes as before, it repeats the steps since the checkpoint without rounding.
"""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from slurm_faults import Cell
from slurm_runs import SlurmRuns

from hpcdist.checkpoint.state import load_weights
from hpcdist.devcluster import node_faults
from hpcdist.run.attempt_times import AttemptTimes, read_times
from hpcdist.tracking.journal import journal_files, read_records

NUM_STEPS, SAVE_EVERY = 40, 5
#: An epoch of the text below has 25 steps, so there are two evaluations.
EVALUATED = (25, NUM_STEPS)
#: The step at which each attempt but the last one is held until its fault. No checkpoint of it is due.
HOLD_AT = (8, 13, 17, 32)
#: Number of ranks of each attempt, one on each node. Neither 3 nor 4 divides the windows of a step.
NUM_RANKS = [4, 4, 3, 3, 2]
BATCH_SIZE = 10
#: Limit of the difference to the undisturbed run in single precision: other numbers of ranks round otherwise.
TOLERANCE = 2e-4
#: The text is the numbers below this one.
NUM_LINES = 1900

Values = dict[int, list[float]]


@pytest.fixture
def runs(slurm_runs: SlurmRuns) -> Iterator[SlurmRuns]:
    """The runs of the dev cluster; its nodes are started again afterwards."""
    yield slurm_runs
    slurm_runs.cluster.restore_nodes()


def arguments(runs: SlurmRuns, name: str, *overrides: str) -> list[str]:
    """Return the arguments of `run` and `submit` for a small language model."""
    folder = runs.folder.parent
    text = folder / "numbers.txt"
    text.write_text("\n".join(str(number) for number in range(NUM_LINES)))
    _, *shared = runs.config(name, f"experiment={runs.experiment}")
    sizes = "{hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, intermediate_size: 48}"
    return [
        *("lm_small", *shared, f"data.root={folder / 'data'}", f"lm.corpus.files=[{text}]"),
        *("lm.corpus.tokenizer=byte", f"lm.model={sizes}", "lm.sequence_length=32", "lm.eval_every_steps=null"),
        *(f"data.global_batch_size={BATCH_SIZE}", "stop.max_epochs=9", f"stop.max_steps={NUM_STEPS}"),
        *("schedule.warmup_steps=5", f"checkpoint.every_steps={SAVE_EVERY}", "tracking.log_every_steps=1"),
        *("launch.num_threads=1", "preflight=off", *overrides),
    ]


def recorded(runs: SlurmRuns, name: str, metric: str) -> Values:
    """Return the values of a metric by step, from the journal: one of each attempt that has recorded the step."""
    values: Values = {}
    for file in journal_files(runs.run_dir(name).journal):
        for record in read_records(file.path)[0]:
            if metric in record.metrics:
                values.setdefault(record.step, []).append(record.metrics[metric])
    return values


def times_of(runs: SlurmRuns, name: str) -> list[AttemptTimes]:
    """Return the times and the outcome of each attempt."""
    found = []
    for attempt in runs.run_dir(name).attempts():
        times = read_times(attempt)
        assert times is not None
        found.append(times)
    return found


def assert_values_equal(found: Mapping[int, Sequence[float]], expected: Values) -> None:
    """Assert that there are the steps of the control run, and that all values of a step are its value there."""
    assert found.keys() == expected.keys()
    for step, (value,) in expected.items():
        assert found[step] == pytest.approx([value] * len(found[step]), abs=TOLERANCE, rel=0), f"step {step}"


def assert_faults_fired(runs: SlurmRuns, name: str, lost_node: str, cell: Cell) -> None:
    """Assert that each attempt had its number of ranks and its end, and continued from the checkpoint before it."""
    times = times_of(runs, name)
    assert [attempt.num_ranks for attempt in times] == NUM_RANKS, runs.job_log(name)
    assert [attempt.status for attempt in times] == ["failed", "failed", "stopped", "stopped", "finished"]
    assert f"rank 2 on {lost_node} was killed by SIGKILL" in times[0].reason
    assert f"rank 2 on {lost_node} was lost: its node does not answer" in times[1].reason
    killed, died, stopped, preempted = [runs.resumed_at(name, number) for number in range(2, len(times) + 1)]
    assert (killed, died) == (5, 10), "the newest checkpoints before the faults"
    assert HOLD_AT[2] <= stopped < HOLD_AT[3] <= preempted < NUM_STEPS, "a stop saves its step"
    cell.steps_lost = HOLD_AT[0] - killed + HOLD_AT[1] - died
    sizes = {step: values[-1] for step, values in recorded(runs, name, "world_size").items()}
    assert [sizes[step] for step in (1, died, died + 1, preempted, preempted + 1)] == [4, 4, 3, 3, 2]
    for metric in ("train/loss", "train/grad_norm"):
        # The second of these steps trains on weights that the restored state of the optimizer has changed.
        for step in (killed + 1, killed + 2):
            before, again = recorded(runs, name, metric)[step]
            assert again == before, f"{metric} of step {step}, done again on the same mesh"


def assert_trained_as(runs: SlurmRuns, name: str, control: str, cell: Cell) -> None:
    """Assert that all metrics of the training, in the journal and in MLflow, and the weights are those of the control.

    Values of steps that a later attempt has done again count, too.
    """
    cell.weights, cell.points = "differ", "wrong"
    loss = recorded(runs, control, "train/loss")
    assert tuple(loss) == tuple(range(1, NUM_STEPS + 1))
    assert loss[NUM_STEPS][0] < loss[1][0] / 2, "the model learns"
    assert tuple(recorded(runs, control, "eval/loss")) == EVALUATED
    for metric in ("train/loss", "train/grad_norm", "eval/loss", "eval/bits_per_byte"):
        assert_values_equal(recorded(runs, name, metric), recorded(runs, control, metric))

    code, output = runs.command("sync", name)
    assert code == 0, output
    points = {step: [value] for (key, step), value in runs.series(name).items() if key == "train/loss"}
    assert_values_equal(points, loss)
    cell.points = "once"
    cell.mlflow = runs.mlflow_status(name)
    assert cell.mlflow == "FINISHED"

    weights, expected = [
        load_weights(runs.run_dir(one).checkpoints / f"step-{NUM_STEPS:08d}") for one in (name, control)
    ]
    torch.testing.assert_close(weights, expected, atol=TOLERANCE, rtol=0)
    cell.weights = "close"


@pytest.mark.slow
@pytest.mark.usefixtures("time_to_save")
def test_language_model_survives_faults_on_fewer_nodes(runs: SlurmRuns, cell: Cell) -> None:
    """On 4 nodes a rank is killed, then a node dies; on 3 nodes the run is stopped and resumed, then preempted."""
    cell.fault, cell.trainer = "4 nodes, killed, 3, stopped, preempted, 2", "lm"
    control, name, cluster = "lm-undisturbed", "lm-disturbed", runs.cluster
    code, output = runs.command("run", *arguments(runs, control, "launch.num_ranks=1"), **runs.unshipped)
    assert code == 0, output

    # The micro-batches are those of a trainer of one's own; `lm` divides the windows itself.
    gate = ("trainer=gated:train", "params.gated=lm", f"params.hold_at={list(HOLD_AT)}", "elastic.micro_batches=5")
    nodes = ("cluster.nodes=2-4", "cluster.tasks_per_node=1", "--cluster", "devcluster")
    code, output = runs.command("submit", *arguments(runs, name, *gate, *nodes))
    assert code == 0, output
    job = runs.job_id(name)
    ranks = runs.wait_until_held(name, NUM_RANKS[0])
    os.kill(ranks[2], signal.SIGKILL)

    runs.wait_until_held(name, NUM_RANKS[1], attempt=2)
    *_, lost, preempted = cluster.settings.nodes
    node_faults.kill_node(cluster.layout, lost)

    runs.wait_until_held(name, NUM_RANKS[2], attempt=3)
    # Before that, Slurm may give the node to the next job.
    state_of_lost = ("sinfo", "--noheader", f"--nodes={lost}", "--format=%T")
    cluster.wait_until(lambda: "down" in cluster.run(*state_of_lost), "Slurm notices the loss of the node")
    code, output = runs.command("stop", name)
    assert code == 0, output
    assert runs.wait_end(name, job).status == "stopped", runs.job_log(name)
    assert cluster.job(job)["Restarts"] == "0", "the same allocation until here"
    code, output = runs.command("resume", name, "--detach")
    assert code == 0, output
    job = runs.job_id(name)

    runs.wait_until_held(name, NUM_RANKS[3], attempt=4)
    other = cluster.sbatch("sleep 3600", "--partition=high", "--exclusive", f"--nodelist={preempted}")
    assert runs.wait_requeued(name).reason == "everything saved (Slurm ends the job)"
    cluster.wait_job_state(other, "RUNNING")
    runs.start_now(job)

    state = runs.wait_end(name, job)
    cell.starts, cell.attempts, cell.restarts = 3, state.attempt, state.restarts
    assert state.status == "finished", f"{state}\n{runs.job_log(name)}"
    assert cluster.job(job)["Restarts"] == "1", "the same job until its end"
    runs.assert_no_process_left(name)
    assert_faults_fired(runs, name, lost, cell)
    assert_trained_as(runs, name, control, cell)
