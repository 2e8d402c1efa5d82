"""The points of a run, each once: those that the shipper sends within its budgets, and all of them for reports."""

import functools
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hpcdist.config.schema import TrainerConfig
from hpcdist.config.written import read_section
from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.host.retry import retry
from hpcdist.review.facts import MAX_SERIES, Series, is_read
from hpcdist.run.folder import ENDED, RunDir
from hpcdist.tracking import journal


class Batches:
    """One batch after another: take the `next`, send it, and `commit` it.

    The state determines the points of a batch, so that a process that continues after a crash sends equal points. After
    an OSError, a TrackingError or a failed request, make a new object, which loads the saved state.
    """

    def __init__(self, run: RunDir, run_id: str = "") -> None:
        self._folder = run.journal
        self._sent = sent = SentPoints.load(run.journal, run_id)
        sent.newest_counts = _is_of_script(run)
        self._nodes = NodeCharts(sent.node_intervals, sent.steps)
        self.tail = JournalTail(run.journal, sent, self._nodes)
        self.counts = self.tail.counts
        self._budget = PointBudget(sent.series)
        self._num_points = 0  #: in the last batch

    @property
    def last_step(self) -> int:
        """The last step of the training in MLflow; system metrics count seconds."""
        by_attempt = [steps for key, steps in self._sent.steps.items() if not key.startswith("system/")]
        return max((own[1] for steps in by_attempt for own in steps.values()), default=0)

    def next(self, newest_attempt: int, *, over: bool) -> "list[Point] | None":
        """Return the points of the next batch, which may be an empty list; None if there is nothing to send.

        The content of a batch is saved before it is returned: after a crash the next process returns the same points.
        If the newest attempt is `over`, the last batch holds the points that wait for the end of a bucket or interval.
        """
        sent, tail = self._sent, self.tail
        repeated = sent.is_sending
        chunks = tail.next_chunks(newest_attempt, over=over)
        if not repeated:
            sent.closing = self._nodes.complete(chunks, tail.times, tail.behind, over=over)
            sent.intent = {name: chunk.offset for name, chunk in chunks.items()}
            sent.flushing = (
                not chunks
                and over
                and (bool(sent.closing) or any(series.get("held") for series in sent.series.values()))
            )
            if not sent.is_sending:
                return None
            sent.save(self._folder)  # before `new_points` changes it: after a crash the same points result
        points = self._budget.select(tail.new_points(chunks))
        if sent.flushing:
            points += self._budget.flush()
        self._num_points = len(points)
        return points

    def commit(self, num_refused: int = 0) -> None:
        """Record that MLflow has the last batch, without the points that it refuses for good."""
        self._sent.commit()
        self._sent.save(self._folder)
        self.counts.num_points += self._num_points - num_refused
        self.counts.num_refused += num_refused


@dataclass(kw_only=True)
class SentPoints(journal.Sent):
    """What has been taken from the journals, and the rule that takes each (key, step) once; the owner is `Batches`.

    "Sent" means that a point has passed this rule: the budget may still hold it or leave it out.
    """

    FILE = "sent-points.json"
    offsets: dict[str, int] = field(default_factory=dict)
    """Journal file → bytes whose points have been sent."""
    intent: dict[str, int] = field(default_factory=dict)
    """Offsets up to which records are being sent. After a crash the same records are sent again: MLflow's
    database stores points that agree in key, time, step and value once."""
    closing: dict[str, int] = field(default_factory=dict)
    """Attempt → last interval of node metrics that is being sent; part of the intent."""
    flushing: bool = False
    """Whether the points of open buckets (`series`) are being sent; part of the intent."""
    steps: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Metric → attempt → lowest and highest step sent."""
    series: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Metric → its number of points before thinning, and its open bucket (`PointBudget`)."""
    node_intervals: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Attempt → its intervals of node metrics (`NodeCharts`)."""
    marks: dict[str, int] = field(default_factory=dict)
    """Attempt → step of its point of the metric `attempt`."""
    newest_counts: bool = False
    """Of a script, which may start from scratch: each attempt sends its own point of a (key, step)."""

    @property
    def is_sending(self) -> bool:
        """Whether the last batch may have been sent, in part or completely."""
        return bool(self.intent or self.closing or self.flushing)

    def commit(self) -> None:
        self.offsets |= self.intent
        self.intent, self.closing, self.flushing = {}, {}, False

    def admit(self, attempt: int, key: str, step: int, was_seen: Callable[[], bool]) -> bool:
        """Return whether a point is new to MLflow, and record it as sent.

        A resumed attempt repeats steps that an earlier one logged after its last checkpoint: the first value is kept,
        except of a script, which need not load a checkpoint. MLflow's last value is then that of the later time.
        Records of an earlier attempt that arrive late, as on a network file system, count only below the first step
        of later attempts. `was_seen`, whether a step between this attempt's lowest and highest was sent, is expensive,
        and called only if the steps of a key do not increase.
        """
        shipped = self.steps.setdefault(key, {})
        for other, (low, high) in shipped.items():
            is_repeated = int(other) < attempt and step <= high and not self.newest_counts
            if is_repeated or (int(other) > attempt and step >= low):
                return False
        own = shipped.get(str(attempt))
        if own is None:
            shipped[str(attempt)] = [step, step]
        elif step > own[1]:
            own[1] = step
        elif step < own[0]:
            own[0] = step
        else:
            return step not in own and not was_seen()  # the lowest and the highest step were sent
        return True

    def mark(self, attempt: int, step: int) -> int | None:
        """Return the step for an attempt's point of the metric `attempt`; None if it has one, or has no part of it."""
        later = [mark for other, mark in self.marks.items() if int(other) > attempt]
        if str(attempt) in self.marks or (later and (step >= min(later) or not self.newest_counts)):
            return None
        earlier = () if self.newest_counts else self.marks.values()
        self.marks[str(attempt)] = step = max([step, *(mark + 1 for mark in earlier)])
        return step


