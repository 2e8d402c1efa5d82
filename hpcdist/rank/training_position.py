"""Position in training: steps, epochs and evaluations done so far, and the stop rules that end training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcdist.config.schema import CheckpointConfig, StopConfig
from hpcdist.errors import ConfigError


@dataclass
class TrainingPosition:
    """Counters of a training run. A checkpoint holds all of them, so that a resumed run continues exactly."""

    step: int = 0  #: optimizer steps done in total
    epoch: int = 0
    step_in_epoch: int = 0
    steps_per_epoch: int = 0  #: changes if the number of ranks or the batch size changes between attempts
    evaluated_step: int = -1
    best: float | None = None
    num_evals_without_better: int = 0
    samples: int = 0  #: training samples of all ranks until the last logged step
    total_steps: int = 0  #: the step at which training ends; computed anew in each attempt

    @classmethod
    def resume(cls, saved: Mapping[str, Any] | None, steps_per_epoch: int, stop: StopConfig) -> TrainingPosition:
        """Return the position to continue from.

        Args:
            saved: the fields of the position in the checkpoint; None at the first start.
            steps_per_epoch: optimizer steps of one epoch in this attempt. If it differs from the saved value, the
                position within the epoch is rescaled.
            stop: the stop rules.
        """
        position = cls(steps_per_epoch=steps_per_epoch) if saved is None else cls(**saved)
        position.step_in_epoch = position.step_in_epoch * steps_per_epoch // position.steps_per_epoch
        position.steps_per_epoch = steps_per_epoch
        remaining = max(0, stop.max_epochs - position.epoch) * steps_per_epoch - position.step_in_epoch
        position.total_steps = position.step + max(0, remaining)
        if stop.max_steps is not None:
            position.total_steps = min(position.total_steps, stop.max_steps)
        return position

    @property
    def epochs(self) -> float:
        """Epochs done, including the fraction of the current one."""
        return self.epoch + self.step_in_epoch / self.steps_per_epoch

    @property
    def remaining_steps_in_epoch(self) -> int:
        """Steps to do before the next evaluation."""
        return min(self.steps_per_epoch - self.step_in_epoch, self.total_steps - self.step)

    def count_step(self) -> None:
        """Count an optimizer step. `finish_epoch` counts the epoch."""
        self.step += 1
        self.step_in_epoch += 1

    def count_samples(self, number: float) -> int:
        """Count the training samples of all ranks since the last logged step. Returns the number since the start."""
        self.samples += int(number)
        return self.samples

    def finish_epoch(self) -> None:
        """Count the epoch if all of its steps are done."""
        if self.step_in_epoch == self.steps_per_epoch:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0

    def record_evaluation(self, metrics: Mapping[str, float], checkpoint: CheckpointConfig) -> None:
        """Update the best value. Raises ConfigError if `checkpoint.monitor` is not among the metrics."""
        if checkpoint.monitor not in metrics:
            raise ConfigError(
                [f"checkpoint.monitor={checkpoint.monitor!r} is not measured: use one of {', '.join(metrics)}"]
            )
        value = metrics[checkpoint.monitor]
        is_better = self.best is None or _reaches(value, self.best, checkpoint.monitor_mode, equal=False)
        self.best = value if is_better else self.best
        self.num_evals_without_better = 0 if is_better else self.num_evals_without_better + 1
        self.evaluated_step = self.step

    def end_reason(
        self, stop: StopConfig, checkpoint: CheckpointConfig, *, goal: tuple[float, str] | None = None
    ) -> str:
        """Return the reason why training is over, empty while it continues. Training ends after an evaluation only.

        Args:
            goal: threshold of the task and its description; used if `stop.threshold` is not set.
        """
        if self.evaluated_step != self.step or self.best is None:
            return ""
        threshold, source = (stop.threshold, "stop.threshold") if stop.threshold is not None else goal or (None, "")
        if threshold is not None and _reaches(self.best, threshold, checkpoint.monitor_mode, equal=True):
            return f"{checkpoint.monitor} reached {self.best:.6g} ({source}={threshold:g}) at step {self.step}"
        if stop.patience is not None and self.num_evals_without_better >= stop.patience:
            return f"no better {checkpoint.monitor} in {stop.patience} evaluations (stop.patience) at step {self.step}"
        if self.step >= self.total_steps:
            epochs = f"{self.epochs:.4g}"
            return f"trained {self.step} steps, {epochs} epoch{'s' * (epochs != '1')}"
        return ""


def _reaches(value: float, other: float, mode: Literal["max", "min"], *, equal: bool) -> bool:
    if equal and value == other:
        return True
    return value > other if mode == "max" else value < other
