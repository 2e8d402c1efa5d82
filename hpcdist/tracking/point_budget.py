"""The budget of points: MLflow gets every point of a metric up to a limit, and beyond it as many as a chart shows.

Beyond the limit, the points of a metric form buckets, of which MLflow gets the first point, the lowest, the highest,
the first NaN and the last one. The size of the buckets doubles whenever the number of points doubles, so each doubling
adds at most a quarter of the limit, a third with NaN. The journal keeps every point.
"""

from collections.abc import Sequence
from typing import Any

from hpcdist.tracking.metric_point import Point

#: Number of points up to which MLflow gets every point of a metric.
EXACT_POINTS = 10_000
#: Points in a bucket after the limit; twice as many after twice the limit, and so on.
FIRST_BUCKET = 16


class PointBudget:
    """Selects the points that MLflow gets.

    Args:
        series: metric → its number of points and its open bucket, a few points; `select` changes it.
    """

    def __init__(self, series: dict[str, dict[str, Any]]) -> None:
        self._series = series

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
    value = point.value
    held = series.setdefault("held", {})
    kept = list(point[1:])
    low, high = series.get("low"), series.get("high")
    if value != value:  # NaN
        held.setdefault("nan", kept)
    else:
        # Comparisons with NaN, which the first point may be, are false.
        if low is None or not value >= low:
            series["low"] = value
            held["low"] = kept
        if high is None or not value <= high:
            series["high"] = value
            held["high"] = kept
    held["last"] = kept


def _release(key: str, series: dict[str, Any]) -> list[Point]:
    """Return the held points in the order of their steps, each once, and hold none."""
    unique = {tuple(kept): Point(key, *kept) for kept in series.get("held", {}).values()}
    series["held"] = {}
    return sorted(unique.values(), key=lambda point: (point.step, point.time_ms))