def is_complete(run: RunDir) -> bool:
    """Return whether MLflow has everything of an ended run, without a request. Raises RunFolderError and OSError."""
    state, facts = run.read_state(), journal.SentFacts.load(run.journal)
    offsets = SentPoints.load(run.journal).offsets | facts.events
    return (
        state.status in ENDED
        and facts.complete == journal.state_key(state)
        and all(path.stat().st_size <= offsets.get(path.name, 0) for path in run.journal.glob("*.jsonl"))
    )


class StepSet:
    """Steps in any order: a bit each, in blocks of 1024 steps."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}

    def __contains__(self, step: int) -> bool:
        return bool(self._blocks.get(step >> 10, 0) >> (step & 1023) & 1)

    def add(self, step: int) -> None:
        self._blocks[step >> 10] = self._blocks.get(step >> 10, 0) | 1 << (step & 1023)


# The records of all ranks and attempts that MLflow does not have yet, in order, each point once.

#: Limit of the data that is read before it is sent, for any number of files.
BATCH_BYTES = 16 * journal.CHUNK_BYTES
#: Maximum delay with which a network file system shows lines of another node.
LATE_S = 120.0


class Point(NamedTuple):
    key: str
    value: float
    time_ms: int
    step: int


@dataclass(kw_only=True)
class Counts:
    num_points: int = 0  #: sent
    num_broken: int = 0  #: lines of the journal that are not records
    num_refused: int = 0  #: points that MLflow rejected


class JournalTail:
    """The part of a run's journal that MLflow does not have yet.

    Memory grows with the number of keys, and with that of steps if they are out of order (`StepSet`).
    """

    def __init__(self, folder: Path, sent: SentPoints, nodes: "NodeCharts | None" = None) -> None:
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
        records = ((journal.attempt_of(name), record) for name, chunk in chunks.items() for record in chunk.records)
        for attempt, record in records if self._nodes is None else self._nodes.reduce(chunks, self._sent.closing):
            self._add(attempt, record, points)
        self.counts.num_broken += sum(chunk.broken for chunk in chunks.values())
        return points

    def _add(self, attempt: int, record: journal.Record, points: list[Point]) -> None:
        time_ms, step, metrics = record
        for raw, value in metrics.items():
            key = journal.clean_metric_name(raw)
            if self._sent.admit(attempt, key, step, lambda key=key: self._was_seen(attempt, key, step, points)):  # type: ignore[misc]
                points.append(Point(key, value, time_ms, step))
                if (seen := self._seen.get(attempt)) is not None:
                    seen[key].add(step)
        # System metrics count seconds, not steps.
        has_steps = any(not key.startswith("system/") for key in metrics)
        if has_steps and (mark := self._sent.mark(attempt, step)) is not None:
            points.append(Point(journal.ATTEMPT_METRIC, attempt, time_ms, mark))

    def _was_seen(self, attempt: int, key: str, step: int, points: list[Point]) -> bool:
        """Return whether a step was sent: the journal is read again once, when a step first does not increase."""
        seen = self._seen.get(attempt)
        if seen is None:
            seen = self._seen[attempt] = defaultdict(StepSet)
            for file in journal.journal_files(self._folder):
                offset, end = 0, self._sent.offsets.get(file.path.name, 0)
                while file.attempt == attempt and offset < end:
                    chunk = journal.read_chunk(file.path, offset)
                    if chunk.offset == offset:
                        break
                    if chunk.offset > end:
                        chunk = journal.read_range(file.path, offset, end)
                    for record in chunk.records:
                        for raw in record.metrics:
                            seen[journal.clean_metric_name(raw)].add(record.step)
                    offset = chunk.offset
            for point in points:  # all of this attempt
                seen[point.key].add(point.step)
        return step in seen[key]


# The charts of a run on several nodes: MLflow gets minimum, mean and maximum over the nodes, not a chart of each node.
#
# The metrics of nodes, `system/<node>/…` and `time/<node>/…`, are divided into intervals of time. A complete interval
# becomes one point of each of `system/nodes_min/…`, `…/nodes_mean/…` and `…/nodes_max/…`, over all records in it.
# Records that arrive after their interval was sent are only in the journal.

INTERVAL_MS = 30_000
#: A node that has logged nothing for this time does not delay the intervals of the others.
SILENT_MS = 120_000
_STEP_TIMES = ("step_s", "data_s", "compute_s")


@functools.lru_cache(maxsize=100_000)
def without_node(key: str) -> str | None:
    """Return the name of a node's metric without the node: `system/cpu` for `system/n7/cpu`; None for others."""
    parts = key.split("/")
    if len(parts) != 3 or not all(parts):
        return None
    group, _, name = parts
    return f"{group}/{name}" if group == "system" or (group == "time" and name in _STEP_TIMES) else None


