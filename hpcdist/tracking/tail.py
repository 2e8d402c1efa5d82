"""Reading the journal of all ranks and attempts in order, each point once."""

from __future__ import annotations

import functools
import itertools
import math
import re
import time
from pathlib import Path
from typing import NamedTuple

from hpcdist.file_retry import retry
from hpcdist.tracking.journal import Chunk, Record, journal_files, read_chunk, read_range
from hpcdist.tracking.progress import Progress

_NOT_IN_NAMES = re.compile(r"[^\w./: -]")
MAX_NAME = 250
#: A network file system shows another node's last lines with this delay at most.
LATE_S = 120.0


class Point(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    time_ms: int
    step: int


@functools.lru_cache(maxsize=10_000)
def clean_name(name: str) -> str:
    """`name` as MLflow takes it for a metric or parameter: `loss[0]` becomes `loss_0_`, `a//b` becomes `a/b`."""
    parts = [part for part in _NOT_IN_NAMES.sub("_", name).split("/") if part.strip(".")]
    return "/".join(parts)[:MAX_NAME].rstrip("/") or "_"


class Tail:
    """The end of a run's journal that MLflow does not have yet. Memory grows with the number of keys only."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder = folder
        self._progress = progress
        self._seen: dict[tuple[int, str], set[int]] = {}
        #: When an attempt that has ended was first found to hold nothing more.
        self._exhausted: dict[int, float] = {}
        #: How often a journal file was asked for news.
        self.num_looks = 0

    def next_chunks(self, newest_attempt: int, *, over: bool) -> dict[str, Chunk]:
        """What to ship next, by file: nothing of an attempt as long as an earlier one has more.

        Args:
            newest_attempt: the last one that was started; torn last lines of those before it are final.
            over: whether the newest has ended too.
        """
        offsets = self._progress.offsets
        if self._progress.intent:
            return {
                name: read_range(self._folder / name, offsets.get(name, 0), end)
                for name, end in self._progress.intent.items()
            }
        for attempt, files in itertools.groupby(journal_files(self._folder), key=lambda file: file.attempt):
            if not over and time.monotonic() > self._exhausted.get(attempt, math.inf) + LATE_S:
                continue
            chunks = {}
            for _, _, path in files:
                self.num_looks += 1
                offset = offsets.get(path.name, 0)
                if retry(path.stat, path).st_size > offset:
                    chunk = read_chunk(path, offset, final=over or attempt < newest_attempt)
                    if chunk.offset > offset:
                        chunks[path.name] = chunk
            if chunks:
                return chunks
            if attempt < newest_attempt:
                self._exhausted.setdefault(attempt, time.monotonic())
        return {}

    def new_points(self, chunks: dict[str, Chunk]) -> list[Point]:
        """The points of `chunks` that MLflow has not, and each attempt's point of the metric `attempt`.

        They count as shipped in `progress` from then on: throw that away when they could not be sent.
        """
        points: list[Point] = []
        for name, chunk in chunks.items():
            attempt = int(name.split(".")[0].removeprefix("attempt-"))
            for record in chunk.records:
                self._add(attempt, record, points)
            self._progress.num_broken += chunk.broken
        return points

    def _add(self, attempt: int, record: Record, points: list[Point]) -> None:
        time_ms, step, metrics = record
        for raw, value in metrics.items():
            key = clean_name(raw)
            if self._progress.admit(attempt, key, step, lambda key=key: self._was_seen(attempt, key, step, points)):  # type: ignore[misc]
                points.append(Point(key, value, time_ms, step))
                if (seen := self._seen.get((attempt, key))) is not None:
                    seen.add(step)
            else:
                self._progress.num_repeated += 1
        # System metrics count seconds, not steps.
        if any(not key.startswith("system/") for key in metrics):
            mark = self._progress.mark(attempt, time_ms, step)
            if mark is not None:
                points.append(Point("attempt", attempt, time_ms, mark))

    def _was_seen(self, attempt: int, key: str, step: int, points: list[Point]) -> bool:
        """Look a step up in what was shipped of this attempt; the journal itself is the memory."""
        seen = self._seen.get((attempt, key))
        if seen is None:
            seen = {point.step for point in points if point.key == key}
            for file in journal_files(self._folder):
                if file.attempt == attempt:
                    seen |= self._shipped_steps(file.path, key)
            self._seen[attempt, key] = seen
        return step in seen

    def _shipped_steps(self, path: Path, key: str) -> set[int]:
        end = self._progress.offsets.get(path.name, 0)
        steps: set[int] = set()
        offset = 0
        while offset < end:
            chunk = read_chunk(path, offset)
            if chunk.offset == offset:
                break
            if chunk.offset > end:
                chunk = read_range(path, offset, end)
            steps |= {record.step for record in chunk.records if any(clean_name(raw) == key for raw in record.metrics)}
            offset = chunk.offset
        return steps
