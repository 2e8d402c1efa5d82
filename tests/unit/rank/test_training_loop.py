"""The parts of the shipped training loops: meter, progress with its stop rules, and learning rate schedules."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Literal

import pytest
import torch
from torch import nn

from hpcdist.config.launch_schema import CheckpointConfig
from hpcdist.config.schema import Config, OptimConfig, ScheduleConfig, StopConfig
from hpcdist.errors import ConfigError
from hpcdist.rank.training_loop import Meter, Progress, build_optimizer, load_optimizer, lr_factor


def test_the_meter_sums_and_its_time_leaves_out_pauses_also_when_it_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 12.0, 15.0, 16.0, 20.0, 22.0, 100.0, 101.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter = Meter({"loss": torch.tensor(1.0), "num_steps": 3}, torch.device("cpu"))
    meter.add(loss=torch.tensor(0.5), num_steps=1)
    assert meter.sums == {"loss": torch.tensor(1.5), "num_steps": 4}
    with meter.paused():  # from 12 to 15
        pass
    assert meter.elapsed_s == 3.0
    meter.reset()  # at 20
    assert meter.state_dict() == {}
    meter.add(num_steps=4)
    with meter.paused():  # from 22 on: the checkpoint of an evaluated step
        restored = Meter(meter.state_dict())  # at 100
        assert restored.sums == {"num_steps": 4}
        assert restored.elapsed_s == 3.0
        monkeypatch.undo()


# --- The position in training, and the stop rules.


def evaluated(cfg: Config, metrics: Mapping[str, float], goal: tuple[float, str] | None = None) -> Progress:
    """Return the progress after one epoch of 10 steps and its evaluation."""
    progress = Progress(cfg, 10, {"step": 10, "step_in_epoch": 10, "steps_per_epoch": 10}, goal=goal)
    progress.end_epoch(metrics)
    return progress


def end_reasons(cfg: Config, values: list[float]) -> list[str]:
    """Return the reason to end training after each evaluation; empty while training continues."""
    cfg = dataclasses.replace(cfg, stop=dataclasses.replace(cfg.stop, max_epochs=10))
    progress, reasons = Progress(cfg, 10), []
    for value in values:
        for _ in range(10):
            progress.count_step()
            assert progress.end_reason == "", "training ends only after an evaluation"
        progress.end_epoch({"eval/loss": value, "eval/accuracy": value})
        reasons.append(progress.end_reason)
    return reasons


@pytest.mark.parametrize(
    ("stop", "checkpoint", "values", "reason"),
    [
        (
            StopConfig(threshold=0.8),
            CheckpointConfig(),
            [0.5, 0.79, 0.8],
            "eval/accuracy reached 0.8 (stop.threshold=0.8)",
        ),
        (StopConfig(patience=2), CheckpointConfig(), [0.5, 0.6, 0.6, 0.5], "no better eval/accuracy in 2 evaluations"),
        (StopConfig(max_epochs=10), CheckpointConfig(), [0.5] * 10, "trained 100 steps, 10 epochs"),
    ],
)
def test_training_ends_by_each_stop_rule(
    stop: StopConfig, checkpoint: CheckpointConfig, values: list[float], reason: str
) -> None:
    *before, last = end_reasons(Config(stop=stop, checkpoint=checkpoint), values)
    assert before == [""] * len(before)
    assert last.startswith(reason)


def test_monitored_metric_must_be_measured() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.monitor='f1' is not measured: use one of eval/loss"):
        end_reasons(Config(checkpoint=CheckpointConfig(monitor="f1")), [0.5])


def test_goal_of_the_task_applies_if_the_config_has_no_threshold() -> None:
    checkpoint = CheckpointConfig(monitor="eval/return")
    goal = (475.0, "the environment's own threshold")
    reason = "eval/return reached 480 (the environment's own threshold=475) at step 10"
    assert evaluated(Config(checkpoint=checkpoint), {"eval/return": 480.0}, goal).end_reason == reason
    higher = Config(checkpoint=checkpoint, stop=StopConfig(threshold=490.0))
    assert evaluated(higher, {"eval/return": 480.0}, goal).end_reason == ""


def test_resumed_run_continues_at_its_position() -> None:
    def resumed(steps_per_epoch: int, **stop: int) -> Progress:
        cfg = Config(stop=StopConfig(max_epochs=3, **stop))
        return Progress(
            cfg, steps_per_epoch, {"step": 15, "epoch": 1, "step_in_epoch": 5, "steps_per_epoch": 10, "samples": 480}
        )

    assert resumed(10).total_steps == 30
    shortened = resumed(10, max_steps=12)
    assert (shortened.total_steps, shortened.steps_until_evaluation) == (12, 0)
    halved = resumed(20)  # batches of half the size
    assert (halved.step_in_epoch, halved.epochs, halved.total_steps) == (10, 1.5, 15 + 50 - 20)


def test_a_checkpoint_holds_all_counters() -> None:
    cfg = Config(stop=StopConfig(patience=2))
    progress = evaluated(cfg, {"eval/accuracy": 0.5})
    progress.count_samples(640)
    restored = Progress(cfg, 10, progress.state_dict())
    assert vars(restored) == vars(progress)
    restored.end_epoch({"eval/accuracy": 0.4})
    restored.end_epoch({"eval/accuracy": 0.4})
    assert restored.end_reason == "no better eval/accuracy in 2 evaluations (stop.patience) at step 10"


# --- Optimizers and learning rate schedules.


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_a_resumed_optimizer_has_the_options_of_the_config(name: Literal["adam", "adamw", "sgd"]) -> None:
    def optimizer(**options: float) -> torch.optim.Optimizer:
        weight.grad = torch.ones(2)
        return build_optimizer([weight], OptimConfig(name=name, **options))

    weight = nn.Parameter(torch.ones(2))
    before = optimizer()
    before.step()
    after = optimizer(lr=0.5, weight_decay=0.1, momentum=0.8)
    options = after.param_groups[0] | {"params": None}
    load_optimizer(after, before.state_dict())
    assert after.param_groups[0] | {"params": None} == options
    assert after.state_dict()["state"].keys() == {0}
    torch.testing.assert_close(after.state_dict()["state"], before.state_dict()["state"], rtol=0, atol=0)
    after.step()


def test_learning_rate_warms_up_and_decays_as_a_cosine() -> None:
    cfg = ScheduleConfig(name="cosine", warmup_steps=4, min_lr_factor=0.1)
    factors = [lr_factor(step, 14, cfg) for step in range(15)]
    assert factors[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factors[9] == pytest.approx(0.1 + 0.9 / 2)
    assert factors[14] == pytest.approx(0.1)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert lr_factor(99, 14, cfg) == pytest.approx(0.1), "constant after the last step"
    constant = ScheduleConfig(warmup_steps=2)
    assert [lr_factor(step, 9, constant) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert lr_factor(5, 5, ScheduleConfig(name="cosine", warmup_steps=5)) == 1.0
