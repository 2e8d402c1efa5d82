"""A rank's sign of life: noted by the trainer, written by a thread, and silent when there is nothing to say."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcdist.files.atomic import read_json
from hpcdist.rank.telemetry import heartbeat
from hpcdist.rank.telemetry.heartbeat import Heartbeat
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir


class Turns:
    """Stands in for the thread's event: each wait is a turn, before which something may happen."""

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
        """The real thread has ended before."""


@pytest.fixture
def attempt(runs_dir: Path) -> Attempt:
    return RunDir.create(runs_dir / "exp" / "run").new_attempt()


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The step in every heartbeat that was written."""
    seen: list[int] = []
    real = os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        seen.append(json.loads(data)["step"])
        return real(descriptor, data, offset)

    monkeypatch.setattr(heartbeat.os, "pwrite", pwrite)
    return seen


def stopped(attempt: Attempt, rank: int = 0, num_ranks: int = 2, hang_timeout_s: float = 1800.0) -> Heartbeat:
    """A heartbeat whose thread has ended, so that a test can take its turns."""
    beat = Heartbeat(attempt, rank, num_ranks, hang_timeout_s)
    beat._ended.set()
    beat._thread.join()
    return beat


def take_turns(beat: Heartbeat, *before: Callable[[], object]) -> list[float]:
    turns = Turns(*before)
    beat._ended = turns  # type: ignore[assignment]
    beat._keep_writing()
    return turns.waits


def step(beat: Heartbeat, number: int) -> Callable[[], None]:
    def note() -> None:
        beat.step = number
        beat.beat()

    return note


def nothing() -> None:
    """The trainer hangs."""


def read(attempt: Attempt, rank: int = 0) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(attempt.beat(rank).read_text())
    return value


def test_a_rank_that_has_just_started_is_seen_at_once(attempt: Attempt, writes: list[int]) -> None:
    beat = stopped(attempt)
    assert writes == [0]
    assert read(attempt)["time"] > 0
    beat.close()


def test_turns_without_a_sign_of_life_write_nothing(attempt: Attempt, writes: list[int]) -> None:
    beat = stopped(attempt)
    take_turns(beat, step(beat, 1), nothing, nothing, step(beat, 2), nothing)
    assert writes == [0, 1, 2]


def test_what_is_written_late_tells_when_the_rank_was_last_alive(attempt: Attempt) -> None:
    beat = stopped(attempt)
    step(beat, 7)()
    alive = beat._noted
    take_turns(beat, nothing)
    assert (read(attempt)["step"], read(attempt)["time"]) == (7, alive)


def test_the_last_word_is_written_at_the_end(attempt: Attempt) -> None:
    beat = Heartbeat(attempt, 1, 4096, 1800.0)
    beat.step, beat.total_steps, beat.metrics = 9, 10, {"loss": 0.5}
    beat.close()
    value = read(attempt, 1)
    assert (value["step"], value["total_steps"], value["metrics"]) == (9, 10, {"loss": 0.5})
    assert not beat._thread.is_alive()


def test_the_thread_writes_by_itself(attempt: Attempt, writes: list[int]) -> None:
    beat = Heartbeat(attempt, 0, 1, 0.04)
    step(beat, 3)()
    while 3 not in writes:  # the test's own time limit ends a thread that does nothing
        beat._ended.wait(0.005)
    beat.close()


def test_ranks_that_start_together_take_turns(attempt: Attempt) -> None:
    beats = [stopped(attempt, rank, 4096) for rank in (1, 2047, 4095)]
    first = [take_turns(beat, nothing) for beat in beats]
    assert [round(waits[0]) for waits in first] == [0, 32, 64]
    assert {waits[1] for waits in first} == {64.0}


def test_a_disk_that_takes_nothing_is_told_once_and_tried_again(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beat = stopped(attempt)
    real = os.pwrite

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    def refuse() -> None:
        monkeypatch.setattr(heartbeat.os, "pwrite", full)
        step(beat, 1)()

    def accept() -> None:
        monkeypatch.setattr(heartbeat.os, "pwrite", real)

    with caplog.at_level(logging.WARNING):
        take_turns(beat, refuse, nothing, accept)
    assert caplog.messages == [
        f"the heartbeat {attempt.beat(0)} cannot be written: No space left on device",
        f"the heartbeat {attempt.beat(0)} can be written again",
    ]
    assert read(attempt)["step"] == 1


def test_a_stale_handle_is_opened_anew_and_a_short_write_is_completed(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = stopped(attempt)
    real, opened = os.pwrite, []
    real_open = os.open

    def stale(*_: object) -> int:
        raise OSError(116, "Stale file handle")

    def short(descriptor: int, data: bytes, offset: int) -> int:
        return real(descriptor, data[:100], offset)

    def counting(*arguments: Any) -> int:
        opened.append(arguments[0])
        return real_open(*arguments)

    monkeypatch.setattr(heartbeat.os, "open", counting)
    monkeypatch.setattr(heartbeat.os, "pwrite", stale)
    step(beat, 1)()
    beat._write()
    monkeypatch.setattr(heartbeat.os, "pwrite", short)
    beat._write()
    assert opened == [attempt.beat(0)]
    assert read(attempt)["step"] == 1


def test_metrics_of_any_number_and_type_are_bounded_and_written(attempt: Attempt) -> None:
    numpy = pytest.importorskip("numpy")
    beat = Heartbeat(attempt, 0, 1, 60.0)
    beat.note_metrics({"loss": numpy.float32(0.5), "n" * 300_000: 1.0})
    beat.note_metrics({f"key/{number}": float(number) for number in range(5000)})
    beat.note_metrics({"loss": numpy.float64(0.25), "late": 1.0})
    beat.close()
    found = read_json(attempt.beat(0))
    assert found is not None
    assert found["metrics"]["loss"] == 0.25
    assert len(found["metrics"]) == heartbeat.MAX_METRICS
    assert max(map(len, found["metrics"])) == heartbeat.MAX_NAME
    assert "late" not in found["metrics"]
