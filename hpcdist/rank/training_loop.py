"""The epoch loop of the shipped trainers, and the meter that they log training metrics from."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context
from hpcdist.rank.training_position import TrainingPosition


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
