"""The heartbeat of a rank: set by the trainer, written by a thread, and only after a new beat."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpcdist.errors import TrainerError
from hpcdist.host.files import read_json
from hpcdist.rank import telemetry
from hpcdist.rank.step_timing import HostClock, StepTimer
from hpcdist.rank.telemetry import MAX_PHASES, Heartbeat, LossWatch, TimeAccount, enable_flight_recorders, write_records
from hpcdist.run.folder import Attempt, RunDir


class Intervals:
    """Replaces the event of the thread: each wait is one interval, before which an action is called."""

    def __init__(self, *before: Callable[[], object]) -> None:
        self._before = list(before)
        self.waits: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        if not self._before:
            return True
        self._before.pop(0)()
        return False

    def set(self) -> None:
        """Do nothing: the real thread has ended."""


@pytest.fixture
def attempt(runs_dir: Path) -> Attempt:
    return RunDir.create(runs_dir / "exp" / "run").new_attempt()


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the steps of all heartbeats written so far."""
    seen: list[int] = []
    real = os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        seen.append(json.loads(data)["step"])
        return real(descriptor, data, offset)

    monkeypatch.setattr(telemetry.os, "pwrite", pwrite)
    return seen


def without_thread(attempt: Attempt, rank: int = 0, num_ranks: int = 2, hang_timeout_s: float = 1800.0) -> Heartbeat:
    """Return a heartbeat whose thread has ended, for `run_intervals`."""
    beat = Heartbeat(attempt, rank, num_ranks, hang_timeout_s)
    beat._ended.set()
    beat._thread.join()
    return beat


def run_intervals(beat: Heartbeat, *before: Callable[[], object]) -> list[float]:
    intervals = Intervals(*before)
    beat._ended = intervals  # type: ignore[assignment]
    beat._keep_writing()
    return intervals.waits


def step(beat: Heartbeat, number: int) -> Callable[[], None]:
    def note() -> None:
        beat.step = number
        beat.beat()

    return note


def nothing() -> None:
    """A hung trainer."""


def read(attempt: Attempt, rank: int = 0) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(attempt.beat(rank).read_text())
    return value


def test_heartbeat_is_written_at_the_start_and_after_a_new_beat_or_step(attempt: Attempt, writes: list[int]) -> None:
    """It has the time of the last beat, also if it is written late. A step may be logged after its beat."""
    beat = without_thread(attempt)
    assert writes == [0]
    run_intervals(beat, step(beat, 1), nothing, nothing, step(beat, 2), nothing)
    assert writes == [0, 1, 2]
    step(beat, 7)()
    noted = beat._noted
    run_intervals(beat, nothing, lambda: beat.note_logged({"loss": 0.5}, 8), nothing)
    assert writes == [0, 1, 2, 7, 8]
    assert (read(attempt)["step"], read(attempt)["time"]) == (8, noted)


def test_heartbeat_says_whether_further_ones_are_due(attempt: Attempt) -> None:
    """`should_stop` and `alive` promise them; `log` and `save` do not."""
    beat = without_thread(attempt)
    for regular, due in ((False, False), (True, True), (False, True)):
        run_intervals(beat, lambda regular=regular: beat.beat(regular=regular))  # type: ignore[misc]
        assert read(attempt)["regular"] is due


def test_close_writes_the_last_values_and_ends_the_thread(attempt: Attempt) -> None:
    beat = Heartbeat(attempt, 1, 4096, 1800.0)
    beat.step, beat.total_steps, beat.metrics = 9, 10, {"loss": 0.5}
    beat.close()
    value = read(attempt, 1)
    assert (value["step"], value["total_steps"], value["metrics"]) == (9, 10, {"loss": 0.5})
    assert not beat._thread.is_alive()


def test_thread_writes_a_new_beat(attempt: Attempt, writes: list[int]) -> None:
    beat = Heartbeat(attempt, 0, 1, 0.04)
    step(beat, 3)()
    while 3 not in writes:  # the time limit of the test ends the loop if the thread fails
        beat._ended.wait(0.005)
    beat.close()


def test_ranks_that_start_together_write_at_different_times(attempt: Attempt) -> None:
    beats = [without_thread(attempt, rank, 4096) for rank in (1, 2047, 4095)]
    first = [run_intervals(beat, nothing) for beat in beats]
    assert [round(waits[0]) for waits in first] == [0, 32, 64]
    assert {waits[1] for waits in first} == {64.0}


