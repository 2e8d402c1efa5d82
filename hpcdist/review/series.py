"""Series: the points of one metric, thinned to the number that a chart can show, extremes kept."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

#: Points are kept exactly up to this number; above it, two remain of each of NUM_BINS ranges of steps.
MAX_POINTS = 4096
NUM_BINS = 512


class Series:
    """Points of one metric, added in any order, in at most 64 KiB of memory.

    Of each range of steps the lowest and the highest value remain. Values that are not finite are counted only.
    """

    def __init__(self) -> None:
        self.num_points = 0  #: added, including those that are not kept
        self.num_not_finite = 0
        self.first_not_finite: int | None = None  #: its step
        self._steps = array("q")
        self._values = array("d")
        self._last: tuple[int, float] | None = None
        self._first: tuple[int, float] | None = None

    def add(self, step: int, value: float) -> None:
        """Add a point; points may arrive in any order."""
        self.num_points += 1
        if not math.isfinite(value):
            self.num_not_finite += 1
            if self.first_not_finite is None or step < self.first_not_finite:
                self.first_not_finite = step
            return
        if self._last is None or step >= self._last[0]:
            self._last = (step, value)
        if self._first is None or step < self._first[0]:
            self._first = (step, value)
        self._steps.append(step)
        self._values.append(value)
        if len(self._steps) > MAX_POINTS:
            kept = thinned(sorted(zip(self._steps, self._values, strict=True)), NUM_BINS)
            self._steps = array("q", (step for step, _ in kept))
            self._values = array("d", (value for _, value in kept))

    @property
    def points(self) -> list[tuple[int, float]]:
        """The kept points in the order of their steps; the first, last, lowest and highest ones are among them."""
        ends = {point for point in (self._first, self._last) if point is not None}
        return sorted(ends | set(zip(self._steps, self._values, strict=True)))

    @property
    def last(self) -> float | None:
        """The value of the highest step; None without a finite value."""
        return self._last[1] if self._last is not None else None

    @property
    def lowest(self) -> float | None:
        """The smallest finite value."""
        return min(self._values, default=None)

    @property
    def highest(self) -> float | None:
        """The largest finite value."""
        return max(self._values, default=None)


def thinned(points: list[tuple[int, float]], num_bins: int) -> list[tuple[int, float]]:
    """Return the lowest and the highest point of each of `num_bins` ranges of steps; `points` are sorted by step."""
    return [point for bin_ in _bins(points, num_bins) for point in _extremes(bin_)]


def _bins(points: list[tuple[int, float]], num_bins: int) -> Iterator[list[tuple[int, float]]]:
    """Yield the points of each range of steps that holds any."""
    if not points:
        return
    first, last = points[0][0], points[-1][0]
    width = max(1, -(-(last - first + 1) // num_bins))
    current: list[tuple[int, float]] = []
    number = 0
    for point in points:
        if (own := (point[0] - first) // width) != number:
            if current:
                yield current
            current, number = [], own
        current.append(point)
    yield current


def _extremes(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    low, high = min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])
    return sorted({low, high})
