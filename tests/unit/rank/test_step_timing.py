"""Step timing with a simulated clock: data time, compute time, and time that is not counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launcher_env import topology_of
from torch import nn

from hpcdist.rank import step_timing
from hpcdist.rank.step_timing import MAX_SEARCHES, CudaClock, HostClock, LastGradient, NodeTimes, StepTimer, Totals
from hpcdist.run.status import TIMES_PER_S


class TimedTrainer:
    """A step timer and the calls of a trainer, with a simulated clock."""

    def __init__(self, clock: Any = None) -> None:
        self.now = 0.0
        self.clock = clock or HostClock()
        if clock is None:
            self.clock.mark = lambda: self.now
        self.timer = StepTimer(self.clock, now=lambda: self.now)
        self.model: Any = SimpleNamespace(training=True, require_backward_grad_sync=True)
        self.timer.step_done()  # the first step is not counted

    def forward(self, seconds: float = 0.0) -> None:
        self.timer.before_forward(self.model)
        self.now += seconds

    def backward(self, seconds: float, exchange_s: float = 0.0) -> None:
        self.now += seconds
        self.timer.on_gradient()
        self.now += exchange_s

    def step(self, *, data: float, compute: float, rest: float = 0.0) -> None:
        self.now += data
        self.forward(compute / 2)
        self.backward(compute / 2, rest)
        self.timer.step_done()

    @property
    def sums(self) -> tuple[int, float, int, float, float]:
        totals = self.timer.totals
        return (totals.steps, *(round(value, 9) for value in totals[1:]))  # type: ignore[return-value]


@pytest.fixture
def trainer() -> TimedTrainer:
    return TimedTrainer()


def test_step_consists_of_data_time_compute_time_and_waiting(trainer: TimedTrainer) -> None:
    trainer.step(data=1, compute=4, rest=20)
    trainer.step(data=2, compute=6, rest=10)
    assert trainer.sums == (2, 43, 2, 3, 10)
    assert trainer.timer.totals.means_since(Totals()) == {"step_s": 21.5, "data_s": 1.5, "compute_s": 5}


def test_first_step_is_not_counted() -> None:
    timer = StepTimer(HostClock())
    timer.before_forward(SimpleNamespace(training=True, require_backward_grad_sync=True))  # type: ignore[arg-type]
    timer.on_gradient()
    timer.step_done()
    assert timer.totals == Totals()
    assert timer.report() == {}


#: One step: its calls, and the sums of steps and seconds after it.
STEPS: dict[str, tuple[list[tuple[Any, ...]], tuple[float, ...]]] = {
    "compute time ends at the last gradient": (
        [("forward", 1), ("backward", 2), ("backward", 3, 50)],
        (1, 56, 1, 0, 6),
    ),
    "gaps between micro-batches are data time": (
        [
            *(("wait", 1), ("sync", False), ("forward", 2), ("backward", 3), ("wait", 4)),
            *(("sync", True), ("forward", 5), ("backward", 6, 70)),
        ],
        (1, 91, 1, 1 + 4, 5 + 11),
    ),
    "a gap after an all-reduce is not data time, as in adversarial training": (
        [("forward", 1), ("backward", 1, 100)] * 2,
        (1, 204, 1, 0, 4),
    ),
    "two forward passes before a backward pass count as one": (
        [("forward", 1), ("forward", 2), ("backward", 3)],
        (1, 6, 1, 0, 6),
    ),
    "waiting for buffers of rank 0 is not compute time": (
        [("wait", 1), ("forward", 30), ("buffers",), ("wait", 2), ("backward", 3)],
        (1, 36, 1, 1, 5),
    ),
    "skipped time, as of a checkpoint, is not counted": (
        [("wait", 1000), ("skip",), ("wait", 1), ("forward", 1), ("backward", 1)],
        (1, 3, 1, 1, 2),
    ),
    "a skip within a step has no effect": ([("forward", 1), ("skip",), ("backward", 2)], (1, 3, 1, 0, 3)),
}


@pytest.mark.parametrize(("calls", "sums"), STEPS.values(), ids=STEPS)
def test_sums_after_a_step(trainer: TimedTrainer, calls: list[tuple[Any, ...]], sums: tuple[float, ...]) -> None:
    for name, *arguments in calls:
        {
            "forward": trainer.forward,
            "backward": trainer.backward,
            "buffers": trainer.timer.buffers_exchanged,
            "skip": trainer.timer.skip,
            "wait": lambda seconds: setattr(trainer, "now", trainer.now + seconds),
            "sync": lambda value: setattr(trainer.model, "require_backward_grad_sync", value),
        }[name](*arguments)
    trainer.timer.step_done()
    assert trainer.sums == sums


def test_step_after_an_evaluation_is_not_counted(trainer: TimedTrainer) -> None:
    trainer.model.training = False
    trainer.forward(500)
    trainer.model.training = True
    trainer.step(data=500, compute=1)
    assert trainer.sums == (0, 0, 0, 0, 0)
    trainer.step(data=1, compute=2)
    assert trainer.sums == (1, 3, 1, 1, 2)


def test_forward_pass_without_gradients_is_not_compute_time(trainer: TimedTrainer) -> None:
    with torch.no_grad():
        trainer.forward(500)
        trainer.forward(10)
    trainer.step(data=1, compute=2)
    assert trainer.sums == (1, 13, 1, 11, 2), "the time before the last forward pass is not counted"


def test_waiting_before_the_forward_pass_is_not_data_time(trainer: TimedTrainer) -> None:
    with trainer.timer.waiting():
        trainer.now += 40
    trainer.now += 1
    trainer.forward(2)
    with trainer.timer.waiting():  # has no effect during the passes
        trainer.backward(1)
    trainer.timer.step_done()
    assert trainer.sums == (1, 44, 1, 1, 3)


def test_step_without_a_model_has_only_a_duration(trainer: TimedTrainer) -> None:
    trainer.now += 3
    trainer.timer.step_done()
    assert trainer.timer.totals.means_since(Totals()) == {"step_s": 3}


def test_step_without_the_expected_last_gradient_is_not_counted_and_restarts_the_search(trainer: TimedTrainer) -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "two": nn.Linear(2, 2, bias=False)})
    gradients = LastGradient(model, trainer.timer.on_gradient)
    trainer.timer.watch(gradients)

    def step(branch: str) -> Totals:
        trainer.forward(1)
        model[branch](torch.zeros(1, 2)).sum().backward()
        trainer.timer.step_done()
        return trainer.timer.totals

    assert step("one").own_steps == 1
    assert len(gradients._handles) == 1
    assert step("two").own_steps == 1, "only the first branch has a hook"
    assert step("two").own_steps == 2
    assert [step("one").own_steps, step("two").own_steps] == [3, 4], "both branches have hooks"
    assert len(gradients._handles) == 2
    for _ in range(2 * MAX_SEARCHES):
        trainer.forward(1)
        trainer.timer.step_done()  # without a backward pass
    assert gradients._num_searches == MAX_SEARCHES


def test_last_gradient_of_a_deep_model_is_that_of_its_first_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    gradients = LastGradient(model, lambda _: None)
    model(torch.zeros(1, 2)).sum().backward()
    assert gradients.last is not None
    assert gradients._parameters[gradients.last] is model[0].bias, "the only trainable parameter of the first layer"


def test_compute_time_of_a_rank_without_steps_is_summed(trainer: TimedTrainer) -> None:
    trainer.timer.add(compute_s=2)
    trainer.timer.add(compute_s=4)
    assert trainer.timer.totals.means_since(Totals()) == {"data_s": 0, "compute_s": 3}
    assert trainer.timer.report() == {"steps": 0, "step_s": 0, "own_steps": 2, "data_s": 0, "compute_s": 6}


# --- clock of a GPU, with simulated CUDA events


HOST_NOW = [0.0]


class FakeEvent:
    """A CUDA event; the device has passed all events up to `device_at`."""

    device_at = 0.0
    num_created = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.num_created += 1

    def record(self) -> None:
        self.at = HOST_NOW[0]

    def query(self) -> bool:
        return self.at <= FakeEvent.device_at

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.query(), "CUDA raises an error for an event that has not completed"
        assert later.query(), "CUDA raises an error for an event that has not completed"
        return 1e3 * (later.at - self.at)


def test_gpu_steps_are_counted_after_completion_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing.torch.cuda, "Event", FakeEvent)
    FakeEvent.num_created, FakeEvent.device_at = 0, -1.0
    trainer = TimedTrainer(CudaClock())

    def step() -> None:
        for call in (
            lambda: trainer.timer.before_forward(trainer.model),
            trainer.timer.on_gradient,
            trainer.timer.step_done,
        ):
            HOST_NOW[0] += 1
            call()

    HOST_NOW[0] = 0.0
    step()
    step()
    assert trainer.timer.totals[:3] == (2, 0, 0), "the device has completed neither step"
    FakeEvent.device_at = 3.0
    step()
    assert trainer.timer.totals.own_steps == 1
    FakeEvent.device_at = 1e9
    step()
    assert trainer.timer.totals[2:] == (4, 4, 4)
    num_created = FakeEvent.num_created
    for _ in range(50):
        step()
    assert FakeEvent.num_created <= num_created + 3, "events are reused"
    assert trainer.timer.totals[2:] == (54, 54, 54)


# --- metrics of a node


def test_first_rank_of_each_node_logs_at_the_logging_interval(
    trainer: TimedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_timing.socket, "gethostname", lambda: "n2")
    times = [NodeTimes(trainer.timer, topology_of(rank, 4, 2), log_every=2) for rank in range(4)]
    trainer.step(data=1, compute=4, rest=5)
    assert [one.due(1) for one in times] == [{}] * 4
    trainer.step(data=3, compute=6, rest=7)
    expected = {"time/n2/step_s": 13, "time/n2/data_s": 2, "time/n2/compute_s": 5}
    assert [one.due(2) for one in times] == [expected, {}, expected, {}]
    trainer.step(data=1, compute=1)
    trainer.step(data=1, compute=1)
    assert times[0].due(4) == {"time/n2/step_s": 2, "time/n2/data_s": 1, "time/n2/compute_s": 1}, (
        "means since the last point"
    )
    assert times[0].due(6) == {}, "no step since the last point"


def test_first_rank_with_steps_of_each_node_logs(trainer: TimedTrainer) -> None:
    trainer.step(data=1, compute=1)
    names = {"time/step_s", "time/data_s", "time/compute_s"}
    assert set(NodeTimes(trainer.timer, topology_of(0, 2, 1), 1).due(1)) == names, "of a single node"
    times = [NodeTimes(trainer.timer, topology_of(rank, 6, 2), 1) for rank in range(6)]
    for one in times:
        one.leave_to([1, 2, 3, 5])  # 0 and 4 are parameter servers
    assert [rank for rank, one in enumerate(times) if one.due(1)] == [1, 3]


def test_logging_rate_of_many_nodes_is_limited(trainer: TimedTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(step_timing.time, "monotonic", lambda: clock[0])
    times = NodeTimes(trainer.timer, topology_of(0, 1024, 512), 1)
    logged = 0
    for step in range(1000):
        trainer.step(data=1, compute=1)
        logged += bool(times.due(step))
        clock[0] += 0.5
    assert logged == pytest.approx(500 / (512 / TIMES_PER_S), abs=1)
