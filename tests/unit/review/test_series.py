"""Thinning of metric series, and reading them from a journal."""

from __future__ import annotations

import math
import random
from pathlib import Path

from report_scene import ReportScene

from hpcdist.review.facts import MAX_POINTS, NUM_BINS, Series, thinned
from hpcdist.tracking.points import read_series


def test_short_series_are_exact() -> None:
    series = Series()
    for step in (3, 1, 2):
        series.add(step, step / 2)
    assert series.points == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert (series.lowest, series.last, series.highest) == (0.5, 1.5, 1.5)
    assert Series().points == []
    assert (Series().lowest, Series().last, Series().highest) == (None, None, None)


def test_long_series_keep_ends_and_extremes_everywhere() -> None:
    generator = random.Random(1)
    values = [generator.random() for _ in range(100_000)]
    values[40_000], values[77_777] = -5.0, 9.0
    series = Series()
    for step, value in enumerate(values):
        series.add(step, value)
    points = series.points
    assert len(points) <= MAX_POINTS + 2
    assert points == sorted(points)
    assert {(0, values[0]), (40_000, -5.0), (77_777, 9.0), (99_999, values[-1])} <= set(points)
    assert all(values[step] == value for step, value in points)
    assert series.num_points == 100_000
    for begin in range(0, 100_000, 2000):  # no part of the run is left with few points
        assert len([step for step, _ in points if begin <= step < begin + 2000]) >= 2000 * NUM_BINS // 100_000


def test_values_that_are_not_finite_are_counted() -> None:
    series = Series()
    for step, value in ((1, 0.5), (7, math.nan), (4, math.inf)):
        series.add(step, value)
    assert series.points == [(1, 0.5)]
    assert (series.num_points, series.num_not_finite, series.first_not_finite) == (3, 2, 4)


def test_thinned_points_are_the_extremes_of_ranges_of_steps() -> None:
    points = [(0, 1.0), (1, 5.0), (2, 3.0), (10, 2.0), (11, 2.0)]
    assert thinned(points, 2) == [(0, 1.0), (1, 5.0), (10, 2.0)]
    assert thinned([], 2) == []


def test_series_of_a_run_have_repeated_steps_once(tmp_path: Path) -> None:
    scene = ReportScene(tmp_path)
    scene.state(attempt=2)
    scene.log({"train/loss": [1.0, 2.0, 3.0], "system/cpu": [1.0], "time/n1/data_s": [1.0], "time/n1/step_s": [0.1]})
    scene.log({"train/loss": [30.0, 4.0]}, attempt=2, first=3)
    series = read_series(scene.run)
    assert set(series) == {"train/loss", "time/n1/step_s", "attempt"}
    assert series["train/loss"].points == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert [attempt for _, attempt in series["attempt"].points] == [1, 2]
