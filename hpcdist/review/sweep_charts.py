"""Charts of a sweep: its metric over the steps, against each swept key and against the cost, as SVG."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from markupsafe import Markup

from hpcdist.review.charts import Chart, line_chart
from hpcdist.review.ledger import Ledger
from hpcdist.review.metric_series import Series
from hpcdist.review.svg import (
    OTHER_COLOUR,
    Point,
    colour_of,
    dot_at,
    frame_of,
    line,
    number,
    spans_power_of_ten,
    with_legend,
)
from hpcdist.review.sweep_facts import CellFacts, SweepFacts
from hpcdist.review.uncertainty import LARGEST_VALUE
from hpcdist.run.sweeps import REPETITION, setting_of, text_of

#: Settings with a curve and a colour of their own, the best ones first.
MAX_SETTINGS = 8
#: Lines of the chart of a key.
MAX_LINES = 8
#: Different values of a key without numbers that fit below an axis.
_MAX_NAMES = 12
#: Share of the axis of a key or of the cost that is free on each side of the points.
_X_MARGIN = 0.05
#: Points of a curve.
_MAX_STEPS = 240


def sweep_charts(
    facts: SweepFacts, series: Mapping[str, Mapping[str, Series]], spent: Mapping[str, Ledger]
) -> dict[str, Chart]:
    """Return the charts of a sweep that have at least two different points, by `curves`, `cost` and the swept keys.

    Args:
        series: of each cell by its name, the logged points by metric.
        spent: the ledger of each cell by its name.
    """
    rows = facts.ranking.rows[:MAX_SETTINGS]
    colours = {row.name: colour_of(index) for index, row in enumerate(rows)}
    charts = {}
    figure = curves(facts, series, colours)
    if figure:
        charts["curves"] = Chart(title=f"{facts.monitor} over the steps", figure=figure)
    for key in facts.keys:
        figure = key_chart(facts, key)
        if key != REPETITION and figure:
            charts[key] = Chart(title=f"{facts.monitor} against {key}", figure=figure)
    figure = cost_chart(facts, spent, colours)
    if figure:
        charts["cost"] = Chart(title=f"{facts.monitor} against the cost", figure=figure)
    return charts


@dataclass(frozen=True)
class _Step:
    """The values of a setting's seeds at one step."""

    step: float
    mean: float
    deviation: float  #: standard deviation; 0 for a single seed


def curves(facts: SweepFacts, series: Mapping[str, Mapping[str, Series]], labels: Iterable[str]) -> Markup:
    """Return the metric over the steps: of each setting the mean of its seeds, in a band of one standard deviation.

    Args:
        labels: of the settings to draw, the best one first.
    """
    by_setting = {label: _steps_of(facts, label, series) for label in labels}
    if len({at.step for steps in by_setting.values() for at in steps}) <= 1:
        return Markup()
    lines = {label: [(at.step, at.mean) for at in steps] for label, steps in by_setting.items()}
    areas = {label: _around(steps) for label, steps in by_setting.items() if any(at.deviation for at in steps)}
    num_others = len(facts.ranking.rows) - sum(map(bool, lines.values()))
    note = f"{num_others} more are not drawn" if num_others else ""
    return line_chart(lines, x_label="step", y_label=facts.monitor, areas=areas, note=note)


def _around(steps: Sequence[_Step]) -> list[Point]:
    """Return the corners of the band of one standard deviation around the means."""
    upper = [(at.step, at.mean + at.deviation) for at in steps]
    lower = [(at.step, at.mean - at.deviation) for at in reversed(steps)]
    return [*upper, *lower]


