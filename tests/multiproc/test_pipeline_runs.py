"""Whole runs of the pipeline trainer: results do not depend on interruptions, split points or schedules."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from hpcdist_runs import TRAINING_METRICS, Runs, assert_states_equal, finish

from hpcdist.checkpoint.state import load_weights
from hpcdist.data.models import build_model

#: 22 steps per epoch; checkpoints at 15, 22, 30 and 44.
SMALL = [
    *("model.name=resnet18", "data.image_size=16", "data.batch_size=64", "data.eval_batch_size=64"),
    "pipeline.split_points=[layer2]",  # a measured split may differ between two runs on a busy machine
    *("stop.max_epochs=2", "checkpoint.every_steps=15", "optim.max_grad_norm=1.0", "schedule.warmup_steps=5"),
    "tracking.drain_timeout_s=180",
]
LAST_STEP = 44
HOLD_OVERRIDES = ["trainer=gated:train", "params.gated=pipeline", "params.hold_at=25"]
OTHER_SPLIT = [
    *("roles.stage=3", "pipeline.split_points=[measured]", "pipeline.schedule=gpipe", "launch.num_threads=1"),
    "pipeline.activation_checkpointing=true",
]


class PipelineRuns(Runs):
    def config(self, name: str, *overrides: str, export: bool = False) -> list[str]:
        _, *rest = super().config(name, *SMALL, *overrides, export=export)
        return ["pipeline_resnet50", *rest]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_weights(self.run_dir(name).checkpoints / f"step-{self.checkpoint_steps(name)[-1]:08d}")

    def shards(self, name: str) -> list[object]:
        folder = self.run_dir(name).checkpoints / f"step-{self.checkpoint_steps(name)[-1]:08d}"
        return [torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> PipelineRuns:
    return PipelineRuns(tmp_path_factory.mktemp("pipeline"), empty_database, experiment="pipeline")


@pytest.fixture(scope="module")
def control(runs: PipelineRuns) -> str:
    code, output = runs.command("run", *runs.config("control", export=True))
    assert code == 0, output
    assert f"finished: trained {LAST_STEP} steps, 2 epochs" in output
    return "control"


def assert_as_control(runs: PipelineRuns, name: str, control: str) -> None:
    """Compare the last checkpoint bit by bit, and all metrics, each of which has one point per step."""
    assert runs.checkpoint_steps(name)[-1] == LAST_STEP
    assert_states_equal(runs.shards(name), runs.shards(control))
    expected = runs.series(control)
    assert {key for key, _ in expected} == set(TRAINING_METRICS)
    assert runs.series(name) == expected
    assert runs.mlflow_status(name) == "FINISHED"


def test_all_stages_train_and_export_one_model(runs: PipelineRuns, control: str) -> None:
    series = runs.series(control)
    assert series["eval/accuracy", LAST_STEP] > 0.5, "ten classes"
    points = {key for key, _, _ in runs.points(control)}
    assert {"pipeline/bubble", "pipeline/bubble_in_theory", "pipeline/busy_s/stage_1"} <= points
    assert (runs.run_dir(control).model / "MLmodel").is_file()
    weights = runs.weights(control)
    torch.manual_seed(0)
    model = build_model("resnet18", num_classes=10, in_channels=3, image_size=16)
    start = model.state_dict()
    assert weights.keys() == start.keys()
    assert [name for name, _ in model.named_parameters() if torch.equal(weights[name], start[name])] == []
    # Two micro-batches per step, each counted once.
    assert weights["layer4.1.bn2.num_batches_tracked"] == 2 * LAST_STEP
    model.load_state_dict(weights)


@pytest.mark.faults
def test_split_schedule_and_checkpointing_do_not_change_the_result(runs: PipelineRuns, control: str) -> None:
    code, output = runs.command("run", *runs.config("other-split", *OTHER_SPLIT))
    assert code == 0, output
    assert "split by measured cost" in runs.attempt("other-split").log(0).read_text()
    found, expected = runs.weights("other-split"), runs.weights(control)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    assert runs.series("other-split") == runs.series(control)


@pytest.mark.slow
@pytest.mark.quick_fault
def test_stopped_run_resumes_exactly(runs: PipelineRuns, control: str) -> None:
    process = runs.start("run", *runs.config("stopped", *HOLD_OVERRIDES))
    runs.wait_until_held("stopped")
    code, output = runs.command("stop", "stopped")
    assert code == 0, output
    code, output = finish(process)
    assert code == 0, output
    assert 25 <= runs.checkpoint_steps("stopped")[-1] < LAST_STEP
    code, output = runs.command("resume", "stopped")
    assert code == 0, output
    assert_as_control(runs, "stopped", control)


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1])
def test_run_restarts_exactly_after_a_stage_is_killed(runs: PipelineRuns, control: str, victim: int) -> None:
    name = f"killed-{victim}"
    process = runs.start("run", *runs.config(name, *HOLD_OVERRIDES))
    ranks = runs.wait_until_held(name)
    os.kill(ranks[victim], signal.SIGKILL)
    runs.release(name)
    code, output = finish(process)
    assert code == 0, output
    assert f"rank {victim} (stage:{victim}) on {os.uname().nodename} was killed by SIGKILL" in output
    assert "restart 1 of 3\n" in output
    assert_as_control(runs, name, control)


def test_invalid_config_is_reported_before_the_start(runs: PipelineRuns) -> None:
    code, output = runs.command("run", *runs.config("wrong", "data.batch_size=65", "model.name=simple_cnn"))
    assert code == 2, output
    assert "data.batch_size=65 cannot be cut into 2 equal parts (pipeline.num_micro_batches): use 64" in output
    assert "model.name=simple_cnn has no stages: trainer pipeline cuts ResNets, such as resnet50" in output
    assert "Traceback" not in output
