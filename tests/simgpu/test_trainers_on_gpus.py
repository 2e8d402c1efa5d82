"""The tests of `tests/multiproc` on simulated GPUs (`conftest.py`): trainers continue exactly after a stop or a kill.

A parent that has imported torch forks the ranks. As with CUDA, they would fail if it had used a GPU before.
"""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import test_live_commands
import test_role_trainers
import test_runs
import torch
from hpcdist_runs import TRAINING, Runs
from slurm_faults import SIMULATED_GPUS, Cell

from hpcdist.checkpoint.state import load_weights

CHECKOUT = Path(__file__).parents[2]

pytestmark = pytest.mark.processes

SLOW = [pytest.mark.slow, pytest.mark.quick_fault]

#: Trainer, number of its GPUs, the rank that is killed, and its role. The parameter servers of `hybrid` use the CPU.
ROLES = {
    "rl": (3, 2, "observer:1"),
    "rnn": (3, 1, "trainer:1"),
    "hybrid": (2, 2, "parameter_server:0"),
    "pipeline": (2, 1, "stage:1"),
}

KINDS = [pytest.param(kind, marks=SLOW) for kind in ("ddp", *ROLES)]


@cache
def ddp_control(runs: Runs) -> str:
    """Return the name of an undisturbed run of `ddp`."""
    name = "control-ddp"
    code, output = runs.command("run", *runs.config(name, *TRAINING))
    assert code == 0, output
    return name


def fill(cell: Cell, runs: Runs, name: str, gpus: Path, num_gpus: int) -> None:
    """Fill the row of a run that the test has compared with an undisturbed one."""
    log = (gpus / "log").read_text()
    assert all(f"context on device {number}," in log for number in range(num_gpus)), "each GPU is used"
    state = runs.run_dir(name).read_state()
    cell.devices, cell.attempts, cell.restarts = SIMULATED_GPUS, state.attempt, state.restarts
    cell.weights, cell.points, cell.mlflow = "equal", "once", runs.mlflow_status(name)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_run_resumes_exactly(
    runs: Runs, gpus: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell, kind: str
) -> None:
    cell.fault, cell.trainer = "stopped", kind
    if kind == "ddp":
        name = "stopped"
        test_runs.test_run_stopped_in_the_middle_of_an_epoch_is_resumed(runs, ddp_control(runs))
    else:
        name = f"stopped-{kind}"
        monkeypatch.setenv("SIMGPU_DEVICES", str(ROLES[kind][0]))
        test_role_trainers.test_stopped_run_resumes_exactly(runs, kind)
    fill(cell, runs, name, gpus, ROLES.get(kind, (2,))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_run_restarts_exactly_after_a_rank_is_killed(
    runs: Runs, gpus: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell, kind: str
) -> None:
    cell.fault, cell.trainer = "rank killed", kind
    if kind == "ddp":
        test_runs.test_killed_rank_resumes_from_the_last_checkpoint(runs, ddp_control(runs))
        fill(cell, runs, "rank-killed", gpus, 2)
        return
    num_gpus, victim, role = ROLES[kind]
    monkeypatch.setenv("SIMGPU_DEVICES", str(num_gpus))
    test_role_trainers.test_run_restarts_exactly_after_a_rank_is_killed(runs, kind, victim, role)
    fill(cell, runs, f"killed-{kind}-{victim}", gpus, num_gpus)


@pytest.mark.slow
def test_running_run_saves_is_profiled_and_stops_by_tag(runs: Runs, gpus: Path) -> None:
    test_live_commands.test_running_run_saves_is_profiled_and_stops_by_tag(runs)


def test_tensors_between_stages_do_not_pass_through_the_host(runs: Runs, gpus: Path) -> None:
    """An activation has 64 KiB; a loss, which is logged, a few bytes."""
    settings = ("pipeline.split_points=[layer2]", "data.image_size=16", "data.batch_size=64", "stop.max_steps=4")
    trainer = (f"experiment={runs.experiment}", "trainer=between_gpus:train", "model.name=resnet18")
    config = runs.config("direct", *trainer, *settings)[1:]
    code, output = runs.command("run", "pipeline_resnet50", *config, SIMGPU_LOG_COPIES=str(32 * 1024))
    assert code == 0, output
    before, after, at_end = json.loads((runs.attempt("direct").path / "copies.json").read_text())
    assert after == before
    assert at_end > after, "a checkpoint's copies are counted"


@pytest.mark.slow
def test_collectives_of_nccl_are_checked_and_timed(runs: Runs, gpus: Path) -> None:
    code, output = runs.command("run", "bench_comm", *runs.config("comm", "comm.max_bytes=4K")[1:])
    assert code == 0, output
    assert "finished: " in output


@pytest.mark.slow
def test_sharded_model_is_saved_and_resumed_on_gpus(runs: Runs, gpus: Path) -> None:
    """The copies of a save must not race with the next optimizer step, which the fixture checks."""
    for name in ("train.py", "sharded.yaml"):
        shutil.copy(CHECKOUT / "examples" / "sharded_model" / name, runs.project)
    small = ["params.width=16", "checkpoint.every_steps=5", f"experiment={runs.experiment}", "launch.device=cuda"]
    result, output = runs.command("run", "sharded.yaml", "name=sharded", "params.total_steps=10", *small)
    assert result == 0, output
    result, output = runs.command("resume", "sharded", "params.total_steps=15")
    assert result == 0, output
    log = (gpus / "log").read_text()
    assert all(f"context on device {number}," in log for number in range(2)), "each GPU is used"
    first, last = (load_weights(runs.run_dir("sharded").checkpoints / f"step-{step:08d}") for step in (10, 15))
    # 5 steps of AdamW at a learning rate of 0.001, from the weights of step 10 and not from new ones.
    assert all(float((last[name] - first[name]).abs().max()) < 0.01 for name in first)
    assert any(not torch.equal(last[name], first[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("dimension", ["shard", "tensor"])
def test_language_model_is_divided_among_gpus(runs: Runs, gpus: Path, dimension: str) -> None:
    sizes = ("lm.model.hidden_size=32", "lm.model.num_layers=2", "lm.model.intermediate_size=48")
    data = ("lm.corpus.tokenizer=byte", "lm.sequence_length=16", "lm.num_eval_windows=4", "stop.max_steps=3")
    # With tensor parallelism, FSDP2 joins gradients of two types.
    mesh = (f"lm.mesh.{dimension}=2", "precision.dtype=bf16", "tracking.log_every_steps=1")
    code, output = runs.command("run", "lm_small", *runs.config(f"lm-{dimension}", *sizes, *data, *mesh)[1:])
    assert code == 0, output
    log = (gpus / "log").read_text()
    assert all(f"context on device {number}," in log for number in range(2))
