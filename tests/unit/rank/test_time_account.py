"""The time account of a rank with a simulated clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpcdist.rank.step_timing import HostClock, StepTimer
from hpcdist.rank.telemetry import MAX_PHASES, TimeAccount


class Rank:
    """A time account, a step timer, and a clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0
        clock: Any = HostClock()
        clock.mark = lambda: self.now
        self.timer = StepTimer(clock, now=lambda: self.now)
        self.account = self.timer.account
        self.model: Any = SimpleNamespace(training=True, require_backward_grad_sync=True)
        self.step = 0

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def train(self, *, data: float = 1, compute: float = 10, exchange: float = 3, update: float = 2) -> None:
        """Do one step."""
        self.wait(data)
        self.timer.before_forward(self.model)
        self.wait(compute)
        self.timer.on_gradient()
        self.wait(exchange)
        self.timer.before_update()
        self.wait(update)
        self.step += 1
        self.timer.step_done(self.step)

    @property
    def seconds(self) -> dict[str, float]:
        report = self.account.report()
        assert sum(report["seconds"].values()) == pytest.approx(report["until"] - report["began"])
        return {cause: round(value, 3) for cause, value in report["seconds"].items()}


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_step_is_data_compute_and_communication(rank: Rank) -> None:
    rank.wait(50)
    rank.train()
    assert rank.seconds == {"start": 51, "compile": 15}, "the first step begins with its forward pass"
    rank.train()
    rank.train()
    assert rank.seconds == {"start": 51, "compile": 15, "data": 2, "compute": 24, "communication": 6}
    rank.wait(7)
    assert rank.seconds["compute"] == 31, "the step in progress"


def test_first_step_begins_where_the_loop_says(rank: Rank) -> None:
    rank.wait(50)
    rank.account.training_begins()
    rank.train()
    assert rank.seconds == {"start": 50, "compile": 16}


def test_steps_that_an_earlier_attempt_had_done_are_redone(rank: Rank) -> None:
    rank.account.reached = 3
    for _ in range(4):
        rank.train()
    assert rank.seconds == {"start": 1, "compile": 15, "redone": 32, "data": 1, "compute": 12, "communication": 3}


def test_phases_are_not_part_of_steps(rank: Rank) -> None:
    rank.train()
    with rank.timer.evaluating():
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


def test_a_phase_that_raises_ends(rank: Rank) -> None:
    rank.train()

    def save() -> None:
        with rank.account.phase("checkpoint"):
            rank.wait(4)
            raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        save()
    rank.wait(1)
    assert rank.seconds["compute"] == 1


def test_waiting_for_other_ranks_is_communication_in_steps_only(rank: Rank) -> None:
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


def test_agreement_on_a_stop_is_communication(rank: Rank) -> None:
    rank.train()
    rank.wait(10)
    rank.timer.step_done(2, agreement_s=4)
    assert rank.seconds == {"start": 1, "compile": 15, "compute": 6, "communication": 4}


def test_rank_without_steps_is_idle_except_for_its_work(rank: Rank) -> None:
    rank.wait(5)
    rank.account.wait_for_work()
    rank.wait(10)
    rank.timer.add(compute_s=4)
    rank.timer.add(compute_s=100)
    assert rank.seconds == {"start": 5, "compute": 10}, "never more work than time"
    rank.wait(2)
    assert rank.seconds == {"start": 5, "compute": 10, "idle": 2}


def test_number_of_recorded_phases_is_limited(rank: Rank) -> None:
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


def test_updates_of_an_optimizer_end_the_exchange(rank: Rank) -> None:
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
