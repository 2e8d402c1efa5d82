"""The records of all ranks and attempts that MLflow does not have yet, in order, each point once."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hpcdist.files.retry import retry
from hpcdist.tracking.journal.names import ATTEMPT_METRIC, clean_metric_name
from hpcdist.tracking.journal.node_charts import NodeCharts
from hpcdist.tracking.journal.reader import (
    CHUNK_BYTES,
    Chunk,
    Record,
    attempt_of,
    journal_files,
    read_chunk,
    read_range,
)
from hpcdist.tracking.journal.shipping_state import ShippingState
from hpcdist.tracking.journal.step_set import StepSet

#: Limit of the data that is read before it is sent, for any number of files.
BATCH_BYTES = 16 * CHUNK_BYTES
#: Maximum delay with which a network file system shows lines of another node.
LATE_S = 120.0


class Point(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    time_ms: int
    step: int


def _records(chunks: dict[str, Chunk]) -> Iterator[tuple[int, Record]]:
    for name, chunk in chunks.items():
        for record in chunk.records:
            yield attempt_of(name), record


class JournalTail:
    """The part of a run's journal that MLflow does not have yet.

    Memory grows with the number of keys, and by 8 bytes per step out of order (`StepSet`).
    """

    def __init__(self, folder: Path, progress: ShippingState, nodes: NodeCharts | None = None) -> None:
        self._folder = folder
        self._progress = progress
        self._nodes = nodes
        #: Attempt → key → steps that were sent; only of attempts with steps that do not increase.
        self._seen: dict[int, dict[str, StepSet]] = {}
        #: Pairs (original, cleaned) of metric names in the last `new_points`.
        self.names: set[tuple[str, str]] = set()
        #: Attempt that has ended → time at which its journal was first found to be read completely.
        self._exhausted: dict[int, float] = {}
        #: Number of times that a journal file was polled.
        self.num_polls = 0
        #: File → time in ms of its last record in `next_chunks`.
        self.times: dict[str, int] = {}
        #: Files of the attempt of the last chunks that may hold more records.
        self.behind: set[str] = set()

    def next_chunks(self, newest_attempt: int, *, over: bool) -> dict[str, Chunk]:
        """Return the next chunks to send, by file, all of one attempt; earlier attempts come first.

        Args:
            newest_attempt: The last attempt that was started; incomplete last lines of earlier ones are final.
            over: Whether the newest attempt has ended, too.
        """
        offsets = self._progress.offsets
        if self._progress.is_sending:
            return {
                name: read_range(self._folder / name, offsets.get(name, 0), end)
                for name, end in self._progress.intent.items()
            }
        for attempt, files in itertools.groupby(journal_files(self._folder), key=lambda file: file.attempt):
            if not over and time.monotonic() > self._exhausted.get(attempt, math.inf) + LATE_S:
                continue
            chunks: dict[str, Chunk] = {}
            num_bytes = 0
            # Node metrics are compared: all files are read up to about the same time.
            paths = [file.path for file in files]
            if self._nodes is not None:
                paths.sort(key=lambda path: self.times.get(path.name, 0))
            self.behind = {path.name for path in paths}
            for path in paths:
                if num_bytes >= BATCH_BYTES:
                    break
                self.num_polls += 1
                offset = offsets.get(path.name, 0)
                size = retry(path.stat, path).st_size
                if size > offset:
                    chunk = read_chunk(path, offset, final=over or attempt < newest_attempt)
                    if chunk.offset > offset:
                        chunks[path.name] = chunk
                        num_bytes += chunk.offset - offset
                        if chunk.records:
                            self.times[path.name] = chunk.records[-1].time_ms
                if size - offset < CHUNK_BYTES:
                    self.behind.discard(path.name)
            if chunks:
                return chunks
            if attempt < newest_attempt:
                self._exhausted.setdefault(attempt, time.monotonic())
        return {}

    def new_points(self, chunks: dict[str, Chunk]) -> list[Point]:
        """Return the points of `chunks` that MLflow does not have, and the points of the metric `attempt`.

        The state records them as sent: reload it if sending fails.
        """
        points: list[Point] = []
        self.names.clear()
        nodes, complete = self._nodes, self._progress.closing
        records = _records(chunks) if nodes is None else nodes.reduce(chunks, complete)
        for attempt, record in records:
            self._add(attempt, record, points)
        self._progress.num_broken += sum(chunk.broken for chunk in chunks.values())
        return points

    def _add(self, attempt: int, record: Record, points: list[Point]) -> None:
        time_ms, step, metrics = record
        for raw, value in metrics.items():
            key = clean_metric_name(raw)
            self.names.add((raw, key))
            if self._progress.admit(attempt, key, step, lambda key=key: self._was_seen(attempt, key, step, points)):  # type: ignore[misc]
                points.append(Point(key, value, time_ms, step))
                if (seen := self._seen.get(attempt)) is not None:
                    seen[key].add(step)
            else:
                self._progress.num_repeated += 1
        # System metrics count seconds, not steps.
        if any(not key.startswith("system/") for key in metrics):
            mark = self._progress.mark(attempt, time_ms, step)
            if mark is not None:
                points.append(Point(ATTEMPT_METRIC, attempt, time_ms, mark))

    def _was_seen(self, attempt: int, key: str, step: int, points: list[Point]) -> bool:
        """Return whether a step of this attempt was sent.

        The journal of the attempt is read again for that, once, when a step first does not increase.
        """
        seen = self._seen.get(attempt)
        if seen is None:
            seen = self._seen[attempt] = defaultdict(StepSet)
            for file in journal_files(self._folder):
                if file.attempt == attempt:
                    for record in self._shipped(file.path):
                        for raw in record.metrics:
                            seen[clean_metric_name(raw)].add(record.step)
            for point in points:  # all of this attempt
                seen[point.key].add(point.step)
        return step in seen[key]

    def _shipped(self, path: Path) -> Iterator[Record]:
        end = self._progress.offsets.get(path.name, 0)
        offset = 0
        while offset < end:
            chunk = read_chunk(path, offset)
            if chunk.offset == offset:
                break
            if chunk.offset > end:
                chunk = read_range(path, offset, end)
            yield from chunk.records
            offset = chunk.offset
