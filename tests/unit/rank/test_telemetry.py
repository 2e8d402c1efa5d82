"""What a rank reports about itself: heartbeat, flight records, losses that are not finite, and times of its steps."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launcher_env import topology_of
from torch import nn

from hpcdist.errors import TrainerError
from hpcdist.host.json_files import read_json
from hpcdist.rank import telemetry
from hpcdist.rank.step_timing import MAX_SEARCHES, EventClock, HostClock, LastGradient, NodeTimes, StepTimer, Totals
from hpcdist.rank.telemetry import Heartbeat, LossWatch, enable_flight_recorders, write_records
from hpcdist.run.folder import TIMES_PER_S, Attempt
from hpcdist.supervisor.hang import calls_of


class Intervals:
    """Replaces the event of the thread: each wait is one interval, before which an action is called."""

    def __init__(self, *before: Callable[[], object]) -> None:
        self._before = list(before)
        self.waits: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        if self._before:
            self._before.pop(0)()
            return False
        return True

    def set(self) -> None:
        """Do nothing: the real thread has ended."""


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the steps of all heartbeats written so far."""
    seen: list[int] = []
    real = os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        seen.append(json.loads(data)["step"])
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return seen


def without_thread(attempt: Attempt, rank: int = 0, num_ranks: int = 2) -> Heartbeat:
    """Return a heartbeat without a running thread, for `run_intervals`."""
    beat = Heartbeat(attempt, rank, num_ranks, 1800.0)
    beat._ended.set()
    beat._thread.join()
    return beat


def run_intervals(beat: Heartbeat, *before: Callable[[], object]) -> list[float]:
    intervals = Intervals(*before)
    beat._ended = intervals  # type: ignore[assignment]
    beat._keep_writing()
    return intervals.waits


def step(beat: Heartbeat, number: int) -> None:
    beat.step = number
    beat.beat()


def nothing() -> None:
    """A hung trainer."""


def read(attempt: Attempt, rank: int = 0) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(attempt.beat(rank).read_text())
    return value


def test_heartbeat_is_written_at_start_and_after_new_steps(attempt: Attempt, writes: list[int]) -> None:
    """It has the time of the last beat, also if it is written late. A step may be logged after its beat."""
    beat = without_thread(attempt)
    assert writes == [0]
    run_intervals(beat, partial(step, beat, 1), nothing, nothing, partial(step, beat, 2), nothing)
    assert writes == [0, 1, 2]
    step(beat, 7)
    noted = beat._noted
    run_intervals(beat, nothing, lambda: beat.note_logged({"loss": 0.5}, 8), nothing)
    assert writes == [0, 1, 2, 7, 8]
    assert (read(attempt)["step"], read(attempt)["time"]) == (8, noted)
    # `should_stop` and `alive` promise further ones; `log` and `save` do not.
    for regular, due in ((False, False), (True, True), (False, True)):
        run_intervals(beat, partial(beat.beat, regular=regular))
        assert read(attempt)["regular"] is due


def test_thread_writes_a_new_beat_and_close_the_last_values(attempt: Attempt, writes: list[int]) -> None:
    beat = Heartbeat(attempt, 0, 1, 0.04)
    step(beat, 3)
    while 3 not in writes:  # the time limit of the test ends the loop if the thread fails
        beat._ended.wait(0.005)
    beat.step, beat.total_steps, beat.metrics = 9, 10, {"loss": 0.5}
    beat.close()
    value = read(attempt)
    assert (value["step"], value["total_steps"], value["metrics"]) == (9, 10, {"loss": 0.5})
    assert not beat._thread.is_alive()


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
        monkeypatch.setattr(os, "pwrite", full)
        step(beat, 1)

    def free_disk() -> None:
        monkeypatch.setattr(os, "pwrite", real)

    with caplog.at_level(logging.WARNING):
        run_intervals(beat, fill_disk, nothing, free_disk)
    assert caplog.messages == [
        f"the heartbeat {attempt.beat(0)} cannot be written: No space left on device",
        f"the heartbeat {attempt.beat(0)} can be written again",
    ]
    assert read(attempt)["step"] == 1


