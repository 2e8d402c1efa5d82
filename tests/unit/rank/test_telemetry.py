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

from hpcdist.errors import TrainerError
from hpcdist.host.files import read_json
from hpcdist.rank import telemetry
from hpcdist.rank.telemetry import Heartbeat, LossWatch, enable_flight_recorders, write_records
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


def test_thread_writes_a_new_beat_and_close_the_last_values(attempt: Attempt, writes: list[int]) -> None:
    beat = Heartbeat(attempt, 0, 1, 0.04)
    step(beat, 3)()
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
