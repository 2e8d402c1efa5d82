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
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, WIDTH - 12, 10, HEIGHT - 36
#: Left end of the bars of a row, after its name.
_ROW_LEFT = 110
#: Number of colours in the style sheet (`--c0`, `--c1`, …), and of shades of the cells of a matrix (`.h0`, …).
NUM_COLOURS, NUM_SHADES = 12, 9


def number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers between two numbers."""
    rough = (high - low) / count
    if not 0 < rough < math.inf:
        return [low]
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5, 10) if factor * power >= rough), rough)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step * (1 + 1e-12)) + 1)]


def powers(low: float, high: float) -> list[float]:
    """Return round numbers between two powers of ten, given by their exponents."""
    step = max(1, math.ceil((high - low) / 6))
    exponents = range(math.floor(low / step) * step, math.ceil(high) + 1, step)
    found = [factor * 10.0**one for one in exponents for factor in ((1, 2, 5) if high - low < 3 else (1,))]
    return [one for one in found if low <= math.log10(one) <= high]


def _tag(name: str, content: str = "", **attributes: object) -> Markup:
    """Return an element; names of attributes have `_` instead of `-`, and at the end after a keyword of Python."""
    words = [
        Markup(' {}="{}"').format(
            key.rstrip("_").replace("_", "-"), f"{value:.1f}" if isinstance(value, float) else value
        )
        for key, value in attributes.items()
    ]
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
        return _LEFT + _share(x, self.x) * (_RIGHT - _LEFT)

    def top(self, y: float) -> float:
        return _BOTTOM - _share(math.log10(y) if self.is_log else y, self.y) * (_BOTTOM - _TOP)

    def axes(self, x_label: str, y_label: str) -> list[Markup]:
        y_ticks = powers(*self.y) if self.is_log else ticks(*self.y)
        grid = "".join(f"M{_LEFT} {self.top(y):.1f}H{_RIGHT}" for y in y_ticks)
        label = f"translate(12 {(_TOP + _BOTTOM) / 2:.1f}) rotate(-90)"
        return [
            _tag("path", class_="grid", d=grid),
            *(_text("tick", number(y), _LEFT - 5, self.top(y) + 3.5) for y in y_ticks),
            *(_text("tick mid", number(x), self.left(x), _BOTTOM + 14) for x in ticks(*self.x, 8)),
            _tag("path", class_="axis", d=f"M{_LEFT} {_BOTTOM}H{_RIGHT}"),
            _text("label mid", x_label, (_LEFT + _RIGHT) / 2, HEIGHT - 6),
            _tag("text", y_label, class_="label mid", transform=label),
        ]


def _share(value: float, ends: Point) -> float:
    return (value - ends[0]) / (ends[1] - ends[0]) if ends[1] > ends[0] else 0.5


def _svg(height: int, parts: Iterable[Markup], label: str) -> Markup:
    return _tag("svg", Markup("").join(parts), viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label)


def legend(colours: Mapping[str, str], dot: str = "") -> Markup:
    items = [_tag("span", swatch(colour) + name) for name, colour in colours.items()]
    items += [_tag("span", _tag("i", class_="dot") + dot)] if dot else []
    return _tag("div", Markup("").join(items), class_="legend")


def swatch(colour: str) -> Markup:
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
    shown = [point for points in lines.values() for point in points] + ([dot[0]] if dot else [])
    xs, ys = zip(*shown, strict=True)
    if is_log := all("loss" in name.lower() for name in lines) and 0 < 10 * min(ys) <= max(ys):
        ys = tuple(map(math.log10, ys))
    margin = 0.04 * (max(ys) - min(ys))
    frame = _Frame((min(xs), max(xs)), (min(ys) - margin, max(ys) + margin), is_log)
    parts = _bands(frame, starts or {}) + frame.axes(x_label, y_label)
    colours = {name: _colour(index) for index, name in enumerate(lines)}
    for name, points in lines.items():
        if len(points) == 1:
            x, y = points[0]
            title, style = _tag("title", f"{name}: {number(y)}"), f"fill:{colours[name]}"
            parts.append(_tag("circle", title, style=style, cx=frame.left(x), cy=frame.top(y), r=3))
        else:
            places = " ".join(f"{frame.left(x):.1f},{frame.top(y):.1f}" for x, y in points)
            title, style = _tag("title", name), f"stroke:{colours[name]}"
            parts.append(_tag("polyline", title, class_="line", style=style, points=places))
    if dot:
        (x, y), text = dot
        parts.append(_tag("circle", _tag("title", text), class_="dot", cx=frame.left(x), cy=frame.top(y), r=4.5))
    chart = _svg(HEIGHT, parts, ", ".join(lines))
    return chart + legend(colours, dot[1] if dot else "") if len(lines) > 1 or dot else chart


def _bands(frame: _Frame, starts: Mapping[float, str]) -> list[Markup]:
    """Return the attempts as bands between dashed lines, with the names of those that are wide enough."""
    shown = {x: name for x, name in starts.items() if frame.x[0] < x <= frame.x[1]}
    first = max(((x, name) for x, name in starts.items() if x <= frame.x[0]), default=(0, "attempt 1"))[1]
    ends = [*map(frame.left, shown), _RIGHT] if shown or first != "attempt 1" else []
    bands = list(zip((first, *shown.values()), [_LEFT, *ends], ends, strict=False))
    shaded = "".join(f"M{a:.1f} {_TOP}H{b:.1f}V{_BOTTOM}H{a:.1f}Z" for _, a, b in bands[1::2])
    names = [_text("tick mid", name, (a + b) / 2, _TOP - 2) for name, a, b in bands if b - a > 80]
    lines = "".join(f"M{a:.1f} {_TOP}V{_BOTTOM}" for _, a, _ in bands[1:])
    return [_tag("path", class_="band", d=shaded), _tag("path", class_="mark", d=lines), *names] if bands else []


def shade(share: float) -> str:
    return f"h{min(NUM_SHADES - 1, int(share * NUM_SHADES))}"


#: Attempts with a row of their own in the timeline.
MAX_ATTEMPTS = 40
#: Intervals of an attempt that are drawn; of more, those of the same cause with a short gap are joined.
MAX_INTERVALS = 300


def timeline(ledger: Ledger) -> Markup:
    """Return a row of bars for each attempt over a common time axis, in the colours of the causes."""
    began = min(interval.began for interval in ledger.intervals)
    seconds = max(interval.ended for interval in ledger.intervals) - began
    unit, unit_s = ("hours", 3600.0) if seconds > 7200 else ("minutes", 60.0) if seconds > 180 else ("seconds", 1.0)
    attempts = sorted({interval.attempt for interval in ledger.intervals})[-MAX_ATTEMPTS:]
    shown = sorted((one for one in ledger.intervals if one.attempt in attempts), key=lambda one: one.began)
    low, high = shown[0].began - began, max(one.ended for one in shown) - began
    scale = (_RIGHT - _ROW_LEFT) / (high - low or 1.0)
    bottom, label = 22 * len(attempts) + 4, f"{unit} since the beginning"
    parts = [_text("label mid", label, (_ROW_LEFT + _RIGHT) / 2, bottom + 28)]
    for tick in ticks(low / unit_s, high / unit_s, 8):
        x = _ROW_LEFT + (tick * unit_s - low) * scale
        grid = _tag("path", class_="grid", d=f"M{x:.1f} 0V{bottom}")
        parts += [grid, _text("tick mid", number(tick), x, bottom + 13)]
    for index, attempt in enumerate(attempts):
        top = index * 22 + 4
        parts.append(_text("row", f"attempt {attempt}" if attempt else "between attempts", 0, top + 12))
        for one in joined([one for one in shown if one.attempt == attempt], seconds / MAX_INTERVALS):
            left, spent_s = _ROW_LEFT + (one.began - began - low) * scale, one.ended - one.began
            title = f"{one.cause}: {duration(spent_s)}"
            parts.append(_rect(f"var(--{one.cause})", title, left, top, max(0.75, spent_s * scale), 16))
    return _svg(bottom + 34, parts, label)


def joined(intervals: Sequence[Interval], gap_s: float) -> list[Interval]:
    """Join intervals of the same cause that follow each other within `gap_s`, if there are too many to draw."""
    if len(intervals) <= MAX_INTERVALS:
        return list(intervals)
    found: dict[str, list[Interval]] = {}
    for interval in intervals:
        own = found.setdefault(interval.cause, [])
        if own and interval.began - own[-1].ended <= gap_s:
            interval = replace(own[-1], ended=max(own.pop().ended, interval.ended))
        own.append(interval)
    # Long ones first, so that short ones are drawn over them.
    flat = [interval for own in found.values() for interval in own]
    return sorted(flat, key=lambda interval: interval.began - interval.ended)


def draw(figure: Figure) -> Markup:
    match figure:
        case Matrix():
            return _matrix(figure)
        case Curves(lines=lines):
            drawn = {name: [(x, y) for x, y in points] for name, points in lines.items()}
            return line_chart(drawn, x_label=figure.x_label, y_label=figure.y_label)
        case Histogram(edges=edges, counts=counts):
            frame = _Frame((edges[0], edges[-1]), (0.0, max(*counts, 1e-9)))
            parts = frame.axes(figure.x_label, figure.y_label)
            for (begin, end), count in zip(pairwise(edges), counts, strict=True):
                left, top = frame.left(begin), frame.top(count)
                title = f"{number(begin)} to {number(end)}: {number(count)}"
                width = max(0.5, frame.left(end) - left - 1)
                parts.append(_rect(_colour(0), title, left + 0.5, top, width, _BOTTOM - top))
            return _svg(HEIGHT, parts, figure.y_label)


def _matrix(matrix: Matrix) -> Markup:
    """Return a table whose cells are shaded by their share of the row."""
    rows = [_tag("tr", Markup("<th></th>") + Markup("").join(_tag("th", name) for name in matrix.names))]
    for name, values in zip(matrix.names, matrix.values, strict=True):
        total = sum(map(abs, values)) or 1.0
        cells = [_tag("td", number(value), class_=f"n {shade(abs(value) / total)}") for value in values]
        rows.append(_tag("tr", _tag("th", name) + Markup("").join(cells)))
    caption = _tag("caption", f"rows: {matrix.row_label}, columns: {matrix.column_label}")
    return _tag("div", _tag("table", caption + Markup("").join(rows), class_="matrix"), class_="scroll")


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
    """Return the charts that a trainer declares, and those of the other metrics, one for training and evaluation."""
    draw = partial(_chart, series=series, facts=facts)
    own = {
        title: sorted(key for key in series if any(fnmatchcase(key, pattern) for pattern in patterns))
        for title, patterns in declared.items()
    }
    shown = {key for key in series if not is_hidden(key)} - {key for keys in own.values() for key in keys}
    groups: dict[str, list[str]] = {}
    for key in sorted(shown, key=lambda key: (not key.startswith("train"), key)):
        groups.setdefault(group_of(key), []).append(key)
    charts = [draw(title, keys) for title, keys in own.items() if keys]
    titles = [one for one in ranked(groups, group_of(monitor)) if groups[one] != [monitor]]  # it has its own place
    others = [draw(title, groups[title]) for title in titles[:MAX_CHARTS]]
    return [one for one in charts if one], [one for one in others if one]


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
    marks = {number: step for step, number in series[ATTEMPT].points} if ATTEMPT in series else {}
    if facts is not None and not facts.is_script:  # a trainer's attempt begins before it first logs
        marks |= {one.number: one.first_step for one in facts.attempts if one.first_step is not None}
    starts: dict[float, str] = {step: f"attempt {number:.0f}" for number, step in marks.items()}
    figure = line_chart(lines, x_label="step", starts=starts, dot=dot)
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


def primary_chart(facts: RunFacts, series: Mapping[str, Series]) -> Chart | None:
    """Return the curve of the monitored metric with the best checkpoint; None if nothing was logged."""
    if facts.monitor not in series:
        return None
    dot = None
    if facts.best is not None:
        text = f"best checkpoint: {facts.best_text(number(facts.best_value))} at step {facts.best.step:,}"
        dot = (facts.best.step, facts.best_value), text
    return _chart(facts.monitor, [facts.monitor], series, facts, dot=dot)
