"""Each (key, step) is sent once, with its first value: random journals, crashes and names against a simple model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hpcdist.tracking import journal as journal_reader
from hpcdist.tracking import points as journal_tail
from hpcdist.tracking.journal import clean_metric_name
from hpcdist.tracking.points import JournalTail, Point, ShippingState

#: Names that become equal if invalid characters are replaced or the end is cut.
KEYS = ["loss", "acc%", "acc#", "acc_", "k" * 300 + "a", "k" * 300 + "b", "attempt"]


class ExpectedContent:
    """The expected content of MLflow: the rule of `ShippingState.admit` with sets of all steps."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], float] = {}
        self._steps: dict[str, dict[int, set[int]]] = {key: {} for key in KEYS}

    def add(self, attempt: int, step: int, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            shipped = self._steps[key]
            before = (other >= step for number, own in shipped.items() if number < attempt for other in own)
            after = (other <= step for number, own in shipped.items() if number > attempt for other in own)
            if any(before) or any(after) or step in shipped.get(attempt, set()):
                continue
            shipped.setdefault(attempt, set()).add(step)
            self.values[clean_metric_name(key), step] = value


class Simulation:
    """A journal folder, a shipper that can be killed at any point, and an MLflow that stores equal points once."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.saved = folder / "shipped.json"
        self.expected = ExpectedContent()
        self.received: set[Point] = set()
        self._offsets: dict[str, int] = {}
        self._last: dict[tuple[int, int], int] = {}
        self._restart()

    def _restart(self) -> None:
        self.progress = ShippingState.load(self.saved)
        self.tail = JournalTail(self.folder, self.progress)

    def write(self, attempt: int) -> None:
        """Write records of a rank with increasing, repeated and late steps."""
        rank = self.random.randrange(2)
        step = self._last.get((attempt, rank), self.random.randrange(40))
        with open(self.folder / f"attempt-{attempt:03d}.rank-{rank:05d}.jsonl", "a") as file:
            for _ in range(self.random.randrange(1, 12)):
                step = max(0, step + self.random.choice((1, 1, 1, 5, 0, -3, -20)))
                keys = self.random.sample(KEYS, self.random.randrange(1, len(KEYS)))
                metrics = {key: self.random.random() for key in keys}
                file.write(json.dumps({"t": step, "s": step, "m": metrics}) + "\n")
        self._last[attempt, rank] = step

    def ship(self, newest: int, *, over: bool, may_be_killed: bool) -> None:
        """Send one chunk as `Delivery.ship_records` does, until the process is killed."""
        killed_after = self.random.randrange(1, 12) if may_be_killed else 99
        chunks = self.tail.next_chunks(newest, over=over)
        if not chunks:
            return
        self.progress.intent = {name: chunk.offset for name, chunk in chunks.items()}
        if killed_after == 1:
            self._restart()
            return
        self.progress.save(self.saved)
        if self._offsets != self.progress.intent:  # not yet in the model
            self._offsets = dict(self.progress.intent)
            for name, chunk in chunks.items():
                for record in chunk.records:
                    self.expected.add(int(name[8:11]), record.step, record.metrics)
        points = self.tail.new_points(chunks)
        sent = points[: self.random.randrange(len(points) + 1)] if killed_after == 2 else points
        self.received |= set(sent)
        if killed_after <= 3:
            self._restart()
            return
        self.progress.offsets |= self.progress.intent
        self.progress.intent = {}
        self.progress.save(self.saved)
        self._offsets = {}
        if killed_after == 4:
            self._restart()


@pytest.mark.parametrize("seed", range(40))
def test_each_step_of_a_key_is_sent_once(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_reader, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(journal_tail, "BATCH_BYTES", 3000)
    simulation = Simulation(tmp_path, seed)
    attempt = 1
    for _ in range(80):
        attempt += simulation.random.random() < 0.04
        # Sometimes lines of an earlier attempt on another node arrive late.
        simulation.write(attempt if simulation.random.random() < 0.8 else simulation.random.randrange(1, attempt + 1))
        if simulation.random.random() < 0.7:
            simulation.ship(attempt, over=False, may_be_killed=True)
    while simulation.tail.next_chunks(attempt, over=True):
        simulation.ship(attempt, over=True, may_be_killed=True)
    metrics = [point for point in simulation.received if point.key != "attempt"]
    assert {(point.key, point.step): point.value for point in metrics} == simulation.expected.values
    assert len(metrics) == len(simulation.expected.values)
    assert len({point.step for point in simulation.received if point.key == "attempt"}) <= attempt


def test_late_record_of_many_keys_reads_the_journal_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "attempt-001.rank-00000.jsonl"
    with open(path, "w") as file:
        for step in [*range(0, 4000, 10), *([777] * 2), 778]:
            file.write(json.dumps({"t": 0, "s": step, "m": {f"key/{number}": 0.5 for number in range(30)}}) + "\n")
    num_read = 0
    read = journal_reader._read

    def counted(path: Path, offset: int, num_bytes: int) -> bytes:
        nonlocal num_read
        data = read(path, offset, num_bytes)
        num_read += len(data)
        return data

    monkeypatch.setattr(journal_reader, "_read", counted)
    progress = ShippingState()
    found = JournalTail(tmp_path, progress)
    while chunks := found.next_chunks(1, over=False):
        found.new_points(chunks)
        progress.offsets |= {name: chunk.offset for name, chunk in chunks.items()}
    assert progress.num_repeated == 30
    assert num_read < 2.5 * path.stat().st_size


def test_data_read_at_once_is_bounded_for_any_number_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_reader, "CHUNK_BYTES", 500)
    monkeypatch.setattr(journal_tail, "BATCH_BYTES", 1000)
    for rank in range(20):
        lines = [json.dumps({"t": 0, "s": step, "m": {f"rank{rank}": 0.5}}) + "\n" for step in range(30)]
        (tmp_path / f"attempt-001.rank-{rank:05d}.jsonl").write_text("".join(lines))
    progress = ShippingState()
    found = JournalTail(tmp_path, progress)
    num_points = 0
    while chunks := found.next_chunks(1, over=False):
        assert len(chunks) <= 4
        num_points += len(found.new_points(chunks))
        progress.offsets |= {name: chunk.offset for name, chunk in chunks.items()}
    assert num_points == 20 * 30 + 1