def test_number_of_metrics_is_limited(attempt: Attempt) -> None:
    beat = Heartbeat(attempt, 0, 1, 60.0)
    loss: Any = np.float32(0.5)
    beat.note_logged({"loss": loss} | {f"key/{number}": float(number) for number in range(5000)}, None)
    beat.note_logged({"loss": np.float64(0.25), "late": 1.0}, 8)
    for step in (8, 7):  # of a trainer, MLflow keeps the first value of a step, and shows that of the largest
        beat.note_logged({"loss": 0.125}, step)
    beat.close()
    found = read_json(attempt.beat(0))
    assert found is not None
    assert found["metrics"]["loss"] == 0.25
    assert len(found["metrics"]) == telemetry.MAX_METRICS
    assert "late" not in found["metrics"]
    assert found["metric_steps"] == {"loss": 8}


def test_beat_of_a_script_has_the_last_value_of_a_step(attempt: Attempt) -> None:
    beat = Heartbeat(attempt, 0, 1, 60.0)
    beat.last_value_counts = True
    for step, loss in ((8, 0.5), (8, 0.25), (7, 0.125)):
        beat.note_logged({"loss": loss}, step)
    beat.close()
    assert (read_json(attempt.beat(0)) or {})["metrics"] == {"loss": 0.25}


# --- Flight records of a rank; the tests of hang diagnostics send the signal to real processes.


def entry(number: int, group: str = "0", *, done: bool = True) -> dict[str, Any]:
    return {"collective_seq_id": number, "process_group": [group, ""], "retired": done}


def test_last_and_unfinished_entries_of_each_group_are_kept(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry(1, "7"), *(entry(number, done=number not in (5, 400, 500)) for number in range(1, 501))]
    recorded = json.dumps({"entries": entries, "pg_status": {"0": {}}}).encode()
    recorders = SimpleNamespace(_dump_fr_trace_json=lambda: recorded, _dump_nccl_trace_json=lambda: b"{}")
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorders)
    write_records(attempt, 0)
    record = read_json(attempt.flight(0)) or {}
    assert set(record["recorders"]) == {"gloo"}, "NCCL has no entries"
    kept = [(e["process_group"][0], e["collective_seq_id"]) for e in record["recorders"]["gloo"]["entries"]]
    assert kept == [("7", 1), ("0", 400), *(("0", number) for number in range(481, 501))], (
        "unfinished entry 5 is beyond the limit"
    )
    assert record["recorders"]["gloo"]["pg_status"] == {"0": {}}


def test_nccl_records_are_read_from_the_recorder_of_each_torch(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, empty = json.dumps({"entries": [entry(1)]}).encode(), b"{}"

    def of_backend(*, backend: str = "gloo") -> bytes:
        return full if backend == "nccl2" else empty

    versions: tuple[dict[str, Any], ...] = (
        {"_dump_fr_trace_json": lambda: empty, "_dump_nccl_trace_json": lambda: full},  # torch 2.11
        {"_dump_fr_trace_json": of_backend, "_dump_nccl_trace_json": lambda: empty},  # torch 2.15
    )
    for recorders in versions:
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**recorders))
        write_records(attempt, 0)
        assert (read_json(attempt.flight(0)) or {})["recorders"] == {"nccl": {"entries": [entry(1)]}}


@pytest.mark.processes
def test_process_knows_whether_it_was_ever_in_a_group(attempt: Attempt) -> None:
    lines = [
        "import os",
        "from hpcdist.rank.telemetry import has_joined_group",
        "before = has_joined_group(os.environ)",
        "import torch.distributed as dist",
        "imported = has_joined_group(os.environ)",
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "dist.destroy_process_group()",
        "without_recorder = has_joined_group({'TORCH_FR_BUFFER_SIZE': '0'})",
        "print(before, imported, has_joined_group(os.environ), without_recorder)",
    ]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    enable_flight_recorders(attempt, env)
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "False", "True", "None"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_collectives_on_a_gpu_are_in_the_records_of_nccl(attempt: Attempt) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it at run time
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        dist.all_reduce(torch.ones(3, device="cuda"))
        torch.cuda.synchronize()
        write_records(attempt, 0)
    finally:
        dist.destroy_process_group()
    (call,) = calls_of((read_json(attempt.flight(0)) or {})["recorders"])
    assert (call.backend, call.group_text, call.operation) == ("nccl", "the default group", "all_reduce [3]")


