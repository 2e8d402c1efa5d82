"""Charts of metrics and of ranks as SVG, for the report."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise

from markupsafe import Markup

from hpcdist.errors import duration
from hpcdist.review.facts import ATTEMPT, RunFacts, Series, group_of, is_hidden, ranked, thinned
from hpcdist.review.ledger import Interval, Ledger
from hpcdist.run.figures import Curves, Figure, Histogram, Matrix

# Inline SVG, without scripts: the style sheet of the page sets its colours, also for dark mode. `Markup.format` escapes
# all texts.

Point = tuple[float, float]

WIDTH, HEIGHT = 640, 230
_LEFT = 62
_RIGHT = WIDTH - 12
_TOP = 10
_BOTTOM = HEIGHT - 36
#: Left end of the bars of a row, after its name.
_ROW_LEFT = 110
#: Number of colours in the style sheet (`--c0`, `--c1`, …).
NUM_COLOURS = 12
#: Number of shades of the cells of a matrix (`.h0`, …).
NUM_SHADES = 9
#: Whole numbers from here on have an exponent, because an axis has no space for more digits.
_LARGE = 1e6
#: A logarithmic axis of fewer powers of ten also has ticks at 2 and 5 times a power.
_FEW_POWERS = 3


def number(value: float) -> str:
    """Return a number with all digits if it is whole and below a million, else with four significant digits."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < _LARGE:
        return f"{int(value):,}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers between two numbers."""
    rough = (high - low) / count
    if not 0 < rough < math.inf:
        return [low]
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5, 10) if factor * power >= rough), rough)
    first = math.ceil(low / step)
    last = math.floor(high / step * (1 + 1e-12))  # the quotient may be a little below a whole number
    return [index * step for index in range(first, last + 1)]


def powers(low: float, high: float) -> list[float]:
    """Return round numbers between two powers of ten, given by their exponents."""
    step = max(1, math.ceil((high - low) / 6))
    factors = (1, 2, 5) if high - low < _FEW_POWERS else (1,)
    numbers = []
    for exponent in range(math.floor(low / step) * step, math.ceil(high) + 1, step):
        for factor in factors:
            value = factor * 10.0**exponent
            if low <= math.log10(value) <= high:
                numbers.append(value)
    return numbers


def _tag(name: str, content: str = "", **attributes: object) -> Markup:
    """Return an element.

    Names of attributes have `_` instead of `-`, and end with `_` if they are a keyword of Python.
    """
    words = []
    for key, value in attributes.items():
        if isinstance(value, float):
            value = f"{value:.1f}"
        words.append(Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value))
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup("").join(words), content)


def _rect(colour: str, title: str, x: float, y: float, width: float, height: float) -> Markup:
    return _tag("rect", _tag("title", title), style=f"fill:{colour}", x=x, y=y, width=width, height=height)


def _text(kind: str, text: str, x: float, y: float) -> Markup:
    return _tag("text", text, class_=kind, x=x, y=y)


def _colour(index: int) -> str:
    return f"var(--c{index % NUM_COLOURS})"


@dataclass(frozen=True)
class _Frame:
    """The coordinates of a chart: a range of values on each axis."""

    x: Point
    y: Point  #: on a logarithmic axis their logarithms
    is_log: bool = False

    def left(self, x: float) -> float:
        """Return the horizontal position of a value."""
        return _LEFT + _share(x, self.x) * (_RIGHT - _LEFT)

    def top(self, y: float) -> float:
        """Return the vertical position of a value."""
        if self.is_log:
            y = math.log10(y)
        return _BOTTOM - _share(y, self.y) * (_BOTTOM - _TOP)

    def axes(self, x_label: str, y_label: str) -> list[Markup]:
        """Return the grid, the numbers and the labels of both axes."""
        y_ticks = powers(*self.y) if self.is_log else ticks(*self.y)
        grid = "".join(f"M{_LEFT} {self.top(y):.1f}H{_RIGHT}" for y in y_ticks)
        parts = [_tag("path", class_="grid", d=grid)]
        for y in y_ticks:
            parts.append(_text("tick", number(y), _LEFT - 5, self.top(y) + 3.5))
        for x in ticks(*self.x, 8):
            parts.append(_text("tick mid", number(x), self.left(x), _BOTTOM + 14))
        parts.append(_tag("path", class_="axis", d=f"M{_LEFT} {_BOTTOM}H{_RIGHT}"))
        parts.append(_text("label mid", x_label, (_LEFT + _RIGHT) / 2, HEIGHT - 6))
        rotated = f"translate(12 {(_TOP + _BOTTOM) / 2:.1f}) rotate(-90)"
        parts.append(_tag("text", y_label, class_="label mid", transform=rotated))
        return parts


