"""Charts of metrics and of ranks as SVG, for the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup

from hpcdist.review.facts import ATTEMPT, Series, group_of, is_hidden, ranked, thinned
from hpcdist.review.figures import Curves, Figure, Histogram, Matrix, Text
from hpcdist.review.ledger import Interval, Ledger
from hpcdist.review.text import duration

# Inline SVG, without scripts: the style sheet of the page sets its colours, also for dark mode. `Markup.format` escapes
# all texts.

Point = tuple[float, float]

WIDTH, HEIGHT = 640, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, WIDTH - 12, 10, HEIGHT - 36
#: Left end of the bars of a row, after its name.
_ROW_LEFT = 110
#: Number of colours in the style sheet (`--c0`, `--c1`, …), and of shades of the cells of a matrix (`.h0`, …).
NUM_COLOURS, NUM_SHADES = 12, 9


class Bar(NamedTuple):
    begin: float
    end: float
    colour: int
    title: str  #: shown by a browser under the pointer


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


def _tag(name: str, content: str = "", **attributes: object) -> Markup:
    """Return an element; names of attributes have `_` instead of `-`, and at the end after a keyword of Python."""
    words = [
        Markup(' {}="{}"').format(
            key.rstrip("_").replace("_", "-"), f"{value:.1f}" if isinstance(value, float) else value
        )
        for key, value in attributes.items()
    ]
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup("").join(words), content)


def _rect(colour: int, title: str, x: float, y: float, width: float, height: float) -> Markup:
    style = f"fill:{_colour(colour)}"
    return _tag("rect", _tag("title", title), style=style, x=x, y=y, width=width, height=height)


def _text(kind: str, text: str, x: float, y: float) -> Markup:
    return _tag("text", text, class_=kind, x=x, y=y)


def _colour(index: int) -> str:
    return f"var(--c{index % NUM_COLOURS})"


@dataclass(frozen=True)
class _Frame:
    """The coordinates of a chart: a range of values on each axis."""

    x: Point
    y: Point

    def left(self, x: float) -> float:
        return _LEFT + _share(x, self.x) * (_RIGHT - _LEFT)

    def top(self, y: float) -> float:
        return _BOTTOM - _share(y, self.y) * (_BOTTOM - _TOP)

    def axes(self, x_label: str, y_label: str) -> list[Markup]:
        grid = "".join(f"M{_LEFT} {self.top(y):.1f}H{_RIGHT}" for y in ticks(*self.y))
        label = f"translate(12 {(_TOP + _BOTTOM) / 2:.1f}) rotate(-90)"
        return [
            _tag("path", class_="grid", d=grid),
            *(_text("tick", number(y), _LEFT - 5, self.top(y) + 3.5) for y in ticks(*self.y)),
            *(_text("tick mid", number(x), self.left(x), _BOTTOM + 14) for x in ticks(*self.x, 8)),
            _tag("path", class_="axis", d=f"M{_LEFT} {_BOTTOM}H{_RIGHT}"),
            _text("label mid", x_label, (_LEFT + _RIGHT) / 2, HEIGHT - 6),
            _tag("text", y_label, class_="label mid", transform=label),
        ]


def _share(value: float, ends: Point) -> float:
    return (value - ends[0]) / (ends[1] - ends[0]) if ends[1] > ends[0] else 0.5


def _svg(height: int, parts: Iterable[Markup], label: str) -> Markup:
    return _tag("svg", Markup("").join(parts), viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label)


def legend(colours: Mapping[str, int]) -> Markup:
    items = [
        _tag("span", _tag("i", style=f"background:{_colour(index)}") + name, class_="key")
        for name, index in colours.items()
    ]
    return _tag("div", Markup("").join(items), class_="legend")


def line_chart(
    lines: Mapping[str, Sequence[Point]], *, x_label: str, y_label: str = "", marks: Mapping[float, str] | None = None
) -> Markup:
    """Return a chart of lines, empty without any point; `marks` are vertical lines with their titles, by x."""
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return Markup()
    xs, ys = zip(*(point for points in lines.values() for point in points), strict=True)
    margin = 0.04 * (max(ys) - min(ys))
    frame = _Frame((min(xs), max(xs)), (min(ys) - margin, max(ys) + margin))
    parts = frame.axes(x_label, y_label)
    parts += [
        _tag("path", _tag("title", title), class_="mark", d=f"M{frame.left(x):.1f} {_TOP}V{_BOTTOM}")
        for x, title in (marks or {}).items()
        if frame.x[0] < x <= frame.x[1]
    ]
    for index, (name, points) in enumerate(lines.items()):
        if len(points) == 1:
            x, y = points[0]
            title, style = _tag("title", f"{name}: {number(y)}"), f"fill:{_colour(index)}"
            parts.append(_tag("circle", title, style=style, cx=frame.left(x), cy=frame.top(y), r=3))
        else:
            places = " ".join(f"{frame.left(x):.1f},{frame.top(y):.1f}" for x, y in points)
            title, style = _tag("title", name), f"stroke:{_colour(index)}"
            parts.append(_tag("polyline", title, class_="line", style=style, points=places))
    chart = _svg(HEIGHT, parts, ", ".join(lines))
    return chart + legend({name: index for index, name in enumerate(lines)}) if len(lines) > 1 else chart


def bar_rows(rows: Mapping[str, Sequence[Bar]], *, x_label: str) -> Markup:
    """Return a row of bars for each name over a common axis, such as the phases of each attempt."""
    bars = [bar for row in rows.values() for bar in row]
    low, high = min(bar.begin for bar in bars), max(bar.end for bar in bars)
    scale = (_RIGHT - _ROW_LEFT) / (high - low or 1.0)
    bottom = 22 * len(rows) + 4
    parts = [_text("label mid", x_label, (_ROW_LEFT + _RIGHT) / 2, bottom + 28)]
    for tick in ticks(low, high, 8):
        x = _ROW_LEFT + (tick - low) * scale
        parts += [
            _tag("path", class_="grid", d=f"M{x:.1f} 0V{bottom}"),
            _text("tick mid", number(tick), x, bottom + 13),
        ]
    for index, (name, row) in enumerate(rows.items()):
        top = index * 22 + 4
        parts.append(_text("row", shortened(name, 18), 0, top + 12))
        for bar in row:
            left, width = _ROW_LEFT + (bar.begin - low) * scale, max(0.75, (bar.end - bar.begin) * scale)
            parts.append(_rect(bar.colour, bar.title, left, top, width, 16))
    return _svg(bottom + 34, parts, x_label)


def _shade(share: float) -> int:
    return min(NUM_SHADES - 1, int(share * NUM_SHADES))


def shortened(text: str, length: int) -> str:
    """Return a text of at most `length` characters; the middle of a longer one is left out."""
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


PHASE_COLOURS = {
    phase: number
    for number, phase in enumerate(("queue", "start", "compile", "train", "evaluate", "save", "down", "finish"))
}
#: Attempts with a row of their own in the timeline.
MAX_ATTEMPTS = 40
#: Intervals of an attempt that are drawn; of more, those of the same phase with a short gap are joined.
MAX_INTERVALS = 300


def timeline(ledger: Ledger) -> Markup:
    began = min(interval.began for interval in ledger.intervals)
    ended = max(interval.ended for interval in ledger.intervals)
    seconds = ended - began
    unit, scale = ("hours", 3600.0) if seconds > 7200 else ("minutes", 60.0) if seconds > 180 else ("seconds", 1.0)
    rows = {}
    for attempt in sorted({interval.attempt for interval in ledger.intervals})[-MAX_ATTEMPTS:]:
        own = sorted((it for it in ledger.intervals if it.attempt == attempt), key=lambda it: it.began)
        rows[f"attempt {attempt}" if attempt else "between attempts"] = [
            Bar(
                (interval.began - began) / scale,
                (interval.ended - began) / scale,
                PHASE_COLOURS[interval.phase],
                f"{interval.phase}: {duration(interval.ended - interval.began)}",
            )
            for interval in joined(own, seconds / MAX_INTERVALS)
        ]
    return bar_rows(rows, x_label=f"{unit} since the beginning") + legend(PHASE_COLOURS)


def joined(intervals: Sequence[Interval], gap_s: float) -> list[Interval]:
    """Join intervals of the same phase that follow each other within `gap_s`, if there are too many to draw."""
    if len(intervals) <= MAX_INTERVALS:
        return list(intervals)
    found: dict[str, list[Interval]] = {}
    for interval in intervals:
        own = found.setdefault(interval.phase, [])
        if own and interval.began - own[-1].ended <= gap_s:
            interval = replace(own[-1], ended=max(own.pop().ended, interval.ended))
        own.append(interval)
    # Long phases first, so that short ones are drawn over them.
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
                parts.append(_rect(0, title, left + 0.5, top, max(0.5, frame.left(end) - left - 1), _BOTTOM - top))
            return _svg(HEIGHT, parts, figure.y_label)
        case Text(text=text):
            return Markup("<pre>{}</pre>").format(text)


def _matrix(matrix: Matrix) -> Markup:
    """Return a table whose cells are shaded by their share of the row."""
    rows = [_tag("tr", Markup("<th></th>") + Markup("").join(_tag("th", name) for name in matrix.names))]
    for name, values in zip(matrix.names, matrix.values, strict=True):
        total = sum(map(abs, values)) or 1.0
        cells = [_tag("td", number(value), class_=f"n h{_shade(abs(value) / total)}") for value in values]
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
    series: Mapping[str, Series], declared: Mapping[str, Sequence[str]], monitor: str = ""
) -> tuple[list[Chart], list[Chart]]:
    """Return the charts that a trainer declares, and those of the other metrics, one for training and evaluation."""
    own = {
        title: sorted(key for key in series if any(fnmatchcase(key, pattern) for pattern in patterns))
        for title, patterns in declared.items()
    }
    shown = {key for key in series if not is_hidden(key)} - {key for keys in own.values() for key in keys}
    groups: dict[str, list[str]] = {}
    for key in sorted(shown, key=lambda key: (not key.startswith("train"), key)):
        groups.setdefault(group_of(key), []).append(key)
    charts = [_chart(title, keys, series) for title, keys in own.items() if keys]
    others = [_chart(title, groups[title], series) for title in ranked(groups, group_of(monitor))[:MAX_CHARTS]]
    return [one for one in charts if one], [one for one in others if one]


def _chart(title: str, keys: Sequence[str], series: Mapping[str, Series]) -> Chart | None:
    lines = {}
    for key in keys[:MAX_LINES]:
        points = series[key].points
        lines[key] = sorted({*points[:1], *thinned(points, _COLUMNS), *points[-1:]})
    starts = series[ATTEMPT].points if ATTEMPT in series else []
    marks: dict[float, str] = {step: f"attempt {attempt:.0f}" for step, attempt in starts if attempt > 1}
    figure = line_chart(lines, x_label="step", marks=marks)
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