def _steps_of(facts: SweepFacts, label: str, series: Mapping[str, Mapping[str, Series]]) -> list[_Step]:
    """Return the means of a setting's seeds over ranges of steps, at most _MAX_STEPS, that all seeds have reached.

    With fewer steps, each is a range of its own. If some seeds have finished, the others do not count: they would end
    the curve of all.
    """
    cells = _cells_of(facts, label)
    finished = [cell for cell in cells if cell.status == "finished"]
    of_seeds = []
    for cell in finished or cells:
        logged = series.get(cell.name, {}).get(facts.monitor)
        if logged is not None:
            of_seeds.append([(step, value) for step, value in logged.points if abs(value) <= LARGEST_VALUE])
    last_step = max((step for points in of_seeds for step, _ in points), default=0)
    width = last_step // _MAX_STEPS + 1
    means_of_seeds = [_means((step // width, value) for step, value in points) for points in of_seeds]
    if not means_of_seeds:
        return []
    common = set.intersection(*({place for place, _ in means} for means in means_of_seeds))
    steps = []
    for place in sorted(common):
        values = [dict(means)[place] for means in means_of_seeds]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        steps.append(_Step((place + 0.5) * width - 0.5, statistics.fmean(values), deviation))
    return steps


def _cells_of(facts: SweepFacts, label: str) -> list[CellFacts]:
    return [cell for cell in facts.cells if setting_of(cell.values) == label]


def key_chart(facts: SweepFacts, key: str) -> Markup:
    """Return the metric against the values of a swept key; one line for each combination of the other keys.

    Dots are cells; lines, at most MAX_LINES, pass through the means of their seeds. Empty with fewer than two different
    values, and with more names than fit below the axis.
    """
    values = {text_of(cell.values.get(key)): cell.values.get(key) for cell in facts.cells}
    names: tuple[str, ...] = ()
    places = {text: float(value) for text, value in values.items() if _is_number(value)}
    if len(places) < len(values):
        names = tuple(values)
        places = {name: float(index) for index, name in enumerate(names)}
    lines = _metric_by_place(facts, key, places)
    points = [point for line in lines.values() for point in line]
    if len({place for place, _ in points}) <= 1 or len(names) > _MAX_NAMES:
        return Markup()
    is_log_x = not names and spans_power_of_ten(places.values())
    frame = frame_of(points, x_margin=_X_MARGIN, is_log_x=is_log_x, x_names=names)
    parts = frame.axes(key, facts.monitor)
    colours = {name: colour_of(index) for index, name in enumerate(sorted(lines)[:MAX_LINES])}
    for name, points in lines.items():
        colour = colours.get(name, OTHER_COLOUR)
        means = _means(points)
        if name in colours and len(means) > 1:
            parts.append(line(frame, name or facts.monitor, means, colour))
        parts += [dot_at(frame, point, colour, f"{name} {number(point[1])}".strip()) for point in points]
    colours.pop("", None)  # the only line of a sweep over one key
    return with_legend(parts, _with_others(colours, len(lines)), f"{facts.monitor} against {key}")


def _metric_by_place(facts: SweepFacts, key: str, places: Mapping[str, float]) -> dict[str, list[Point]]:
    """Return the places and metrics of the cells that count, by the label of their other swept keys; empty without any.

    Args:
        places: on the axis of the key, by the text of its value.
    """
    lines: dict[str, list[Point]] = {}
    for cell in facts.cells:
        value = facts.result_of(cell)
        if value is None:
            continue
        others = {name: value for name, value in cell.values.items() if name not in (key, REPETITION)}
        name = setting_of(others) if others else ""
        lines.setdefault(name, []).append((places[text_of(cell.values.get(key))], value))
    return lines


def _means(points: Iterable[Point]) -> list[Point]:
    """Return the mean at each place, by place."""
    by_place: dict[float, list[float]] = {}
    for place, value in points:
        by_place.setdefault(place, []).append(value)
    return [(place, statistics.fmean(values)) for place, values in sorted(by_place.items())]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def cost_chart(facts: SweepFacts, spent: Mapping[str, Ledger], colours: Mapping[str, str]) -> Markup:
    """Return the metric of each setting against the hours of one of its cells, on average."""
    points: dict[str, Point] = {}
    unit = ""
    for row in facts.ranking.rows:
        name = row.name
        ledgers = [spent[cell.name] for cell in _cells_of(facts, name) if cell.name in spent]
        allocated = [ledger.allocated_s for ledger in ledgers if ledger.allocated_s]
        if allocated:
            points[name] = (statistics.fmean(allocated) / 3600, row.measured.mean)
            unit = ledgers[0].unit
    if len(points) <= 1:
        return Markup()
    label = f"{unit}-hours of a run"
    is_log_x = spans_power_of_ten(hours for hours, _ in points.values())
    frame = frame_of(list(points.values()), x_margin=_X_MARGIN, is_log_x=is_log_x)
    parts = frame.axes(label, facts.monitor)
    for name, point in points.items():
        parts.append(dot_at(frame, point, colours.get(name, OTHER_COLOUR), f"{name}: {number(point[1])}"))
    named = {name: colour for name, colour in colours.items() if name in points}
    return with_legend(parts, _with_others(named, len(points)), f"{facts.monitor} against {label}")


def _with_others(colours: Mapping[str, str], num_all: int) -> dict[str, str]:
    """Return the entries of a legend with one for the dots that have no colour of their own."""
    names = dict(colours)
    if names and num_all > len(names):
        names[f"{num_all - len(names)} more"] = OTHER_COLOUR
    return names
