"""Charts of metrics and of ranks as SVG, for the report."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise

from markupsafe import Markup

from hpcdist.errors import duration
from hpcdist.review.facts import RunFacts
from hpcdist.review.ledger import Interval, Ledger, hours_text
from hpcdist.review.markdown import one_line, text_of
from hpcdist.review.metric_series import SYSTEM_PREFIX, Series, group_of, ranked, thinned
from hpcdist.review.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    OTHER_COLOUR,
    RIGHT,
    TOP,
    ChartFrame,
    Point,
    colour_of,
    frame_of,
    line,
    number,
    places_of,
    rect,
    spans_power_of_ten,
    svg,
    tag,
    text_at,
    ticks,
    with_legend,
)
from hpcdist.run.figures import Curves, Figure, Histogram, Matrix, Text


def line_chart(
    lines: Mapping[str, Sequence[Point]],
    *,
    x_label: str,
    y_label: str = "",
    starts: Mapping[float, str] | None = None,
    dot: tuple[Point, str] | None = None,
    areas: Mapping[str, Sequence[Point]] | None = None,
    muted: str = "",
    note: str = "",
) -> Markup:
    """Return a chart of lines, empty without any point; losses that span a power of ten have a logarithmic axis.

    Args:
        starts: names of attempts, by the step at which each begins.
        dot: a point to mark, and its title.
        areas: the corners of an area in the colour of a line, by its name.
        muted: the name of a line in grey below the others; empty without one.
        note: a further entry of the legend, such as the number of lines that are left out; empty without one.
    """
    # Before empty lines are left out: a name has the same colour in all charts of a page.
    colours = {name: colour_of(index) for index, name in enumerate(lines)}
    if muted:
        colours[muted] = OTHER_COLOUR
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return Markup()
    areas = areas or {}
    metrics = [y_label] if y_label else list(lines)
    are_losses = all("loss" in name.lower() for name in metrics)
    heights = [y for points in lines.values() for _, y in points]
    is_log = are_losses and spans_power_of_ten(heights)
    if is_log:  # a deviation as large as the mean has no place on a logarithmic axis
        lowest = min(heights)
        areas = {name: [(x, max(y, lowest)) for x, y in corners] for name, corners in areas.items()}
    shown = [point for points in (*lines.values(), *areas.values()) for point in points]
    if dot:
        shown.append(dot[0])
    frame = frame_of(shown, is_log=is_log)
    parts = _bands(frame, starts or {}) + frame.axes(x_label, y_label)
    for name, points in areas.items():
        style = f"fill:{colours[name]};opacity:.18"
        parts.append(tag("polygon", style=style, points=places_of(frame, points)))
    for name in sorted(lines, key=lambda name: name != muted):
        parts.append(line(frame, name, lines[name], colours[name]))
    dot_title = ""
    if dot:
        (x, y), dot_title = dot
        title = tag("title", dot_title)
        parts.append(tag("circle", title, class_="dot", cx=frame.left(x), cy=frame.top(y), r=4.5))
    named = {name: colours[name] for name in lines}
    if note:
        named[note] = ""
    elif len(lines) == 1 and not dot:
        named = {}
    return with_legend(parts, named, ", ".join(lines), dot_title)


_FIRST_ATTEMPT = "attempt 1"
#: Width from which a band contains its name, such as `attempt 12`.
_NAMED_WIDTH = 80


def _bands(frame: ChartFrame, starts: Mapping[float, str]) -> list[Markup]:
    """Return the attempts as bands between dashed lines, with the names of those that are wide enough."""
    low, high = frame.x
    inside = {x: name for x, name in starts.items() if low < x <= high}
    earlier = [(x, name) for x, name in starts.items() if x <= low]
    _, first = max(earlier, default=(0, _FIRST_ATTEMPT))
    if not inside and first == _FIRST_ATTEMPT:
        return []
    names = [first, *inside.values()]
    edges = [LEFT, *map(frame.left, inside), RIGHT]
    bands = list(pairwise(edges))
    shaded = "".join(f"M{left:.1f} {TOP}H{right:.1f}V{BOTTOM}H{left:.1f}Z" for left, right in bands[1::2])
    lines = "".join(f"M{left:.1f} {TOP}V{BOTTOM}" for left, _ in bands[1:])
    parts = [tag("path", class_="band", d=shaded), tag("path", class_="mark", d=lines)]
    for name, (left, right) in zip(names, bands, strict=True):
        if right - left > _NAMED_WIDTH:
            parts.append(text_at("tick mid", name, (left + right) / 2, TOP - 2))
    return parts


#: Number of shades of the cells of a matrix (`.h0`, …).
NUM_SHADES = 9


def shade(share: float) -> str:
    """Return the class of a cell by a number from 0 (lightest) to 1 (darkest)."""
    return f"h{min(NUM_SHADES - 1, int(share * NUM_SHADES))}"


#: Attempts with a row of their own in the timeline.
MAX_ATTEMPTS = 40
#: Intervals of an attempt that are drawn; of more, those of the same cause with a short gap are joined.
MAX_INTERVALS = 300
#: Left end of the bars of a row, after its name.
_ROW_LEFT = 110
#: Height of a row of the timeline, and of the bars in it.
_ROW_HEIGHT = 22
_BAR_HEIGHT = 16
#: Characters that fit left of a bar.
_MAX_ROW_NAME = 17
#: Units of the time axis: name, seconds, and the duration above which it is used, so that ticks have few digits.
_TIME_UNITS = (("hours", 3600.0, 7200.0), ("minutes", 60.0, 180.0), ("seconds", 1.0, -math.inf))


def timeline(ledger: Ledger) -> Markup:
    """Return a row of bars for each attempt over a common time axis, in the colours of the causes."""
    began = min(interval.began for interval in ledger.intervals)
    seconds = max(interval.ended for interval in ledger.intervals) - began
    unit, unit_s = next((name, unit_s) for name, unit_s, above_s in _TIME_UNITS if seconds > above_s)
    attempts = sorted({interval.attempt for interval in ledger.intervals})[-MAX_ATTEMPTS:]
    shown = [interval for interval in ledger.intervals if interval.attempt in attempts]
    # Seconds since the beginning of the run, between which the axis extends.
    low = min(interval.began for interval in shown) - began
    high = max(interval.ended for interval in shown) - began
    scale = (RIGHT - _ROW_LEFT) / (high - low or 1.0)
    bottom = _ROW_HEIGHT * len(attempts) + 4
    label = f"{unit} since the beginning"
    parts = [text_at("label mid", label, (_ROW_LEFT + RIGHT) / 2, bottom + 28)]
    for tick in ticks(low / unit_s, high / unit_s, 8):
        x = _ROW_LEFT + (tick * unit_s - low) * scale
        grid = tag("path", class_="grid", d=f"M{x:.1f} 0V{bottom}")
        parts += [grid, text_at("tick mid", number(tick), x, bottom + 13)]
    for index, attempt in enumerate(attempts):
        top = index * _ROW_HEIGHT + 4
        row_name = f"attempt {attempt}" if attempt else "no attempt"
        parts.append(text_at("row", row_name, 0, top + 12))
        intervals = [interval for interval in shown if interval.attempt == attempt]
        intervals.sort(key=lambda interval: interval.began)
        for interval in joined(intervals, seconds / MAX_INTERVALS):
            left = _ROW_LEFT + (interval.began - began - low) * scale
            spent_s = interval.ended - interval.began
            width = max(0.75, spent_s * scale)
            title = f"{interval.cause}: {duration(spent_s)}"
            parts.append(rect(f"var(--{interval.cause})", title, left, top, width, _BAR_HEIGHT))
    return svg(bottom + 34, parts, label)


def usage_bars(ledgers: Mapping[str, Ledger]) -> Markup:
    """Return a bar for each name with its allocated time by cause, in the colours of the causes."""
    longest_s = max(ledger.allocated_s for ledger in ledgers.values())
    scale = (RIGHT - _ROW_LEFT) / longest_s
    parts = []
    for index, (name, ledger) in enumerate(ledgers.items()):
        top = index * _ROW_HEIGHT + 4
        parts.append(text_at("row", one_line(name, _MAX_ROW_NAME), 0, top + 12))
        left = float(_ROW_LEFT)
        for cause, seconds in ledger.seconds.items():
            title = f"{cause}: {hours_text(seconds)} {ledger.unit}-hours"
            parts.append(rect(f"var(--{cause})", title, left, top, seconds * scale, _BAR_HEIGHT))
            left += seconds * scale
    return svg(_ROW_HEIGHT * len(ledgers) + 4, parts, "allocated time by cause")


def joined(intervals: Sequence[Interval], gap_s: float) -> list[Interval]:
    """Join intervals of the same cause that follow each other within `gap_s`, if there are too many to draw.

    Returns the longest ones first, so that short ones are drawn over them, if it joins.
    """
    if len(intervals) <= MAX_INTERVALS:
        return list(intervals)
    by_cause: dict[str, list[Interval]] = {}
    for interval in intervals:
        same_cause = by_cause.setdefault(interval.cause, [])
        if same_cause and interval.began - same_cause[-1].ended <= gap_s:
            previous = same_cause.pop()
            interval = replace(previous, ended=max(previous.ended, interval.ended))
        same_cause.append(interval)
    flat = [interval for same_cause in by_cause.values() for interval in same_cause]
    return sorted(flat, key=lambda interval: interval.began - interval.ended)


def draw(figure: Figure) -> Markup:
    """Return a figure of a trainer as SVG or HTML."""
    match figure:
        case Matrix():
            return _matrix(figure)
        case Curves(lines=lines):
            drawn = {name: [(x, y) for x, y in points] for name, points in lines.items()}
            return line_chart(drawn, x_label=figure.x_label, y_label=figure.y_label)
        case Histogram():
            return _histogram(figure)
        case Text():
            return tag("pre", text_of(figure.text))


def _histogram(figure: Histogram) -> Markup:
    edges = figure.edges
    counts = figure.counts
    frame = ChartFrame((edges[0], edges[-1]), (0.0, max(*counts, 1e-9)))
    parts = frame.axes(figure.x_label, figure.y_label)
    for (begin, end), count in zip(pairwise(edges), counts, strict=True):
        left = frame.left(begin)
        top = frame.top(count)
        width = max(0.5, frame.left(end) - left - 1)
        title = f"{number(begin)} to {number(end)}: {number(count)}"
        parts.append(rect(colour_of(0), title, left + 0.5, top, width, BOTTOM - top))
    return svg(HEIGHT, parts, figure.y_label)


def _matrix(matrix: Matrix) -> Markup:
    """Return a table with cells that are shaded by their share of the row."""
    head = Markup("").join(tag("th", name) for name in matrix.names)
    rows = [tag("tr", Markup("<th></th>") + head)]
    for name, values in zip(matrix.names, matrix.values, strict=True):
        total = sum(map(abs, values)) or 1.0
        cells = [tag("td", number(value), class_=f"n {shade(abs(value) / total)}") for value in values]
        rows.append(tag("tr", tag("th", name) + Markup("").join(cells)))
    caption = tag("caption", f"rows: {matrix.row_label}, columns: {matrix.column_label}")
    table = tag("table", caption + Markup("").join(rows), class_="matrix")
    return tag("div", table, class_="scroll")


#: Metrics that grow by the same amount in each step: their curves are straight lines.
_COUNTERS = ("samples", "train/epoch")
#: Metrics without a chart as long as they do not change.
_CONSTANTS = ("world_size",)
MAX_CHARTS = 24
MAX_LINES = 8
#: Points of a line are thinned to the lowest and highest of each of these columns.
_COLUMNS = 240


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawn chart of a report."""

    title: str
    figure: Markup
    note: str = ""  #: about points that it cannot show


