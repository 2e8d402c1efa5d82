"""The position in training, and the stop rules."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from hpcdist.config.launch_schema import CheckpointConfig
from hpcdist.config.schema import Config, StopConfig
from hpcdist.errors import ConfigError
from hpcdist.rank.training_loop import TrainingPosition


def end_reasons(cfg: Config, values: list[float]) -> list[str]:
    """Return the reason to end training after each evaluation; empty while training continues."""
    position, reasons = TrainingPosition(steps_per_epoch=10, total_steps=100), []
    for number, value in enumerate(values, start=1):
        position.step, position.epoch = 10 * number, number
        assert position.end_reason(cfg.stop, cfg.checkpoint) == "", "training ends only after an evaluation"
        position.record_evaluation({"eval/loss": value, "eval/accuracy": value}, cfg.checkpoint)
        reasons.append(position.end_reason(cfg.stop, cfg.checkpoint))
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
        (
            StopConfig(threshold=0.3),
            CheckpointConfig(monitor="eval/loss", monitor_mode="min"),
            [0.5, 0.31, 0.3],
            "eval/loss reached 0.3 (stop.threshold=0.3)",
        ),
        (StopConfig(patience=2), CheckpointConfig(), [0.5, 0.6, 0.6, 0.5], "no better eval/accuracy in 2 evaluations"),
        (
            StopConfig(patience=1),
            CheckpointConfig(monitor="eval/loss", monitor_mode="min"),
            [0.5, 0.4, 0.41],
            "no better eval/loss in 1 evaluations",
        ),
        (StopConfig(max_epochs=10), CheckpointConfig(), [0.5] * 10, "trained 100 steps, 10 epochs"),
    ],
)
def test_training_ends_by_each_stop_rule(
    stop: StopConfig, checkpoint: CheckpointConfig, values: list[float], reason: str
) -> None:
    *before, last = end_reasons(Config(stop=stop, checkpoint=checkpoint), values)
    assert before == [""] * len(before)
    assert last.startswith(reason)


def test_reason_names_one_epoch() -> None:
    position = TrainingPosition(step=10, epoch=1, steps_per_epoch=10, total_steps=10)
    position.record_evaluation({"eval/accuracy": 0.5}, CheckpointConfig())
    assert position.end_reason(StopConfig(), CheckpointConfig()) == "trained 10 steps, 1 epoch"


def test_improvement_resets_the_patience() -> None:
    assert end_reasons(Config(stop=StopConfig(patience=2)), [0.5, 0.4, 0.6, 0.5]) == ["", "", "", ""]


def test_monitored_metric_must_be_measured() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.monitor='f1' is not measured: use one of eval/loss"):
        end_reasons(Config(checkpoint=CheckpointConfig(monitor="f1")), [0.5])


def test_goal_of_the_task_applies_if_the_config_has_no_threshold() -> None:
    position, cfg = (
        TrainingPosition(step=10, epoch=1, steps_per_epoch=10, total_steps=100),
        Config(checkpoint=CheckpointConfig(monitor="eval/return")),
    )
    position.record_evaluation({"eval/return": 480.0}, cfg.checkpoint)
    goal = (475.0, "the environment's own threshold")
    reason = "eval/return reached 480 (the environment's own threshold=475) at step 10"
    assert position.end_reason(cfg.stop, cfg.checkpoint, goal=goal) == reason
    assert position.end_reason(StopConfig(threshold=490.0), cfg.checkpoint, goal=goal) == ""


def test_resumed_run_continues_at_its_position() -> None:
    saved = asdict(TrainingPosition(step=15, epoch=1, step_in_epoch=5, steps_per_epoch=10))
    assert TrainingPosition.resume(saved, 10, StopConfig(max_epochs=3)).total_steps == 30
    assert TrainingPosition.resume(saved, 10, StopConfig(max_epochs=3, max_steps=12)).total_steps == 12
    position = TrainingPosition.resume(saved, 20, StopConfig(max_epochs=3))  # batches of half the size
    assert (position.step_in_epoch, position.epochs, position.total_steps) == (10, 1.5, 15 + 50 - 20)


def test_epoch_is_counted_after_all_of_its_steps() -> None:
    position = TrainingPosition(step=18, epoch=1, step_in_epoch=8, steps_per_epoch=10, total_steps=30)
    position.finish_epoch()
    assert (position.epoch, position.step_in_epoch, position.remaining_steps_in_epoch) == (1, 8, 2)
    for _ in range(2):
        position.count_step()
    assert position.remaining_steps_in_epoch == 0
    position.finish_epoch()
    assert (position.step, position.epoch, position.step_in_epoch) == (20, 2, 0)
