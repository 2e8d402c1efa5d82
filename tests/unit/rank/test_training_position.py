"""Where training stands, and the rules that end it."""

from __future__ import annotations

import pytest

from hpcdist.config.schema import CheckpointConfig, Config, StopConfig
from hpcdist.errors import ConfigError
from hpcdist.rank.training_position import Position


def judged(cfg: Config, values: list[float]) -> list[str]:
    """Why training would be over after each of the evaluations."""
    at, reasons = Position(steps_per_epoch=10), []
    for number, value in enumerate(values, start=1):
        at.step, at.epoch = 10 * number, number
        assert at.end_reason(cfg.stop, cfg.checkpoint, 100) == "", "never before the last step's evaluation"
        at.note_evaluation({"eval/loss": value, "eval/accuracy": value}, cfg.checkpoint)
        reasons.append(at.end_reason(cfg.stop, cfg.checkpoint, 100))
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
def test_stop_rules(stop: StopConfig, checkpoint: CheckpointConfig, values: list[float], reason: str) -> None:
    *before, last = judged(Config(stop=stop, checkpoint=checkpoint), values)
    assert before == [""] * len(before)
    assert last.startswith(reason)


def test_better_again_starts_the_patience_anew() -> None:
    assert judged(Config(stop=StopConfig(patience=2)), [0.5, 0.4, 0.6, 0.5]) == ["", "", "", ""]


def test_the_best_must_be_measured() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.best='f1' is not measured: use one of eval/loss"):
        judged(Config(checkpoint=CheckpointConfig(monitor="f1")), [0.5])


def test_a_goal_of_the_task_holds_where_the_config_has_none() -> None:
    at, cfg = Position(step=10, epoch=1, steps_per_epoch=10), Config(checkpoint=CheckpointConfig(monitor="eval/return"))
    at.note_evaluation({"eval/return": 480.0}, cfg.checkpoint)
    goal = (475.0, "the environment's own threshold")
    reason = "eval/return reached 480 (the environment's own threshold=475) at step 10"
    assert at.end_reason(cfg.stop, cfg.checkpoint, 100, goal=goal) == reason
    assert at.end_reason(StopConfig(threshold=490.0), cfg.checkpoint, 100, goal=goal) == ""


def test_steps_and_epochs_go_on_from_where_a_run_stands() -> None:
    at = Position(step=15, epoch=1, step_in_epoch=5, steps_per_epoch=10)
    assert at.total_steps(StopConfig(max_epochs=3)) == 30
    assert at.total_steps(StopConfig(max_epochs=3, max_steps=12)) == 12
    at.rescale(20)  # half as large batches
    assert (at.step_in_epoch, at.epochs, at.total_steps(StopConfig(max_epochs=3))) == (10, 1.5, 15 + 50 - 20)
    assert not at.close_epoch()
    at.step_in_epoch = 20
    assert at.before_evaluation(100)
    assert at.close_epoch()
    assert (at.epoch, at.step_in_epoch) == (2, 0)
