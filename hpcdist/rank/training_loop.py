"""The epoch loop of the shipped trainers: meter, position and stop rules, optimizer and schedule, and a reproducible
order of gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hpcdist.config.launch_schema import CheckpointConfig
from hpcdist.config.schema import Config, OptimConfig, ScheduleConfig, StopConfig
from hpcdist.errors import ConfigError
from hpcdist.rank.context import Context

# Position in training: steps, epochs and evaluations done so far, and the stop rules that end training.


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


# The epoch loop of the shipped trainers, and the meter that they log training metrics from.


class Meter:
    """Named sums since the last logged step, such as of the loss. A checkpoint holds them.

    Tensors stay on their device: reading a value at each step would wait for the device.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None, device: torch.device | None = None) -> None:
        self.sums: dict[str, Any] = {
            name: value.to(device) if isinstance(value, Tensor) else value for name, value in (saved or {}).items()
        }
        self._since = time.perf_counter()

    def add(self, **values: float | Tensor) -> None:
        """Add values to the sums of their names."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    @property
    def elapsed_s(self) -> float:
        """Seconds of training since the last logged step."""
        return time.perf_counter() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from `elapsed_s`."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def restart_clock(self) -> None:
        """Begin the interval of `elapsed_s` now."""
        self._since = time.perf_counter()

    def reset(self) -> None:
        """Clear all sums and restart the clock, after a logged step."""
        self.sums.clear()
        self.restart_clock()


class LoopState(Protocol):
    """State of a training loop. Each trainer has a dataclass with these and its own fields."""

    @property
    def ctx(self) -> Context: ...
    @property
    def cfg(self) -> Config: ...
    @property
    def position(self) -> TrainingPosition: ...
    @property
    def meter(self) -> Meter: ...


L = TypeVar("L", bound=LoopState)


def run_epochs(
    loop: L,
    train_epoch: Callable[[L], Iterator[None]],
    interval_metrics: Callable[[L], Mapping[str, float]],
    evaluate: Callable[[L], Mapping[str, float]],
    save: Callable[[L, Mapping[str, float]], None],
    *,
    in_flight: Collection[Any] = (),
    goal: tuple[float, str] | None = None,
) -> str:
    """Train epoch by epoch until a stop rule of the config applies or a stop is requested.

    Each epoch trains, evaluates and saves, in this order. Metrics are logged every
    `tracking.log_every_steps` steps, and at the last step.

    Args:
        loop: its position is advanced; its meter, to which `train_epoch` adds, is reset after each logged step.
        train_epoch: a generator that does the remaining steps of the current epoch and yields after each. It is not
            resumed after the last step of the epoch or of training.
        interval_metrics: returns the metrics of the steps since the last logged one.
        evaluate: returns the metrics of an evaluation.
        save: saves a checkpoint together with the metrics of an evaluation, if there is one.
        in_flight: batches whose update is incomplete: while there are any, the loop neither saves nor returns.
        goal: see `TrainingPosition.end_reason`.

    Returns:
        The reason why training is over; empty if it was stopped before, with a checkpoint saved.
    """
    ctx, cfg, position, meter = loop.ctx, loop.cfg, loop.position, loop.meter
    meter.restart_clock()
    ctx.training_begins()
    while not (reason := position.end_reason(cfg.stop, cfg.checkpoint, goal=goal)):
        for _ in islice(train_epoch(loop), position.remaining_steps_in_epoch):
            position.count_step()
            if position.step % cfg.tracking.log_every_steps == 0 or position.step == position.total_steps:
                ctx.log(interval_metrics(loop), position.step)
                meter.reset()
            stop = ctx.should_stop(position.step, position.total_steps)
            if in_flight:
                continue
            # If an evaluation follows, the checkpoint is saved after it, unless the ranks stop now.
            if ctx.should_save(position.step) and (stop or position.remaining_steps_in_epoch > 0):
                save(loop, {})
            if stop:
                return ""
        position.finish_epoch()
        with meter.paused():
            with ctx.evaluating():
                metrics = evaluate(loop)
            ctx.log(metrics, position.step)
            position.record_evaluation(metrics, cfg.checkpoint)
            save(loop, metrics)
    return reason


# The optimizer and the learning rate schedule of a config.


def build_optimizer(parameters: Iterable[Tensor], cfg: OptimConfig) -> torch.optim.Optimizer:
    """Return the fused implementation of the configured optimizer."""
    if cfg.name == "sgd":
        return torch.optim.SGD(parameters, lr=cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay, fused=True)
    kind = torch.optim.AdamW if cfg.name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)


def lr_factor(step: int, total_steps: int, cfg: ScheduleConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 0), relative to its peak.

    The schedule is a function of the step alone, so a checkpoint does not need to hold it.
    """
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    if cfg.name == "constant":
        return 1.0
    fraction = (step - cfg.warmup_steps) / max(1, total_steps - cfg.warmup_steps)
    return cfg.min_lr_factor + (1 - cfg.min_lr_factor) * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction)))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


# A reproducible order in which DistributedDataParallel adds gradients.

#: With a static graph DDP rebuilds its buckets after the second backward pass, otherwise after the first.
_NUM_PASSES = 2


def settle_buckets(model: DistributedDataParallel, loss: Callable[[], Tensor]) -> None:
    """Make DDP rebuild its buckets before the first training step. Call it on every rank.

    DDP rebuilds its buckets after it has seen the order of the gradients. The position of a gradient in its bucket
    determines the order in which the ranks' values are added, and with more than two ranks the order determines the
    rounding. Without this call the first steps after a resume are rounded differently than in an uninterrupted run.

    Args:
        model: the wrapped model; its weights and buffers and the random number generators are not changed.
        loss: runs a forward pass of `model` with a batch of the training's size, and returns the loss.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[] if model.device_type == "cpu" else model.device_ids):
        for _ in range(_NUM_PASSES):
            torch.autograd.backward(loss())
            model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