def test_recorders_are_enabled_unless_the_user_configured_them(attempt: Attempt) -> None:
    env: dict[str, str] = {}
    enable_flight_recorders(attempt, env)
    prefix = str(attempt.path / "flight-rank-")
    assert env == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": prefix}
    for name, value in (("TORCH_FR_BUFFER_SIZE", "0"), ("TORCH_NCCL_TRACE_BUFFER_SIZE", "9")):
        enable_flight_recorders(attempt, env := {name: value})
        assert env == {name: value, "TORCH_FR_DUMP_TEMP_FILE": prefix}
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        enable_flight_recorders(attempt, env := {name: "/tmp/mine"})
        assert env == {name: "/tmp/mine", "TORCH_FR_BUFFER_SIZE": "2000"}


# --- A loss that has become NaN or infinite: reported once, or the end of the run.


def test_loss_that_stays_nan_is_reported_once_or_ends_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "hpcdist")
    watch = LossWatch()
    nan: Any = np.float32("nan")
    watch.note({"train/loss": math.nan, "accuracy": math.nan}, 1)
    watch.note({"train/loss": math.inf, "accuracy": math.nan}, 2)
    watch.note({"train/loss": 0.5, "accuracy": math.nan}, 3)  # as after a step that a gradient scaler skips
    for step in range(4, 9):
        assert watch.finding == ("" if step < 7 else "train/loss is nan since step 4 (3 logged steps in a row)")
        watch.note({"train/loss": nan}, step)
    assert caplog.messages == [watch.finding]
    watch = LossWatch(2)
    watch.note({"Loss": math.inf}, 10)
    with pytest.raises(
        TrainerError, match=r"^Loss is inf since step 10 \(2 logged.*ends the run \(stop\.nan_losses=2\): "
    ):
        watch.note({"Loss": math.inf}, 20)


def test_values_of_one_step_count_once() -> None:
    watch = LossWatch(2)
    for _ in range(5):
        watch.note({"loss": math.nan}, 3)
        watch.note({"loss": math.nan}, 2)
    with pytest.raises(TrainerError, match=r"^loss is nan since step 3 \(2 logged steps in a row\)"):
        watch.note({"loss": math.nan}, 4)


@pytest.mark.parametrize("name", ["best_val_loss", "val/loss/best", "bestLoss", "min_loss", "loss_MAX", "lowest-loss"])
def test_best_loss_so_far_may_be_infinite(name: str) -> None:
    watch = LossWatch(1)
    watch.note({name: math.inf}, 1)
    assert watch.finding == ""
    with pytest.raises(TrainerError, match=r"^val_loss is inf since step 2"):
        watch.note({name: math.inf, "val_loss": math.inf}, 2)


# --- Step timing with a simulated clock: data time, compute time, and time that is not counted.


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
    actions: dict[str, Callable[..., object]] = {
        "forward": trainer.forward,
        "backward": trainer.backward,
        "buffers": trainer.timer.buffers_exchanged,
        "skip": trainer.timer.skip,
        "wait": trainer.wait,
        "sync": lambda value: setattr(trainer.model, "require_backward_grad_sync", value),
    }
    for name, *arguments in calls:
        actions[name](*arguments)
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


def test_forward_pass_without_gradients_is_not_compute_time(
    trainer: TimedTrainer,
) -> None:
    with torch.no_grad():
        trainer.forward(500)
        trainer.forward(10)
    trainer.step(data=1, compute=2)
    assert trainer.sums == (1, 13, 1, 11, 2), "the time before the last forward pass is not counted"
    with trainer.timer.waiting():
        trainer.now += 40
    trainer.now += 1
    trainer.forward(2)
    with trainer.timer.waiting():  # has no effect during the passes
        trainer.backward(1)
    trainer.timer.step_done()
    assert trainer.sums == (2, 57, 2, 12, 5)


def test_step_without_the_expected_last_gradient_is_not_counted(trainer: TimedTrainer) -> None:
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