def test_full_disk_is_logged_once_and_write_is_retried(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beat = without_thread(attempt)
    real = os.pwrite

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    def fill_disk() -> None:
        monkeypatch.setattr(telemetry.os, "pwrite", full)
        step(beat, 1)()

    def free_disk() -> None:
        monkeypatch.setattr(telemetry.os, "pwrite", real)

    with caplog.at_level(logging.WARNING):
        run_intervals(beat, fill_disk, nothing, free_disk)
    assert caplog.messages == [
        f"the heartbeat {attempt.beat(0)} cannot be written: No space left on device",
        f"the heartbeat {attempt.beat(0)} can be written again",
    ]
    assert read(attempt)["step"] == 1


def test_stale_file_is_reopened_and_short_write_is_completed(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = without_thread(attempt)
    real, opened = os.pwrite, []
    real_open = os.open

    def stale(*_: object) -> int:
        raise OSError(116, "Stale file handle")

    def short(descriptor: int, data: bytes, offset: int) -> int:
        return real(descriptor, data[:100], offset)

    def counting(*arguments: Any) -> int:
        opened.append(arguments[0])
        return real_open(*arguments)

    monkeypatch.setattr(telemetry.os, "open", counting)
    monkeypatch.setattr(telemetry.os, "pwrite", stale)
    step(beat, 1)()
    beat._write()
    monkeypatch.setattr(telemetry.os, "pwrite", short)
    beat._write()
    assert opened == [attempt.beat(0)]
    assert read(attempt)["step"] == 1


def test_number_of_metrics_is_limited(attempt: Attempt) -> None:
    beat = Heartbeat(attempt, 0, 1, 60.0)
    beat.note_logged({"loss": np.float32(0.5)} | {f"key/{number}": float(number) for number in range(5000)}, None)
    beat.note_logged({"loss": np.float64(0.25), "late": 1.0}, 8)
    beat.close()
    found = read_json(attempt.beat(0))
    assert found is not None
    assert found["metrics"]["loss"] == 0.25
    assert len(found["metrics"]) == telemetry.MAX_METRICS
    assert "late" not in found["metrics"]
    assert found["metric_steps"] == {"loss": 8}


# --- The time account of a rank with a simulated clock.


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


# --- Flight records of a rank; the tests of hang diagnostics send the signal to real processes.


def entry(number: int, group: str = "0", *, done: bool = True) -> dict[str, Any]:
    return {"collective_seq_id": number, "process_group": [group, ""], "retired": done}


def replace_recorder(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**functions))


def test_last_and_unfinished_entries_of_each_group_are_kept(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry(1, "7"), *(entry(number, done=number not in (5, 400, 500)) for number in range(1, 501))]
    recorded = json.dumps({"entries": entries, "pg_status": {"0": {}}}).encode()
    replace_recorder(monkeypatch, _dump_fr_trace_json=lambda: recorded, _dump_nccl_trace_json=lambda: b"{}")
    write_records(attempt, 0, 4)
    record = read_json(attempt.flight(0)) or {}
    assert set(record["recorders"]) == {"gloo"}, "NCCL has no entries"
    kept = [(e["process_group"][0], e["collective_seq_id"]) for e in record["recorders"]["gloo"]["entries"]]
    assert kept == [("7", 1), ("0", 400), *(("0", number) for number in range(481, 501))], (
        "unfinished entry 5 is beyond the limit"
    )
    assert record["recorders"]["gloo"]["pg_status"] == {"0": {}}
    assert not list(attempt.path.glob("flight-rank-*"))


@pytest.mark.parametrize(("world_size", "only_active"), [(64, False), (65, True)])
def test_nccl_dump_is_written_unchanged(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, world_size: int, only_active: bool
) -> None:
    """In large runs the dump has only unfinished entries. NCCL is simulated."""
    recorded = json.dumps({"entries": [entry(1)]}).encode()
    dumped: list[tuple[bool, ...]] = []

    def dump(*flags: bool) -> bytes:
        dumped.append(flags)
        return b"a pickle"

    replace_recorder(monkeypatch, _dump_nccl_trace_json=lambda: recorded, _dump_nccl_trace=dump)
    write_records(attempt, 3, world_size)
    assert dumped == [(True, True, only_active)]
    assert (attempt.path / "flight-rank-3").read_bytes() == b"a pickle"


def test_record_without_torch_is_empty(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._C._distributed_c10d", raising=False)
    write_records(attempt, 0, 2)
    assert (read_json(attempt.flight(0)) or {})["recorders"] == {}


def test_recorders_are_enabled_unless_the_user_has_set_their_variables(attempt: Attempt) -> None:
    env: dict[str, str] = {}
    enable_flight_recorders(attempt, env)
    prefix = str(attempt.path / "flight-rank-")
    assert env == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": prefix}
    for user_env in ({"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}):
        env = dict(user_env)
        enable_flight_recorders(attempt, env)
        assert env == {**user_env, "TORCH_FR_DUMP_TEMP_FILE": prefix}
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        env = {name: "/tmp/mine"}
        enable_flight_recorders(attempt, env)
        assert env == {name: "/tmp/mine", "TORCH_FR_BUFFER_SIZE": "2000"}


# --- A loss that has become NaN or infinite: reported once, or the end of the run.


def test_loss_that_stays_nan_is_reported_once_with_its_first_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hpcdist")
    watch = LossWatch()
    watch.note({"train/loss": math.nan, "accuracy": math.nan}, 1)
    watch.note({"train/loss": math.inf, "accuracy": math.nan}, 2)
    watch.note({"train/loss": 0.5, "accuracy": math.nan}, 3)  # as after a step that a gradient scaler skips
    for step in range(4, 9):
        assert watch.finding == ("" if step < 7 else "train/loss is nan since step 4 (3 logged values in a row)")
        watch.note({"train/loss": np.float32("nan")}, step)
    assert caplog.messages == [watch.finding]


def test_limit_ends_the_training() -> None:
    watch = LossWatch(2)
    watch.note({"Loss": math.inf}, 10)
    with pytest.raises(
        TrainerError, match=r"^Loss is inf since step 10 \(2 logged.*ends the run \(stop\.nan_losses=2\): "
    ):
        watch.note({"Loss": math.inf}, 20)
