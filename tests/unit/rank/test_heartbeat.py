"""The heartbeat of a rank: set by the trainer, written by a thread, and only after a new beat."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcdist.host.files import read_json
from hpcdist.rank import telemetry
from hpcdist.rank.telemetry import Heartbeat
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


def test_heartbeat_is_written_at_start(attempt: Attempt, writes: list[int]) -> None:
    beat = without_thread(attempt)
    assert writes == [0]
    assert read(attempt)["time"] > 0
    beat.close()


def test_intervals_without_a_beat_write_nothing(attempt: Attempt, writes: list[int]) -> None:
    beat = without_thread(attempt)
    run_intervals(beat, step(beat, 1), nothing, nothing, step(beat, 2), nothing)
    assert writes == [0, 1, 2]


def test_heartbeat_says_whether_further_ones_are_due(attempt: Attempt) -> None:
    """`should_stop` and `alive` promise them; `log` and `save` do not."""
    beat = without_thread(attempt)
    run_intervals(beat, beat.beat)
    assert read(attempt)["regular"] is False
    run_intervals(beat, lambda: beat.beat(regular=True))
    run_intervals(beat, beat.beat)
    assert read(attempt)["regular"] is True


def test_late_write_has_the_time_of_the_last_beat(attempt: Attempt) -> None:
    beat = without_thread(attempt)
    step(beat, 7)()
    noted = beat._noted
    run_intervals(beat, nothing)
    assert (read(attempt)["step"], read(attempt)["time"]) == (7, noted)


def test_step_that_is_logged_after_the_beat_is_written_with_its_time(attempt: Attempt, writes: list[int]) -> None:
    beat = without_thread(attempt)
    step(beat, 7)()
    noted = beat._noted
    run_intervals(beat, nothing, lambda: beat.note_logged({"loss": 0.5}, 8), nothing)
    assert writes == [0, 7, 8]
    assert (read(attempt)["step"], read(attempt)["time"]) == (8, noted)


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


def test_number_of_metrics_and_length_of_names_are_limited(attempt: Attempt) -> None:
    numpy = pytest.importorskip("numpy")
    beat = Heartbeat(attempt, 0, 1, 60.0)
    beat.note_metrics({"loss": numpy.float32(0.5), "n" * 300_000: 1.0})
    beat.note_metrics({f"key/{number}": float(number) for number in range(5000)})
    beat.note_logged({"loss": numpy.float64(0.25), "late": 1.0}, 8)
    beat.close()
    found = read_json(attempt.beat(0))
    assert found is not None
    assert found["metrics"]["loss"] == 0.25
    assert len(found["metrics"]) == telemetry.MAX_METRICS
    assert max(map(len, found["metrics"])) == telemetry.MAX_NAME
    assert "late" not in found["metrics"]
    assert found["metric_steps"] == {"loss": 8}
