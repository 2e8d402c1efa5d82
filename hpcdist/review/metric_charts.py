"""Charts of the metrics of a run, and the heat map of step times by node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from markupsafe import Markup

from hpcdist.review.charts import Line, heat_map, line_chart, number
from hpcdist.review.series import Series, thinned

#: Limit of the metrics and nodes that a report reads and draws, to bound its size and the memory of its writer.
MAX_SERIES = 600
MAX_CHARTS = 24
MAX_LINES = 8
MAX_NODES = 40
#: Points of a line are thinned to the lowest and highest of each of these columns.
_COLUMNS = 240
_CELLS = 80
#: Parts of names that tell apart the same metric on different data.
_SPLITS = ("train", "eval", "val", "valid", "validation", "test")
_SYSTEM, _ATTEMPT, _STEP_TIME = "system/", "attempt", "/step_s"
_STEP_TIMES = "seconds per step"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart with its title, and a sentence about points that it cannot show."""

    title: str
    figure: Markup
    note: str = ""


def is_read(key: str) -> bool:
    """Return whether reports show a metric: all but system metrics and parts of the step time by node."""
    return not key.startswith(_SYSTEM) and (key.count("/") < 2 or not key.startswith("time/") or _is_node_time(key))


def is_hidden(key: str) -> bool:
    """Return whether a metric has no chart of its own: the marks of attempts, and step times by node."""
    return key == _ATTEMPT or _is_node_time(key)


def _is_node_time(key: str) -> bool:
    return key.startswith("time/") and key.endswith(_STEP_TIME) and key.count("/") == 2


def attempt_marks(series: Mapping[str, Series]) -> dict[float, str]:
    """Return the first step of each attempt after the first one, with the title of its mark."""
    starts = series[_ATTEMPT].points if _ATTEMPT in series else []
    return {step: f"attempt {attempt:.0f}" for step, attempt in starts if attempt > 1}


def metric_charts(series: Mapping[str, Series], *, monitor: str = "", skip: Iterable[str] = ()) -> list[Chart]:
    """Return charts of the metrics: losses first, then the metric that selects checkpoints, throughput and the rest.

    The same metric on training and evaluation data shares a chart.

    Args:
        skip: metrics that are shown elsewhere.
    """
    shown = {key for key in series if not is_hidden(key)} - set(skip)
    groups: dict[str, list[str]] = {}
    for key in sorted(shown, key=lambda key: (not key.startswith("train"), key)):
        groups.setdefault(_group_of(key), []).append(key)
    order = ranked(groups, _group_of(monitor))
    return [chart for title in order[:MAX_CHARTS] if (chart := chart_of(title, groups[title], series)) is not None]


def declared_charts(series: Mapping[str, Series], declared: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the metrics of the charts that a trainer declares, by title, without charts that have none."""
    found = {
        title: sorted(key for key in series if any(fnmatchcase(key, pattern) for pattern in patterns))
        for title, patterns in declared.items()
    }
    return {title: keys for title, keys in found.items() if keys}


def chart_of(title: str, keys: Sequence[str], series: Mapping[str, Series]) -> Chart | None:
    """Return one chart of some metrics over steps; None without any finite point."""
    lines = [Line(key, _drawn(series[key])) for key in keys[:MAX_LINES]]
    figure = line_chart(lines, x_label="step", marks=attempt_marks(series))
    notes = [
        f"{key}: {found.num_not_finite} of {found.num_points} values are not finite, first at step"
        f" {found.first_not_finite}"
        for key in keys
        if (found := series[key]).num_not_finite
    ]
    if len(keys) > MAX_LINES:
        notes.append(f"{len(keys) - MAX_LINES} more metrics are not shown")
    if not figure and not notes:
        return None
    title = title if len(keys) > 1 else keys[0]
    return Chart(title=title, figure=figure, note="; ".join(notes))


def _drawn(series: Series) -> list[tuple[int, float]]:
    """Return the points of a series that a chart shows: the lowest and highest of each column, and both ends."""
    points = series.points
    return sorted({*points[:1], *thinned(points, _COLUMNS), *points[-1:]})


def _group_of(key: str) -> str:
    split, slash, rest = key.partition("/")
    return _STEP_TIMES if split == "time" else rest if slash and split in _SPLITS else key


def ranked(names: Iterable[str], monitor: str) -> list[str]:
    """Return names of metrics: losses first, then the monitored metric, throughput, step times and the rest."""

    def rank(name: str) -> tuple[int, str]:
        last = name.lower().rpartition("/")[2]
        is_time = name.startswith(("time/", _STEP_TIMES))
        tests = (last == "loss", "loss" in last, name == monitor, last.endswith("_per_s"), is_time)
        return (next((index for index, holds in enumerate(tests) if holds), len(tests)), name)

    return sorted(names, key=rank)


def step_times(series: Mapping[str, Series]) -> Chart | None:
    """Return the heat map of step times by node; None for a run on one node.

    A cell shows the longest step time in its range of steps. Of many nodes, those with the longest times are shown.
    """
    keys = sorted((key for key in series if _is_node_time(key)), key=_natural)
    points = {key.split("/")[1]: series[key].points for key in keys}
    steps = [step for node in points.values() for step, _ in node]
    if len(points) < 2 or not steps:
        return None
    first, last = min(steps), max(steps)
    num_cells = min(_CELLS, max(len(node) for node in points.values()))
    width = (last - first + 1) / num_cells
    rows: dict[str, list[float | None]] = {}
    for node, own in points.items():
        row: list[float | None] = [None] * num_cells
        for step, value in own:
            cell = int((step - first) / width)
            row[cell] = max(value * 1e3, row[cell] or 0.0)
        rows[node] = row
    slowest = sorted(rows, key=lambda node: -_mean(rows[node]))
    kept = {node: rows[node] for node in rows if node in slowest[:MAX_NODES]}
    note = f"slowest on average: {slowest[0]} ({number(_mean(rows[slowest[0]]))} ms)"
    if len(rows) > MAX_NODES:
        note += f"; the {MAX_NODES} slowest of {len(rows)} nodes are shown"
    figure = heat_map(kept, x_label="step", x_range=(first, last), unit=" ms")
    return Chart(title="Longest step time by node", figure=figure, note=note)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts `n2` before `n10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _mean(row: Sequence[float | None]) -> float:
    known = [value for value in row if value is not None]
    return sum(known) / len(known) if known else 0.0