def _share(value: float, ends: Point) -> float:
    """Return the place of a value between two ends as a number from 0 to 1; the middle if they are equal."""
    low, high = ends
    if high > low:
        return (value - low) / (high - low)
    return 0.5


def _svg(height: int, parts: Iterable[Markup], label: str) -> Markup:
    return _tag("svg", Markup("").join(parts), viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label)


def legend(colours: Mapping[str, str], dot: str = "") -> Markup:
    """Return the names of lines with their colours.

    Args:
        colours: colour by name.
        dot: the name of the marked point; empty without one.
    """
    items = [_tag("span", swatch(colour) + name) for name, colour in colours.items()]
    if dot:
        items.append(_tag("span", _tag("i", class_="dot") + dot))
    return _tag("div", Markup("").join(items), class_="legend")


def swatch(colour: str) -> Markup:
    """Return a small square in a colour."""
    return _tag("i", style=f"background:{colour}")


def line_chart(
    lines: Mapping[str, Sequence[Point]],
    *,
    x_label: str,
    y_label: str = "",
    starts: Mapping[float, str] | None = None,
    dot: tuple[Point, str] | None = None,
) -> Markup:
    """Return a chart of lines, empty without any point; losses that span a power of ten have a logarithmic axis.

    Args:
        starts: names of attempts, by the step at which each begins.
        dot: a point to mark, and its title.
    """
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return Markup()
    shown = [point for points in lines.values() for point in points]
    if dot:
        shown.append(dot[0])
    frame = _frame_of(shown, are_losses=all("loss" in name.lower() for name in lines))
    parts = _bands(frame, starts or {}) + frame.axes(x_label, y_label)
    colours = {name: _colour(index) for index, name in enumerate(lines)}
    for name, points in lines.items():
        parts.append(_line(frame, name, points, colours[name]))
    dot_title = ""
    if dot:
        (x, y), dot_title = dot
        title = _tag("title", dot_title)
        parts.append(_tag("circle", title, class_="dot", cx=frame.left(x), cy=frame.top(y), r=4.5))
    chart = _svg(HEIGHT, parts, ", ".join(lines))
    if len(lines) > 1 or dot:
        return chart + legend(colours, dot_title)
    return chart


def _frame_of(points: Sequence[Point], *, are_losses: bool) -> _Frame:
    """Return a frame around all points, with a margin above and below."""
    xs, ys = zip(*points, strict=True)
    is_log = are_losses and 0 < 10 * min(ys) <= max(ys)
    if is_log:
        ys = tuple(map(math.log10, ys))
    margin = 0.04 * (max(ys) - min(ys))
    return _Frame((min(xs), max(xs)), (min(ys) - margin, max(ys) + margin), is_log)


def _line(frame: _Frame, name: str, points: Sequence[Point], colour: str) -> Markup:
    """Return a line through points, or a dot for a single one."""
    if len(points) == 1:
        x, y = points[0]
        title = _tag("title", f"{name}: {number(y)}")
        return _tag("circle", title, style=f"fill:{colour}", cx=frame.left(x), cy=frame.top(y), r=3)
    places = " ".join(f"{frame.left(x):.1f},{frame.top(y):.1f}" for x, y in points)
    return _tag("polyline", _tag("title", name), class_="line", style=f"stroke:{colour}", points=places)


_FIRST_ATTEMPT = "attempt 1"
#: Width from which a band contains its name, such as `attempt 12`.
_NAMED_WIDTH = 80