def metric_charts(
    series: Mapping[str, Series],
    declared: Mapping[str, Sequence[str]],
    monitor: str = "",
    facts: RunFacts | None = None,
) -> tuple[list[Chart], list[Chart]]:
    """Return the charts that a trainer declares, and those of the other metrics, one for training and evaluation.

    Args:
        series: the logged points by metric.
        declared: the patterns of metrics of each declared chart, by its title.
        monitor: the primary metric. It has no chart here if it would be alone in it: `primary_chart` has it.
        facts: of the run; with them, charts show where attempts begin.
    """
    keys_by_title = {title: _matching(series, patterns) for title, patterns in declared.items()}
    in_declared = {key for keys in keys_by_title.values() for key in keys}
    constant = {key for key in _CONSTANTS if key in series and series[key].lowest == series[key].highest}
    without_chart = in_declared.union(_COUNTERS, constant)
    others = [key for key in series if not key.startswith(SYSTEM_PREFIX) and key not in without_chart]
    groups: dict[str, list[str]] = {}
    for key in sorted(others, key=lambda key: (not key.startswith("train"), key)):
        groups.setdefault(group_of(key), []).append(key)
    titles = [title for title in ranked(groups, group_of(monitor)) if groups[title] != [monitor]]
    draw = partial(_chart, series=series, facts=facts)
    declared_charts = [draw(title, keys) for title, keys in keys_by_title.items() if keys and keys != [monitor]]
    other_charts = [draw(title, groups[title]) for title in titles[:MAX_CHARTS]]
    return list(filter(None, declared_charts)), list(filter(None, other_charts))


