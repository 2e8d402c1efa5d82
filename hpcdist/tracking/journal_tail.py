"""The records of all ranks and attempts that MLflow does not have yet, in order, each point once."""

import itertools
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from hpcdist.host.retry import retry
from hpcdist.run.mlflow_limits import clean_name
from hpcdist.tracking import journal
from hpcdist.tracking.metric_point import Point
from hpcdist.tracking.node_charts import NodeCharts
from hpcdist.tracking.sent_points import SentPoints, StepSet

#: Limit of the data that is read before it is sent, for any number of files.
BATCH_BYTES = 16 * journal.CHUNK_BYTES
#: Maximum delay with which a network file system shows lines of another node.
LATE_S = 120.0


@dataclass(kw_only=True)
class Counts:
    """Numbers of points and lines of an upload."""

    num_points: int = 0  #: sent
    num_broken: int = 0  #: lines of the journal that are not records
    num_refused: int = 0  #: points that MLflow rejected


class JournalTail:
    """The part of a run's journal that MLflow does not have yet.

    Memory grows with the number of keys, and with that of steps if they are out of order (`StepSet`).
    """

    def __init__(self, folder: Path, sent: SentPoints, nodes: NodeCharts | None = None) -> None:
        self._folder = folder
        # Of a script, reports read the newest attempt first: the earlier ones count before its steps.
        self._is_reversed = sent.newest_counts and nodes is None
        self._sent = sent
        self._nodes = nodes
        self.counts = Counts()
        #: Attempt → key → steps that were sent; only of attempts with steps that do not increase.
        self._seen: dict[int, dict[str, StepSet]] = {}
        #: Attempt that has ended → time at which its journal was first found to be read completely.
        self._exhausted: dict[int, float] = {}
        #: Number of times that a journal file was polled.
        self.num_polls = 0
        #: File → time in ms of its last record in `next_chunks`.
        self.times: dict[str, int] = {}
        #: Files of the attempt of the last chunks that may hold more records.
        self.behind: set[str] = set()

    def next_chunks(self, newest_attempt: int, *, over: bool) -> dict[str, journal.Chunk]:
        """Return by file the next chunks of the first attempt that has any, or again those of a saved intent.

        Incomplete last lines are final in attempts before the newest one, and if that is `over`.
        """
        offsets = self._sent.offsets
        if self._sent.is_sending:
            return {
                name: journal.read_range(self._folder / name, offsets.get(name, 0), end)
                for name, end in self._sent.intent.items()
            }
        found = journal.journal_files(self._folder)
        found.sort(key=lambda file: file.attempt, reverse=self._is_reversed)
        for attempt, files in itertools.groupby(found, key=lambda file: file.attempt):
            if not over and time.monotonic() > self._exhausted.get(attempt, math.inf) + LATE_S:
                continue
            chunks: dict[str, journal.Chunk] = {}
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
                    chunk = journal.read_chunk(path, offset, final=over or attempt < newest_attempt)
                    if chunk.offset > offset:
                        chunks[path.name] = chunk
                        num_bytes += chunk.offset - offset
                        if chunk.records:
                            self.times[path.name] = chunk.records[-1].time_ms
                if size - offset < journal.CHUNK_BYTES:
                    self.behind.discard(path.name)
            if chunks:
                return chunks
            if attempt < newest_attempt:
                self._exhausted.setdefault(attempt, time.monotonic())
        return {}

    def new_points(self, chunks: dict[str, journal.Chunk]) -> list[Point]:
        """Return the points of `chunks` that MLflow does not have, and record them as sent."""
        points: list[Point] = []
        of_ranks = {name: chunk for name, chunk in chunks.items() if not journal.is_of_reader(name)}
        if self._nodes is not None:
            for attempt, record in self._nodes.reduce(of_ranks, self._sent.closing):
                self._add(attempt, record, points, once=not self._sent.newest_counts)
        else:
            self._add_all(of_ranks, points, once=not self._sent.newest_counts)
        # Metrics of nodes are in the files of ranks only.
        self._add_all({name: chunk for name, chunk in chunks.items() if name not in of_ranks}, points, once=True)
        self.counts.num_broken += sum(chunk.broken for chunk in chunks.values())
        return points

    def _add_all(self, chunks: dict[str, journal.Chunk], points: list[Point], *, once: bool) -> None:
        for name, chunk in chunks.items():
            attempt = journal.attempt_of(name)
            for record in chunk.records:
                self._add(attempt, record, points, once=once)

    def _add(self, attempt: int, record: journal.Record, points: list[Point], *, once: bool) -> None:
        """Append the points of a record that MLflow does not have to `points`.

        Args:
            once: of several points of an attempt at one step, the first one counts. Otherwise all count, as in MLflow,
                which shows the last one.
        """
        time_ms, step, metrics = record
        for raw, value in metrics.items():
            key = clean_name(raw)

            def was_seen(key: str = key) -> bool:
                return self._was_seen(attempt, key, step, points)

            if self._sent.admit(attempt, key, step, once=once, was_seen=was_seen):
                points.append(Point(key, value, time_ms, step))
                seen = self._seen.get(attempt)
                if seen is not None:
                    seen[key].add(step)

    def _was_seen(self, attempt: int, key: str, step: int, points: list[Point]) -> bool:
        """Return whether a step was sent: the journal is read again once, when a step first does not increase."""
        seen = self._seen.get(attempt)
        if seen is None:
            seen = self._read_steps(attempt)
            for point in points:  # all of this attempt
                seen[point.key].add(point.step)
            self._seen[attempt] = seen
        return step in seen[key]

    def _read_steps(self, attempt: int) -> dict[str, StepSet]:
        """Return by metric the steps of an attempt in the parts of its journal that were sent."""
        seen: dict[str, StepSet] = defaultdict(StepSet)
        for file in journal.journal_files(self._folder):
            if file.attempt != attempt:
                continue
            offset = 0
            end = self._sent.offsets.get(file.path.name, 0)
            while offset < end:
                chunk = journal.read_chunk(file.path, offset)
                if chunk.offset == offset:
                    break
                if chunk.offset > end:
                    chunk = journal.read_range(file.path, offset, end)
                for record in chunk.records:
                    for raw in record.metrics:
                        seen[clean_name(raw)].add(record.step)
                offset = chunk.offset
        return seen