class NodeCharts:
    """Replaces the metrics of nodes by their statistics.

    Args:
        intervals: Attempt → number of its last interval that was sent, `sent`, and `open`: interval → metric →
            minimum, sum, count, maximum, time in ms, step.
        sent_steps: Metric → attempt → lowest and highest step in MLflow.
    """

    def __init__(self, intervals: dict[str, dict[str, Any]], sent_steps: Mapping[str, Mapping[str, list[int]]]) -> None:
        self._intervals = intervals
        self._sent_steps = sent_steps

    def complete(
        self, chunks: Mapping[str, journal.Chunk], times: Mapping[str, int], behind: set[str], *, over: bool
    ) -> dict[str, int]:
        """Return by attempt the last interval that is complete after `chunks`; see `JournalTail` for the others."""
        attempt = journal.attempt_of(next(iter(chunks))) if chunks else None
        complete = {
            other: max(map(int, state["open"]))
            for other, state in self._intervals.items()
            if state["open"] and (over if attempt is None else int(other) < attempt)
        }
        read_until = {name: times.get(name, 0) for name in {*times, *behind} if journal.attempt_of(name) == attempt}
        if attempt is not None and read_until:
            active = max(read_until.values()) - SILENT_MS
            until = min(time for name, time in read_until.items() if name in behind or time > active)
            complete[str(attempt)] = until // INTERVAL_MS - 1
        return complete

    def reduce(
        self, chunks: Mapping[str, journal.Chunk], complete: Mapping[str, int]
    ) -> Iterator[tuple[int, journal.Record]]:
        """Yield the attempts and records to send instead of those of `chunks`, after which intervals are complete."""
        # In a fixed order, so that a batch that is sent again has sums with equal roundings.
        for name, chunk in sorted(chunks.items()):
            attempt = journal.attempt_of(name)
            for record in chunk.records:
                others = {}
                for key, value in record.metrics.items():
                    if (metric := without_node(key)) is None:
                        others[key] = value
                    else:
                        self._count(attempt, metric, value, record)
                if others:
                    yield attempt, record._replace(metrics=others)
        for attempt_text, until in complete.items():
            if (state := self._intervals.get(attempt_text)) is not None:
                state["sent"] = max(state["sent"], until)
                for interval in sorted(int(number) for number in state["open"] if int(number) <= until):
                    for metric, (low, total, count, high, time_ms, step) in sorted(
                        state["open"].pop(str(interval)).items()
                    ):
                        group, _, name = metric.partition("/")
                        kinds = ("min", low), ("mean", total / count), ("max", high)
                        metrics = {f"{group}/nodes_{kind}/{name}": value for kind, value in kinds}
                        # A long step may be the newest one in two intervals.
                        first = journal.clean_metric_name(next(iter(metrics)))
                        known = self._sent_steps.get(first, {}).get(attempt_text)
                        step = step if known is None else max(step, known[1] + 1)
                        yield int(attempt_text), journal.Record(time_ms, step, metrics)

    def _count(self, attempt: int, metric: str, value: float, record: journal.Record) -> None:
        number = record.time_ms // INTERVAL_MS
        state = self._intervals.setdefault(str(attempt), {"sent": -1, "open": {}})
        if number > state["sent"] and value == value:
            found = state["open"].setdefault(str(number), {})
            low, total, count, high, time_ms, step = found.get(metric, (value, 0.0, 0, value, 0, record.step))
            ends = max(time_ms, record.time_ms), max(step, record.step)
            found[metric] = [min(low, value), total + value, count + 1, max(high, value), *ends]


