"""How far training is, and which rule of the config ends it: what all shipped trainers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hpcdist.config.schema import CheckpointConfig, StopConfig
from hpcdist.errors import ConfigError


@dataclass
class Position:
    """How far training is. All of it is saved, so that a resumed run does exactly what an undisturbed one does."""

    step: int = 0  #: optimizer steps done in all
    epoch: int = 0
    step_in_epoch: int = 0
    steps_per_epoch: int = 0  #: changes when a run goes on with another number of ranks or batch size
    evaluated_step: int = -1
    best: float | None = None
    num_evals_without_better: int = 0

    @property
    def epochs(self) -> float:
        """Epochs done, with the part of the one that is under way."""
        return self.epoch + self.step_in_epoch / self.steps_per_epoch

    def total_steps(self, stop: StopConfig) -> int:
        """The step that training ends at: what is done, and what is left of the epochs from here."""
        num_left = max(0, stop.max_epochs - self.epoch) * self.steps_per_epoch - self.step_in_epoch
        total = self.step + max(0, num_left)
        return total if stop.max_steps is None else min(total, stop.max_steps)

    def count_step(self) -> None:
        """One more step is done; the epoch is closed by `close_epoch`."""
        self.step += 1
        self.step_in_epoch += 1

    def before_evaluation(self, total_steps: int) -> bool:
        """Whether an evaluation follows on this step: at the end of an epoch and of training."""
        return self.step_in_epoch == self.steps_per_epoch or self.step == total_steps

    def close_epoch(self) -> bool:
        """Begin the next epoch where this one is done; tells whether it was."""
        if self.step_in_epoch < self.steps_per_epoch:
            return False
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        return True

    def rescale(self, steps_per_epoch: int) -> None:
        """Stand at the same part of the epoch, where it has another number of steps now."""
        self.step_in_epoch = self.step_in_epoch * steps_per_epoch // self.steps_per_epoch
        self.steps_per_epoch = steps_per_epoch

    def note_evaluation(self, metrics: Mapping[str, float], checkpoint: CheckpointConfig) -> None:
        """Take what an evaluation at this step has found. Raises ConfigError unless it has `checkpoint.monitor`."""
        if checkpoint.monitor not in metrics:
            raise ConfigError(
                [f"checkpoint.monitor={checkpoint.monitor!r} is not measured: use one of {', '.join(metrics)}"]
            )
        value = metrics[checkpoint.monitor]
        better = self.best is None or _reaches(value, self.best, checkpoint.monitor_mode, equal=False)
        self.best = value if better else self.best
        self.num_evals_without_better = 0 if better else self.num_evals_without_better + 1
        self.evaluated_step = self.step

    def end_reason(
        self,
        stop: StopConfig,
        checkpoint: CheckpointConfig,
        total_steps: int,
        *,
        goal: tuple[float, str] | None = None,
    ) -> str:
        """Why training is over, or nothing while it goes on. It never is before the last step's evaluation.

        Args:
            goal: a threshold that holds where the config has none, and whose it is.
        """
        if self.evaluated_step != self.step or self.best is None:
            return ""
        threshold, whose = (stop.threshold, "stop.threshold") if stop.threshold is not None else goal or (None, "")
        if threshold is not None and _reaches(self.best, threshold, checkpoint.monitor_mode, equal=True):
            return f"{checkpoint.monitor} reached {self.best:.6g} ({whose}={threshold:g}) at step {self.step}"
        if stop.patience is not None and self.num_evals_without_better >= stop.patience:
            return f"no better {checkpoint.monitor} in {stop.patience} evaluations (stop.patience) at step {self.step}"
        if self.step >= total_steps:
            return f"trained {self.step} steps, {self.epochs:.4g} epochs"
        return ""


def _reaches(value: float, other: float, mode: Literal["max", "min"], *, equal: bool) -> bool:
    if equal and value == other:
        return True
    return value > other if mode == "max" else value < other
