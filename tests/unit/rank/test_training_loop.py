"""The epoch loop with a context that records its calls, and the meter."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from hpcdist.config.launch_schema import CheckpointConfig, TrackingConfig
from hpcdist.config.schema import Config, StopConfig
from hpcdist.rank.training_loop import Meter, TrainingPosition, run_epochs


class RecordingContext:
    """Saves every `save_every` steps and stops at `stop_at`; `events` has the calls in order."""

    def __init__(self, *, save_every: int = 100, stop_at: int = 100) -> None:
        self.events: list[str] = []
        self.save_every, self.stop_at = save_every, stop_at

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.events.append(f"log {'/'.join(metrics)} {step}")

    def should_stop(self, step: int, total_steps: int) -> bool:
        return step >= self.stop_at

    def training_begins(self) -> None:
        """Ignore the begin of the first step."""

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def should_save(self, step: int) -> bool:
        return step % self.save_every == 0 or step >= self.stop_at


def run(ctx: RecordingContext, position: TrainingPosition, in_flight: list[int] | None = None) -> str:
    meter, in_flight = Meter(), [] if in_flight is None else in_flight

    def train_epoch(loop: SimpleNamespace) -> Iterator[None]:
        while True:
            ctx.events.append(f"step {position.step}")
            meter.add(loss=1.0)
            if in_flight:
                in_flight.pop()
            yield

    def interval_metrics(loop: SimpleNamespace) -> dict[str, float]:
        assert meter.sums == {"loss": 1.0 if position.step % 2 else 2.0}, "the sums of one interval"
        return {"loss": 0.5}

    cfg = Config(
        tracking=TrackingConfig(log_every_steps=2),
        checkpoint=CheckpointConfig(monitor="accuracy"),
        stop=StopConfig(max_epochs=2),
    )

    def evaluate(loop: SimpleNamespace) -> dict[str, float]:
        return {"accuracy": 0.5}

    def save(loop: SimpleNamespace, metrics: Mapping[str, float]) -> None:
        ctx.events.append(f"save {'/'.join(metrics)} {position.step}".replace("  ", " "))

    loop = SimpleNamespace(ctx=ctx, cfg=cfg, position=position, meter=meter)
    return run_epochs(loop, train_epoch, interval_metrics, evaluate, save, in_flight=in_flight)


def new_position(**fields: int) -> TrainingPosition:
    return TrainingPosition.resume({"steps_per_epoch": 2, **fields}, 2, StopConfig(max_epochs=2))


def test_each_epoch_trains_evaluates_and_saves() -> None:
    ctx = RecordingContext()
    assert run(ctx, new_position()) == "trained 4 steps, 2 epochs"
    first = ["step 0", "step 1", "log loss 2", "log accuracy 2", "save accuracy 2"]
    assert ctx.events == [*first, "step 2", "step 3", "log loss 4", "log accuracy 4", "save accuracy 4"]


def test_the_last_step_is_logged_between_two_intervals() -> None:
    """Otherwise the last values of a run of 3 steps are those of step 2."""
    ctx = RecordingContext()
    assert run(ctx, TrainingPosition.resume(None, 3, StopConfig(max_epochs=1))) == "trained 3 steps, 1 epoch"
    assert [event for event in ctx.events if event.startswith("log loss")] == ["log loss 2", "log loss 3"]


def test_a_due_save_before_an_evaluation_waits_for_its_metrics() -> None:
    ctx = RecordingContext(save_every=1)
    run(ctx, new_position())
    assert [event for event in ctx.events if event.startswith("save")] == [
        "save 1",
        "save accuracy 2",
        "save 3",
        "save accuracy 4",
    ]


@pytest.mark.parametrize("stop_at", [1, 2])
def test_a_stop_saves_once_and_returns_without_a_reason(stop_at: int) -> None:
    ctx, position = RecordingContext(stop_at=stop_at), new_position()
    assert run(ctx, position) == ""
    assert ctx.events[-1] == f"save {stop_at}"
    assert (position.step, position.epoch, position.step_in_epoch) == (stop_at, 0, stop_at)


def test_a_run_stopped_before_an_evaluation_resumes_with_it() -> None:
    ctx = RecordingContext()
    run(ctx, new_position(step=2, step_in_epoch=2))
    assert ctx.events[:2] == ["log accuracy 2", "save accuracy 2"]


def test_loop_neither_saves_nor_stops_while_batches_are_in_flight() -> None:
    ctx = RecordingContext(stop_at=1)
    assert run(ctx, new_position(), in_flight=[0, 0]) == ""
    assert ctx.events == ["step 0", "step 1", "log loss 2", "save 2"]


def test_the_meter_sums_excludes_pauses_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 15.0, 16.0, 20.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter = Meter({"loss": torch.tensor(1.0), "num_steps": 3}, torch.device("cpu"))
    meter.add(loss=torch.tensor(0.5), num_steps=1)
    assert meter.sums == {"loss": torch.tensor(1.5), "num_steps": 4}
    with meter.paused():  # from 12 to 15
        pass
    assert meter.elapsed_s == 3.0
    meter.reset()
    assert meter.sums == {}