def _matching(keys: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return sorted(key for key in keys if any(fnmatchcase(key, pattern) for pattern in patterns))


def _chart(title: str, keys: Sequence[str], series: Mapping[str, Series], facts: RunFacts | None) -> Chart | None:
    lines = {key: _drawn(series[key]) for key in keys[:MAX_LINES]}
    figure = line_chart(lines, x_label="step", starts=_starts(keys, series, facts))
    notes = [note for key in keys for note in _not_finite(key, series[key])]
    if len(keys) > MAX_LINES:
        notes.append(f"{len(keys) - MAX_LINES} more metrics are not shown")
    if not figure and not notes:
        return None
    if len(keys) == 1:
        title = keys[0]
    return Chart(title=title, figure=figure, note="; ".join(notes))


def _drawn(logged: Series) -> list[tuple[int, float]]:
    """Return the points of a line, as many as a chart can show."""
    points = logged.points
    return sorted({*points[:1], *thinned(points, _COLUMNS), *points[-1:]})


def _not_finite(key: str, logged: Series) -> list[str]:
    """Return a note on the values of a metric that are not finite; none without any."""
    if not logged.num_not_finite:
        return []
    return [
        f"{key}: {logged.num_not_finite} of {logged.num_points} values are not finite,"
        f" first at step {logged.first_not_finite}"
    ]


def _starts(keys: Sequence[str], series: Mapping[str, Series], facts: RunFacts | None) -> dict[float, str]:
    """Return the names of the attempts by the step at which each begins."""
    first_steps = _first_steps_of(series[key] for key in keys)
    if facts is not None and not facts.is_script:  # a trainer's attempt begins before it first logs
        for attempt in facts.attempts:
            if attempt.first_step is not None:
                first_steps[attempt.number] = attempt.first_step
    return {step: f"attempt {number:.0f}" for number, step in first_steps.items()}


def _first_steps_of(logged: Iterable[Series]) -> dict[float, int]:
    """Return the first step of each attempt of a script in the metrics of a chart.

    A script may log one metric by steps, and others by epochs or without steps. If the attempts of metrics in one chart
    overlap for that reason, the chart shows none, and the result is empty.
    """
    steps = [item for one in logged for item in one.steps_of_attempts.items()]
    first_steps: dict[float, int] = {}
    for attempt, (low, _) in steps:
        first_steps[attempt] = min(low, first_steps.get(attempt, low))
    for attempt, (_, high) in steps:
        if any(number > attempt and first <= high for number, first in first_steps.items()):
            return {}
    return first_steps


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """The run from which a run has its config and code, on the page of the latter."""

    name: str
    logged: Series  #: of the primary metric
    verdict: str  #: on the run of the page; empty if one of the two has no best checkpoint


#: Name of the run of the page beside that of the compared run.
_THIS_RUN = "this run"


def primary_chart(facts: RunFacts, series: Mapping[str, Series], compared: ComparedRun | None = None) -> Chart | None:
    """Return the curve of the primary metric with the best checkpoint; None if nothing was logged.

    Args:
        compared: another run; its curve is shown below that of this run.
    """
    metric = facts.primary_metric
    if metric not in series:
        return None
    dot = None
    if facts.best is not None:
        dot = (facts.best.step, facts.best_value), f"best checkpoint: {facts.best_at_step}"
    curve = _drawn(series[metric])
    starts = _starts([metric], series, facts)
    notes = _not_finite(metric, series[metric])
    if compared is None:
        figure = line_chart({metric: curve}, x_label="step", starts=starts, dot=dot)
    else:
        lines = {_THIS_RUN: curve, compared.name: _drawn(compared.logged)}
        figure = line_chart(lines, x_label="step", y_label=metric, starts=starts, dot=dot, muted=compared.name)
        if compared.verdict:
            notes.insert(0, compared.verdict)
    if not figure and not notes:
        return None
    return Chart(title=metric, figure=figure, note="; ".join(notes))
