"""Selection of points: each (key, step) once, with repeated, shared and late steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcdist.errors import TrackingError
from hpcdist.tracking import journal as journal_reader
from hpcdist.tracking import points as journal_tail
from hpcdist.tracking.points import JournalTail, Point, ShippingState


def write(folder: Path, attempt: int, steps: list[int], *, rank: int = 0, key: str = "loss", time_ms: int = 0) -> None:
    with open(folder / f"attempt-{attempt:03d}.rank-{rank:05d}.jsonl", "a") as file:
        for step in steps:
            file.write(json.dumps({"t": time_ms + step, "s": step, "m": {key: attempt * 1000 + step}}) + "\n")


def drain(folder: Path, progress: ShippingState, newest: int = 99, *, over: bool = False) -> list[Point]:
    """Return the points that a shipper sends now."""
    tail = JournalTail(folder, progress)
    points: list[Point] = []
    while chunks := tail.next_chunks(newest, over=over):
        points += tail.new_points(chunks)
        progress.offsets |= {name: chunk.offset for name, chunk in chunks.items()}
        progress.intent = {}
    return points


def values(points: list[Point], key: str = "loss") -> list[float]:
    return [point.value for point in points if point.key == key]


def test_steps_repeated_by_a_later_attempt_keep_their_first_values(tmp_path: Path) -> None:
    progress = ShippingState()
    write(tmp_path, 1, [10, 20, 30, 40])
    write(tmp_path, 2, [30, 40, 50])
    write(tmp_path, 3, [50, 60])
    points = drain(tmp_path, progress)
    assert values(points) == [1010, 1020, 1030, 1040, 2050, 3060]
    assert progress.num_repeated == 3
    assert drain(tmp_path, progress) == []


def test_steps_are_tracked_per_key(tmp_path: Path) -> None:
    write(tmp_path, 1, [10, 20, 30])
    write(tmp_path, 2, [15], key="eval/accuracy")
    assert values(drain(tmp_path, ShippingState()), "eval/accuracy") == [2015]


def test_attempt_is_read_after_all_earlier_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_reader, "CHUNK_BYTES", 120)
    write(tmp_path, 1, list(range(20)))
    write(tmp_path, 1, list(range(20)), rank=1, key="other")
    write(tmp_path, 2, [18, 19, 20])
    points = drain(tmp_path, ShippingState())
    assert values(points) == [*range(1000, 1020), 2020]
    assert values(points, "other") == list(range(1000, 1020))


def test_late_lines_count_below_the_first_step_of_the_next_attempt(tmp_path: Path) -> None:
    progress = ShippingState()
    write(tmp_path, 1, [10, 20])
    write(tmp_path, 2, [50, 60])
    assert values(drain(tmp_path, progress)) == [1010, 1020, 2050, 2060]
    # These lines arrive late; from step 50 on the second attempt has them.
    write(tmp_path, 1, [30, 40, 50, 70])
    assert values(drain(tmp_path, progress)) == [1030, 1040]
    write(tmp_path, 2, [70])
    assert values(drain(tmp_path, progress)) == [2070]


def test_late_lines_count_before_the_next_attempt_has_sent_steps(tmp_path: Path) -> None:
    progress = ShippingState()
    write(tmp_path, 1, [10])
    write(tmp_path, 2, [10])
    assert values(drain(tmp_path, progress)) == [1010]
    write(tmp_path, 1, [20])
    write(tmp_path, 2, [20, 30])
    assert values(drain(tmp_path, progress)) == [1010 + 10, 2030]


def test_steps_of_one_attempt_are_sent_once_in_any_order(tmp_path: Path) -> None:
    progress = ShippingState()
    write(tmp_path, 1, [5, 9, 7, 7, 9, 5, 3, 8])
    assert values(drain(tmp_path, progress)) == [1005, 1009, 1007, 1003, 1008]
    # A new process reads the sent steps from the journal.
    write(tmp_path, 1, [7, 6, 8])
    reloaded = ShippingState(offsets=dict(progress.offsets), steps=progress.steps, marks=progress.marks)
    assert values(drain(tmp_path, reloaded)) == [1006]


def test_ranks_with_the_same_key_share_its_steps(tmp_path: Path) -> None:
    write(tmp_path, 1, [1, 3, 5])
    write(tmp_path, 1, [1, 2, 3, 4, 5, 6], rank=1)
    assert values(drain(tmp_path, ShippingState())) == [1001, 1003, 1005, 1002, 1004, 1006]


def test_each_attempt_has_its_own_mark_even_at_the_same_step(tmp_path: Path) -> None:
    progress = ShippingState()
    write(tmp_path, 1, [7], key="system/cpu")
    assert values(drain(tmp_path, progress), "attempt") == []
    write(tmp_path, 1, [10, 20])
    write(tmp_path, 2, [15, 20])
    write(tmp_path, 3, [15, 30])
    marks = [(point.step, point.value) for point in drain(tmp_path, progress) if point.key == "attempt"]
    assert marks == [(10, 1), (15, 2), (16, 3)]
    write(tmp_path, 2, [40])
    assert values(drain(tmp_path, progress), "attempt") == []


def test_incomplete_line_is_final_after_the_next_attempt_starts(tmp_path: Path) -> None:
    write(tmp_path, 1, [10])
    with open(tmp_path / "attempt-001.rank-00000.jsonl", "a") as file:
        file.write('{"t":1,"s":20,"m":{"lo')
    progress = ShippingState()
    drain(tmp_path, progress, newest=1)
    assert progress.num_broken == 0
    write(tmp_path, 2, [20])
    assert values(drain(tmp_path, progress, newest=2)) == [2020]
    assert progress.num_broken == 1


def test_saved_intent_gives_the_same_points(tmp_path: Path) -> None:
    write(tmp_path, 2, [10, 20])
    progress = ShippingState()
    first = JournalTail(tmp_path, progress)
    chunks = first.next_chunks(2, over=False)
    saved = ShippingState(intent={name: chunk.offset for name, chunk in chunks.items()})
    # Late lines of an earlier attempt must wait.
    write(tmp_path, 1, [10, 20])
    write(tmp_path, 2, [30])
    second = JournalTail(tmp_path, saved)
    assert second.new_points(second.next_chunks(2, over=False)) == first.new_points(chunks)


def test_missing_or_damaged_shipping_state_loads_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "shipped.json"
    assert ShippingState.load(path) == ShippingState()
    progress = ShippingState(run_id="r", offsets={"a": 3}, steps={"loss": {"1": [0, 9]}}, num_points=4)
    progress.save(path)
    assert ShippingState.load(path) == progress
    for content in ('{"offsets": []}', '{"unknown": 1}', "[]", '{"run_id"'):
        path.write_text(content)
        assert ShippingState.load(path) == ShippingState()
    with pytest.raises(TrackingError, match=r"shipped\.json cannot be written .No such file"):
        progress.save(tmp_path / "missing" / "shipped.json")


def test_earlier_attempts_are_polled_again_at_the_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, [10])
    write(tmp_path, 2, [20])
    progress = ShippingState()
    live = JournalTail(tmp_path, progress)
    while chunks := live.next_chunks(2, over=False):
        live.new_points(chunks)
        progress.offsets |= {name: chunk.offset for name, chunk in chunks.items()}
    before = live.num_polls
    assert live.next_chunks(2, over=False) == {}
    assert live.num_polls - before == 2, "a network file system may show lines late"
    monkeypatch.setattr(journal_tail, "LATE_S", -1.0)
    assert live.next_chunks(2, over=False) == {}
    assert live.num_polls - before == 3
    write(tmp_path, 1, [11])
    assert live.next_chunks(2, over=False) == {}
    assert list(live.next_chunks(2, over=True)) == ["attempt-001.rank-00000.jsonl"]