def _bands(frame: _Frame, starts: Mapping[float, str]) -> list[Markup]:
    """Return the attempts as bands between dashed lines, with the names of those that are wide enough."""
    low, high = frame.x
    inside = {x: name for x, name in starts.items() if low < x <= high}
    earlier = [(x, name) for x, name in starts.items() if x <= low]
    _, first = max(earlier, default=(0, _FIRST_ATTEMPT))
    if not inside and first == _FIRST_ATTEMPT:
        return []
    names = [first, *inside.values()]
    edges = [_LEFT, *map(frame.left, inside), _RIGHT]
    bands = list(pairwise(edges))
    shaded = "".join(f"M{left:.1f} {_TOP}H{right:.1f}V{_BOTTOM}H{left:.1f}Z" for left, right in bands[1::2])
    lines = "".join(f"M{left:.1f} {_TOP}V{_BOTTOM}" for left, _ in bands[1:])
    parts = [_tag("path", class_="band", d=shaded), _tag("path", class_="mark", d=lines)]
    for name, (left, right) in zip(names, bands, strict=True):
        if right - left > _NAMED_WIDTH:
            parts.append(_text("tick mid", name, (left + right) / 2, _TOP - 2))
    return parts


def shade(share: float) -> str:
    """Return the class of a cell by a number from 0 (lightest) to 1 (darkest)."""
    return f"h{min(NUM_SHADES - 1, int(share * NUM_SHADES))}"


#: Attempts with a row of their own in the timeline.
MAX_ATTEMPTS = 40
#: Intervals of an attempt that are drawn; of more, those of the same cause with a short gap are joined.
MAX_INTERVALS = 300
#: Height of a row of the timeline, and of the bars in it.
_ROW_HEIGHT = 22
_BAR_HEIGHT = 16
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
    scale = (_RIGHT - _ROW_LEFT) / (high - low or 1.0)
    bottom = _ROW_HEIGHT * len(attempts) + 4
    label = f"{unit} since the beginning"
    parts = [_text("label mid", label, (_ROW_LEFT + _RIGHT) / 2, bottom + 28)]
    for tick in ticks(low / unit_s, high / unit_s, 8):
        x = _ROW_LEFT + (tick * unit_s - low) * scale
        grid = _tag("path", class_="grid", d=f"M{x:.1f} 0V{bottom}")
        parts += [grid, _text("tick mid", number(tick), x, bottom + 13)]
    for index, attempt in enumerate(attempts):
        top = index * _ROW_HEIGHT + 4
        row_name = f"attempt {attempt}" if attempt else "between attempts"
        parts.append(_text("row", row_name, 0, top + 12))
        intervals = [interval for interval in shown if interval.attempt == attempt]
        intervals.sort(key=lambda interval: interval.began)
        for interval in joined(intervals, seconds / MAX_INTERVALS):
            left = _ROW_LEFT + (interval.began - began - low) * scale
            spent_s = interval.ended - interval.began
            width = max(0.75, spent_s * scale)
            title = f"{interval.cause}: {duration(spent_s)}"
            parts.append(_rect(f"var(--{interval.cause})", title, left, top, width, _BAR_HEIGHT))
    return _svg(bottom + 34, parts, label)


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
    """Return a figure of a trainer as SVG or as an HTML table."""
    match figure:
        case Matrix():
            return _matrix(figure)
        case Curves(lines=lines):
            drawn = {name: [(x, y) for x, y in points] for name, points in lines.items()}
            return line_chart(drawn, x_label=figure.x_label, y_label=figure.y_label)
        case Histogram():
            return _histogram(figure)


def _histogram(figure: Histogram) -> Markup:
    edges = figure.edges
    counts = figure.counts
    frame = _Frame((edges[0], edges[-1]), (0.0, max(*counts, 1e-9)))
    parts = frame.axes(figure.x_label, figure.y_label)
    for (begin, end), count in zip(pairwise(edges), counts, strict=True):
        left = frame.left(begin)
        top = frame.top(count)
        width = max(0.5, frame.left(end) - left - 1)
        title = f"{number(begin)} to {number(end)}: {number(count)}"
        parts.append(_rect(_colour(0), title, left + 0.5, top, width, _BOTTOM - top))
    return _svg(HEIGHT, parts, figure.y_label)


