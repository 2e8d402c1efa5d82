"""The budget of points: MLflow gets every point of a metric up to a limit, then what a chart can show.

Beyond the limit, the points of a metric form buckets, of which MLflow gets the first point, the lowest, the highest,
the first NaN and the last one. The size of the buckets doubles whenever the number of points doubles, so each doubling
adds at most a quarter of the limit, a third with NaN. The journal keeps every point.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpcdist.tracking.journal.shipping_state import ShippingState
from hpcdist.tracking.journal.tail import Point

#: Number of points up to which MLflow gets every point of a metric.
EXACT_POINTS = 10_000
#: Points in a bucket after the limit; twice as many after twice the limit, and so on.
FIRST_BUCKET = 16


class PointBudget:
    """The selection of the points of all metrics. Its state, a few points per metric, is part of `ShippingState`."""

    def __init__(self, progress: ShippingState) -> None:
        self._progress = progress

    def select(self, points: Iterable[Point]) -> list[Point]:
        """Return the points to send: some of `points`, and earlier points of buckets that end with them."""
        selected: list[Point] = []
        num_points = 0
        for point in points:
            num_points += 1
            series = self._progress.series.get(point.key)
            if series is None:
                series = self._progress.series[point.key] = {"count": 0}
            number = series["count"]
            series["count"] = number + 1
            if number < EXACT_POINTS:
                selected.append(point)
                continue
            is_first, is_last = self._place(number)
            if is_first:
                series |= {"low": point.value, "high": point.value, "held": {}}
                selected.append(point)
            else:
                _hold(series, point)
            if is_last:
                selected += _release(point.key, series)
        self._progress.num_thinned += num_points - len(selected)
        return selected

    def _place(self, number: int) -> tuple[bool, bool]:
        """Return whether a point is the first and whether it is the last one of its bucket."""
        begin = EXACT_POINTS << ((number // EXACT_POINTS).bit_length() - 1)
        size = FIRST_BUCKET * begin // EXACT_POINTS
        place = (number - begin) % size
        return place == 0, place == size - 1 or number + 1 == 2 * begin

    @property
    def is_holding(self) -> bool:
        """Whether buckets hold points that MLflow does not have."""
        return any(series.get("held") for series in self._progress.series.values())

    def flush(self) -> list[Point]:
        """Return the points of all open buckets, at the end of a run: the last point of every metric is sent."""
        found = [point for key, series in self._progress.series.items() for point in _release(key, series)]
        self._progress.num_thinned -= len(found)
        return found


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
