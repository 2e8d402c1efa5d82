"""The metric series of a run as MLflow shows them, read from the journal for reports and comparisons."""

from __future__ import annotations

from collections.abc import Iterator

from hpcdist.review.charts import MAX_SERIES, is_read
from hpcdist.review.facts import Series
from hpcdist.run.folder import ENDED, RunDir
from hpcdist.tracking.journal import ATTEMPT_METRIC
from hpcdist.tracking.points import JournalTail, Point, SentPoints


def read_series(run: RunDir) -> dict[str, Series]:
    """Return the series of a run by metric: all ranks and attempts, without the steps that a later attempt repeats.

    Memory is bounded: a series is thinned, and metrics after the first MAX_SERIES are left out.
    """
    series: dict[str, Series] = {}
    for point in _points(run):
        found = series.get(point.key)
        if found is None:
            if len(series) >= MAX_SERIES or not is_read(point.key):
                continue
            found = series[point.key] = Series()
        found.add(point.step, point.value)
    return series


def read_values(run: RunDir) -> dict[str, dict[int, float]]:
    """Return all logged values of a run by metric and step, without system metrics and the marks of attempts."""
    values: dict[str, dict[int, float]] = {}
    for point in _points(run):
        if is_read(point.key) and point.key != ATTEMPT_METRIC:
            values.setdefault(point.key, {})[point.step] = point.value
    return values


def _points(run: RunDir) -> Iterator[Point]:
    """Yield the points of all ranks and attempts, without the steps that a later attempt repeats."""
    state = run.read_state()
    sent = SentPoints()
    tail = JournalTail(run.journal, sent)
    while chunks := tail.next_chunks(state.attempt, over=state.status in ENDED):
        yield from tail.new_points(chunks)
        sent.offsets |= {name: chunk.offset for name, chunk in chunks.items()}