def _matrix(matrix: Matrix) -> Markup:
    """Return a table whose cells are shaded by their share of the row."""
    head = Markup("").join(_tag("th", name) for name in matrix.names)
    rows = [_tag("tr", Markup("<th></th>") + head)]
    for name, values in zip(matrix.names, matrix.values, strict=True):
        total = sum(map(abs, values)) or 1.0
        cells = [_tag("td", number(value), class_=f"n {shade(abs(value) / total)}") for value in values]
        rows.append(_tag("tr", _tag("th", name) + Markup("").join(cells)))
    caption = _tag("caption", f"rows: {matrix.row_label}, columns: {matrix.column_label}")
    table = _tag("table", caption + Markup("").join(rows), class_="matrix")
    return _tag("div", table, class_="scroll")


MAX_CHARTS = 24
MAX_LINES = 8
#: Points of a line are thinned to the lowest and highest of each of these columns.
_COLUMNS = 240


@dataclass(frozen=True, kw_only=True)
class Chart:
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
        monitor: the primary metric. It has no chart here if it would be alone in it: see `primary_chart`.
        facts: of the run; with them, charts show where attempts begin.
    """
    keys_by_title = {title: _matching(series, patterns) for title, patterns in declared.items()}
    in_declared = {key for keys in keys_by_title.values() for key in keys}
    others = [key for key in series if not is_hidden(key) and key not in in_declared]
    groups: dict[str, list[str]] = {}
    for key in sorted(others, key=lambda key: (not key.startswith("train"), key)):
        groups.setdefault(group_of(key), []).append(key)
    titles = [title for title in ranked(groups, group_of(monitor)) if groups[title] != [monitor]]
    draw = partial(_chart, series=series, facts=facts)
    declared_charts = [draw(title, keys) for title, keys in keys_by_title.items() if keys]
    other_charts = [draw(title, groups[title]) for title in titles[:MAX_CHARTS]]
    return list(filter(None, declared_charts)), list(filter(None, other_charts))


def _matching(keys: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return sorted(key for key in keys if any(fnmatchcase(key, pattern) for pattern in patterns))


def _chart(
    title: str,
    keys: Sequence[str],
    series: Mapping[str, Series],
    facts: RunFacts | None,
    dot: tuple[Point, str] | None = None,
) -> Chart | None:
    lines = {}
    for key in keys[:MAX_LINES]:
        points = series[key].points
        lines[key] = sorted({*points[:1], *thinned(points, _COLUMNS), *points[-1:]})
    figure = line_chart(lines, x_label="step", starts=_starts(series, facts), dot=dot)
    notes = []
    for key in keys:
        logged = series[key]
        if logged.num_not_finite:
            notes.append(
                f"{key}: {logged.num_not_finite} of {logged.num_points} values are not finite,"
                f" first at step {logged.first_not_finite}"
            )
    if len(keys) > MAX_LINES:
        notes.append(f"{len(keys) - MAX_LINES} more metrics are not shown")
    if not figure and not notes:
        return None
    if len(keys) == 1:
        title = keys[0]
    return Chart(title=title, figure=figure, note="; ".join(notes))


def _starts(series: Mapping[str, Series], facts: RunFacts | None) -> dict[float, str]:
    """Return the names of the attempts by the step at which each begins."""
    first_steps: dict[float, int] = {}
    if ATTEMPT in series:
        first_steps = {number: step for step, number in series[ATTEMPT].points}
    if facts is not None and not facts.is_script:  # a trainer's attempt begins before it first logs
        for attempt in facts.attempts:
            if attempt.first_step is not None:
                first_steps[attempt.number] = attempt.first_step
    return {step: f"attempt {number:.0f}" for number, step in first_steps.items()}


def primary_chart(facts: RunFacts, series: Mapping[str, Series]) -> Chart | None:
    """Return the curve of the monitored metric with the best checkpoint; None if nothing was logged."""
    if facts.monitor not in series:
        return None
    dot = None
    if facts.best is not None:
        text = f"best checkpoint: {facts.best_text(number(facts.best_value))} at step {facts.best.step:,}"
        dot = (facts.best.step, facts.best_value), text
    return _chart(facts.monitor, [facts.monitor], series, facts, dot=dot)