class FakeEvent:
    """A CUDA event; the host is at `host_at`, and the device has passed all events up to `device_at`."""

    host_at = 0.0
    device_at = -1.0
    num_created = 0

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert (device.type, enable_timing) == ("cuda", True)
        FakeEvent.num_created += 1

    def record(self) -> None:
        self.at = FakeEvent.host_at

    def query(self) -> bool:
        return self.at <= FakeEvent.device_at

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.query() and later.query(), "CUDA raises an error for an event that has not completed"  # noqa: PT018
        return 1e3 * (later.at - self.at)


def test_gpu_steps_are_counted_after_completion_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", FakeEvent)
    trainer = TimedTrainer(EventClock(torch.device("cuda")))
    trainer.timer.step_done()

    def step() -> None:
        for call in (trainer.forward, trainer.timer.on_gradient, trainer.timer.step_done):
            FakeEvent.host_at += 1
            call()

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


def test_first_rank_with_steps_of_each_node_logs_at_an_interval(
    trainer: TimedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "n2")
    times = [NodeTimes(trainer.timer, topology_of(rank, 6, 2), log_every=2) for rank in range(6)]
    for one in times:
        one.leave_to([1, 2, 3, 5])  # 0 and 4 are parameter servers
    trainer.step(data=1, compute=4, rest=5)
    assert [one.due(1) for one in times] == [{}] * 6
    trainer.step(data=3, compute=6, rest=7)
    expected = {"time/n2/step_s": 13, "time/n2/data_s": 2, "time/n2/compute_s": 5}
    assert {rank: found for rank, one in enumerate(times) if (found := one.due(2))} == {1: expected, 3: expected}
    trainer.step(data=1, compute=1)
    trainer.step(data=1, compute=1)
    since = {"time/n2/step_s": 2, "time/n2/data_s": 1, "time/n2/compute_s": 1}
    assert times[1].due(4) == since, "means since the last point"
    assert times[1].due(6) == {}, "no step since the last point"
    one_node = NodeTimes(trainer.timer, topology_of(0, 2, 1), 1).due(1)
    assert set(one_node) == {"time/step_s", "time/data_s", "time/compute_s"}
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    of_many, logged = NodeTimes(trainer.timer, topology_of(0, 1024, 512), 1), 0
    for step in range(1000):
        trainer.step(data=1, compute=1)
        logged += bool(of_many.due(step))
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
    with pytest.raises(ValueError, match="full"), rank.account.phase("checkpoint"):
        raise ValueError("full")
    rank.wait(1)
    assert rank.seconds["compute"] == 1


def test_waiting_for_other_ranks_is_communication_in_steps_only(rank: TimedTrainer) -> None:
    with rank.timer.waiting():
        rank.wait(5)
    rank.train()
    with rank.timer.waiting():
        rank.wait(6)
    assert rank.seconds == {"start": 6, "compile": 15, "communication": 6}
    rank.wait(10)
    rank.timer.step_done(2, agreement_s=4)  # on a stop
    assert rank.seconds == {"start": 6, "compile": 15, "communication": 10, "compute": 6}
    rank.account.reached = 10
    rank.train()
    with rank.timer.waiting():
        rank.wait(7)
    assert rank.seconds["redone"] == 7


def test_rank_without_steps_is_idle_except_for_its_work(rank: TimedTrainer) -> None:
    rank.wait(5)
    rank.account.enter("idle")
    rank.wait(10)
    rank.timer.add(compute_s=4)
    rank.timer.add(compute_s=100)
    assert rank.seconds == {"start": 5, "compute": 10}, "never more work than time"
    rank.wait(2)
    assert rank.seconds == {"start": 5, "compute": 10, "idle": 2}
    assert rank.timer.totals.means_since(Totals()) == {"data_s": 0, "compute_s": 52}
    assert rank.timer.report() == {"steps": 0, "step_s": 0, "own_steps": 2, "data_s": 0, "compute_s": 104}


def test_end_of_a_rank_is_finish_with_all_that_it_waits_for(rank: TimedTrainer) -> None:
    rank.train()
    with rank.account.phase("finish"):  # the export of the model
        rank.wait(3)
    rank.account.enter("finish")
    with rank.account.phase("checkpoint"), rank.timer.waiting():
        rank.wait(4)
    assert rank.seconds == {"start": 1, "compile": 15, "finish": 7}
    assert [cause for cause, *_ in rank.account.phases] == ["start", "compile", "finish"]


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