# The budget of points: MLflow gets every point of a metric up to a limit, and beyond it as many as a chart shows.
#
# Beyond the limit, the points of a metric form buckets, of which MLflow gets the first point, the lowest, the highest,
# the first NaN and the last one. The size of the buckets doubles whenever the number of points doubles, so each
# doubling adds at most a quarter of the limit, a third with NaN. The journal keeps every point.

#: Number of points up to which MLflow gets every point of a metric.
EXACT_POINTS = 10_000
#: Points in a bucket after the limit; twice as many after twice the limit, and so on.
FIRST_BUCKET = 16


class PointBudget:
    def __init__(self, series: dict[str, dict[str, Any]]) -> None:
        self._series = series  #: metric → its number of points and its open bucket, a few points

    def select(self, points: Sequence[Point]) -> list[Point]:
        """Return the points to send: some of `points`, and earlier points of buckets that end with them."""
        selected: list[Point] = []
        for point in points:
            series = self._series.setdefault(point.key, {"count": 0})
            number = series["count"]
            series["count"] = number + 1
            if number < EXACT_POINTS:
                selected.append(point)
                continue
            begin = EXACT_POINTS << ((number // EXACT_POINTS).bit_length() - 1)
            size = FIRST_BUCKET * begin // EXACT_POINTS
            place = (number - begin) % size
            if place == 0:
                series |= {"low": point.value, "high": point.value, "held": {}}
                selected.append(point)
            else:
                _hold(series, point)
            if place == size - 1 or number + 1 == 2 * begin:
                selected += _release(point.key, series)
        return selected

    def flush(self) -> list[Point]:
        """Return the points of all open buckets, at the end of a run: the last point of every metric is sent."""
        return [point for key, series in self._series.items() for point in _release(key, series)]


def _hold(series: dict[str, Any], point: Point) -> None:
    """Keep a point until its bucket ends if it is an extreme, the first NaN or the last one."""
    value, held, kept = point.value, series.setdefault("held", {}), list(point[1:])
    low, high = series.get("low"), series.get("high")
    if value != value:
        held.setdefault("nan", kept)
    else:
        # Comparisons with NaN, which the first point may be, are false.
        if low is None or not value >= low:
            series["low"], held["low"] = value, kept
        if high is None or not value <= high:
            series["high"], held["high"] = value, kept
    held["last"] = kept


def _release(key: str, series: dict[str, Any]) -> list[Point]:
    """Return the held points in the order of their steps, each once, and hold none."""
    unique = {tuple(kept): Point(key, *kept) for kept in series.get("held", {}).values()}
    series["held"] = {}
    return sorted(unique.values(), key=lambda point: (point.step, point.time_ms))


# The metric series of a run as MLflow shows them, for reports and comparisons.


def read_series(run: RunDir) -> dict[str, Series]:
    """Return the series of a run by metric, thinned; metrics after the first MAX_SERIES are left out."""
    series: dict[str, Series] = {}
    for point in _points(run):
        if point.key in series or (len(series) < MAX_SERIES and is_read(point.key)):
            series.setdefault(point.key, Series()).add(point.step, point.value)
    return series


def read_values(run: RunDir) -> dict[str, dict[int, float]]:
    """Return all logged values of a run by metric and step, without system metrics and the marks of attempts."""
    values: dict[str, dict[int, float]] = {}
    for point in _points(run):
        if is_read(point.key) and point.key != journal.ATTEMPT_METRIC:
            values.setdefault(point.key, {})[point.step] = point.value
    return values


def _points(run: RunDir) -> Iterator[Point]:
    """Yield each step of a metric once; an attempt of a script counts up to the first step in a later one."""
    state, sent = run.read_state(), SentPoints(newest_counts=_is_of_script(run))
    tail = JournalTail(run.journal, sent)
    while chunks := tail.next_chunks(state.attempt, over=state.status in ENDED):
        yield from tail.new_points(chunks)
        sent.offsets |= {name: chunk.offset for name, chunk in chunks.items()}


def _is_of_script(run: RunDir) -> bool:
    try:
        return bool(read_section(run.config, "trainer", TrainerConfig).script)
    except (ConfigError, RunFolderError, OSError):  # a damaged file
        return False
