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
from hpcdist.rank.telemetry import MAX_PHASES, TimeAccount
from hpcdist.run.folder import TIMES_PER_S


class TimedTrainer:
    """A step timer with its time account, and the calls of a trainer, with a simulated clock."""

    def __init__(self, clock: Any = None) -> None:
        self.now = 100.0
        self.clock = clock or HostClock()
        if clock is None:
            self.clock.mark = lambda: self.now
        self.timer = StepTimer(self.clock, now=lambda: self.now)
        self.account = self.timer.account
        self.model: Any = SimpleNamespace(training=True, require_backward_grad_sync=True)
        self.num_steps = 0

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def train(self) -> None:
        """Do one step with an update."""
        self.wait(1)
        self.forward(10)
        self.backward(0, exchange_s=3)
        self.timer.before_update()
        self.wait(2)
        self.num_steps += 1
        self.timer.step_done(self.num_steps)

    @property
    def seconds(self) -> dict[str, float]:
        report = self.account.report()
        assert sum(report["seconds"].values()) == pytest.approx(report["until"] - report["began"])
        return {cause: round(value, 3) for cause, value in report["seconds"].items()}

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
def rank() -> TimedTrainer:
    return TimedTrainer()


@pytest.fixture
def trainer(rank: TimedTrainer) -> TimedTrainer:
    """A trainer after its first step, which is not counted."""
    rank.timer.step_done()
    return rank


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
            "wait": trainer.wait,
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
    trainer.timer.step_done()

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


# --- The time account of a rank.


def test_step_is_data_compute_and_communication(rank: TimedTrainer) -> None:
    rank.wait(50)
    rank.train()
    assert rank.seconds == {"start": 51, "compile": 15}, "the first step begins with its forward pass"
    rank.train()
    rank.train()
    assert rank.seconds == {"start": 51, "compile": 15, "data": 2, "compute": 24, "communication": 6}
    rank.wait(7)
    assert rank.seconds["compute"] == 31, "the step in progress"


def test_first_step_begins_where_the_loop_says(rank: TimedTrainer) -> None:
    rank.wait(50)
    rank.account.training_begins()
    rank.train()
    assert rank.seconds == {"start": 50, "compile": 16}


def test_steps_that_an_earlier_attempt_had_done_are_redone(rank: TimedTrainer) -> None:
    rank.account.reached = 3
    for _ in range(4):
        rank.train()
    assert rank.seconds == {"start": 1, "compile": 15, "redone": 32, "data": 1, "compute": 12, "communication": 3}


def test_phases_are_not_part_of_steps(rank: TimedTrainer) -> None:
    rank.train()
    with rank.account.phase("evaluation"):
        rank.wait(20)
        with rank.timer.waiting():
            rank.wait(5)
        with rank.account.phase("checkpoint"):
            rank.wait(1)
    with rank.account.phase("checkpoint"):
        rank.wait(4)
    rank.timer.skip()
    rank.train()
    expected = {"start": 1, "compile": 15, "evaluation": 26, "checkpoint": 4}
    assert rank.seconds == expected | {"data": 1, "compute": 12, "communication": 3}
    assert [(cause, end - begin) for cause, begin, end in rank.account.phases] == [
        ("start", 1),
        ("compile", 15),
        ("evaluation", 26),
        ("checkpoint", 4),
    ]


def test_a_phase_that_raises_ends(rank: TimedTrainer) -> None:
    rank.train()

    def save() -> None:
        with rank.account.phase("checkpoint"):
            rank.wait(4)
            raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        save()
    rank.wait(1)
    assert rank.seconds["compute"] == 1


def test_waiting_for_other_ranks_is_communication_in_steps_only(rank: TimedTrainer) -> None:
    with rank.timer.waiting():
        rank.wait(5)
    rank.train()
    with rank.timer.waiting():
        rank.wait(6)
    assert rank.seconds == {"start": 6, "compile": 15, "communication": 6}
    rank.account.reached = 10
    rank.train()
    with rank.timer.waiting():
        rank.wait(7)
    assert rank.seconds["redone"] == 7


def test_agreement_on_a_stop_is_communication(rank: TimedTrainer) -> None:
    rank.train()
    rank.wait(10)
    rank.timer.step_done(2, agreement_s=4)
    assert rank.seconds == {"start": 1, "compile": 15, "compute": 6, "communication": 4}


def test_rank_without_steps_is_idle_except_for_its_work(rank: TimedTrainer) -> None:
    rank.wait(5)
    rank.account.wait_for_work()
    rank.wait(10)
    rank.timer.add(compute_s=4)
    rank.timer.add(compute_s=100)
    assert rank.seconds == {"start": 5, "compute": 10}, "never more work than time"
    rank.wait(2)
    assert rank.seconds == {"start": 5, "compute": 10, "idle": 2}


def test_number_of_recorded_phases_is_limited(rank: TimedTrainer) -> None:
    for _ in range(MAX_PHASES + 5):
        with rank.account.phase("evaluation"):
            rank.wait(1)
    assert len(rank.account.phases) == MAX_PHASES


def test_account_that_is_read_during_a_switch_adds_up() -> None:
    """The heartbeat's thread reads the account while the rank books time."""
    account = TimeAccount()

    class Hostile(dict[str, float]):
        """Switches the cause while it is copied, twice."""

        copies = 0

        def keys(self) -> Any:
            Hostile.copies += 1
            if Hostile.copies <= 2:
                account.training_begins() if Hostile.copies == 1 else account.step_done(1, account._now())
            return super().keys()

        def __iter__(self) -> Any:
            return iter(list(super().keys()))

    account._seconds = Hostile(account._seconds)
    report = account.report()
    assert report["cause"] == "compute"
    assert sum(report["seconds"].values()) == pytest.approx(report["until"] - report["began"], abs=0.01)


def test_updates_of_an_optimizer_end_the_exchange(rank: TimedTrainer) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients: Any = SimpleNamespace(last=None, search=lambda: None, settle=lambda: None)
    rank.timer.watch(gradients)
    rank.train()
    rank.timer.before_forward(rank.model)
    rank.timer.on_gradient()
    rank.wait(9)
    optimizer.step()
    optimizer.step()
    rank.wait(1)
    rank.timer.close()
    rank.timer.step_done(2)
    assert rank.seconds == {"start": 1, "compile": 15, "communication": 9, "compute": 1}
    rank.timer.on_gradient()
    optimizer.step()
    assert rank.timer._exchange == [], "closed"
