"""Charts as inline SVG, without scripts: the style sheet of the page sets their colours, also for dark mode.

All texts are escaped by `Markup.format`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

Point = tuple[float, float]

WIDTH, HEIGHT = 640, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 10, 36
#: Number of colours in the style sheet (`.c0`, `.c1`, …), and of shades of a heat map (`.h0`, …).
NUM_COLOURS, NUM_SHADES = 12, 9


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    name: str
    points: Sequence[Point]  #: in the order of x
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """A part of a horizontal bar."""

    begin: float
    end: float
    colour: int
    title: str  #: shown by a browser under the pointer


def number(value: float) -> str:
    """Return a number in at most about seven characters."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers between two numbers."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    if not rough or not math.isfinite(rough):
        return [low, high]
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5, 10) if factor * power >= rough), rough)
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step * (1 + 1e-12)) + 1)] or [low, high]


@dataclass(frozen=True)
class _Frame:
    """The coordinates of a chart: a range of values on each axis."""

    x: Point
    y: Point
    height: int = HEIGHT

    def left(self, x: float) -> float:
        return _LEFT + _share(x, self.x) * (WIDTH - _LEFT - _RIGHT)

    def top(self, y: float) -> float:
        return self.height - _BOTTOM - _share(y, self.y) * (self.height - _TOP - _BOTTOM)

    def axes(self, x_label: str, y_label: str) -> Markup:
        bottom, right = self.height - _BOTTOM, WIDTH - _RIGHT
        parts = [
            Markup('<path class="grid" d="M{:.1f} {:.1f}H{}"/><text class="tick" x="{}" y="{:.1f}">{}</text>').format(
                _LEFT, self.top(y), right, _LEFT - 5, self.top(y) + 3.5, number(y)
            )
            for y in ticks(*self.y)
        ]
        parts += [
            Markup('<text class="tick mid" x="{:.1f}" y="{}">{}</text>').format(self.left(x), bottom + 14, number(x))
            for x in ticks(*self.x, 8)
        ]
        parts.append(Markup('<path class="axis" d="M{} {}H{}"/>').format(_LEFT, bottom, right))
        parts.append(
            Markup('<text class="label mid" x="{:.1f}" y="{}">{}</text>').format(
                (_LEFT + right) / 2, self.height - 6, x_label
            )
        )
        middle = (_TOP + bottom) / 2
        parts.append(
            Markup('<text class="label mid" transform="translate(12 {:.1f}) rotate(-90)">{}</text>').format(
                middle, y_label
            )
        )
        return Markup("").join(parts)


def _share(value: float, ends: Point) -> float:
    return (value - ends[0]) / (ends[1] - ends[0]) if ends[1] > ends[0] else 0.5


def _range(values: Sequence[float], margin: float = 0.0) -> Point:
    low, high = min(values, default=0.0), max(values, default=1.0)
    space = margin * (high - low)
    return low - space, high + space


def _svg(height: float, content: Markup, label: str) -> Markup:
    return Markup('<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, height, label, content
    )


def legend(colours: Mapping[str, int]) -> Markup:
    """Return the names of the lines or parts of a chart with their colours."""
    items = [
        Markup('<span class="key"><i class="b{}"></i>{}</span>').format(colour % NUM_COLOURS, name)
        for name, colour in colours.items()
    ]
    return Markup('<div class="legend">{}</div>').format(Markup("").join(items))


def line_chart(
    lines: Sequence[Line], *, x_label: str, y_label: str = "", marks: Mapping[float, str] | None = None
) -> Markup:
    """Return a chart of lines with a legend if there are several; empty without any point.

    Args:
        marks: x of vertical lines, such as the first step of an attempt, with their titles.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return Markup()
    frame = _Frame(
        _range([x for line in lines for x, _ in line.points]),
        _range([y for line in lines for _, y in line.points], 0.04),
    )
    parts = [frame.axes(x_label, y_label)]
    for x, title in (marks or {}).items():
        if frame.x[0] < x <= frame.x[1]:
            parts.append(
                Markup('<path class="mark" d="M{:.1f} {}V{}"><title>{}</title></path>').format(
                    frame.left(x), _TOP, frame.height - _BOTTOM, title
                )
            )
    parts += [_path(frame, line, index % NUM_COLOURS) for index, line in enumerate(lines)]
    chart = _svg(frame.height, Markup("").join(parts), ", ".join(line.name for line in lines))
    return chart + legend({line.name: index for index, line in enumerate(lines)}) if len(lines) > 1 else chart


def _path(frame: _Frame, line: Line, colour: int) -> Markup:
    if len(line.points) == 1:
        x, y = line.points[0]
        return Markup('<circle class="f{}" cx="{:.1f}" cy="{:.1f}" r="3"><title>{}: {}</title></circle>').format(
            colour, frame.left(x), frame.top(y), line.name, number(y)
        )
    places = " ".join(f"{frame.left(x):.1f},{frame.top(y):.1f}" for x, y in line.points)
    dashed = " dashed" if line.dashed else ""
    return Markup('<polyline class="line l{}{}" points="{}"><title>{}</title></polyline>').format(
        colour, dashed, places, line.name
    )


def histogram_chart(edges: Sequence[float], counts: Sequence[float], *, x_label: str, y_label: str) -> Markup:
    """Return bars over the intervals between `edges`."""
    frame = _Frame((edges[0], edges[-1]), (0.0, max(*counts, 1e-9)))
    bottom = frame.height - _BOTTOM
    parts = [frame.axes(x_label, y_label)]
    for (begin, end), count in zip(pairwise(edges), counts, strict=True):
        left, top = frame.left(begin), frame.top(count)
        parts.append(
            Markup(
                '<rect class="f0" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
            ).format(
                left + 0.5,
                top,
                max(0.5, frame.left(end) - left - 1),
                bottom - top,
                f"{number(begin)} to {number(end)}: {number(count)}",
            )
        )
    return _svg(frame.height, Markup("").join(parts), y_label)


def bar_rows(rows: Mapping[str, Sequence[Bar]], *, x_label: str, label_width: int = 110) -> Markup:
    """Return a row of bars for each name over a common axis, such as the phases of each attempt."""
    bars = [bar for row in rows.values() for bar in row]
    if not bars:
        return Markup()
    low, high = min(bar.begin for bar in bars), max(bar.end for bar in bars)
    scale = (WIDTH - label_width - _RIGHT) / (high - low or 1.0)
    row_height = 22
    bottom = row_height * len(rows) + 4
    parts = [
        Markup('<path class="grid" d="M{0:.1f} 0V{1}"/><text class="tick mid" x="{0:.1f}" y="{2}">{3}</text>').format(
            label_width + (x - low) * scale, bottom, bottom + 13, number(x)
        )
        for x in ticks(low, high, 8)
    ]
    parts.append(
        Markup('<text class="label mid" x="{:.1f}" y="{}">{}</text>').format(
            (label_width + WIDTH - _RIGHT) / 2, bottom + 28, x_label
        )
    )
    for index, (name, row) in enumerate(rows.items()):
        top = index * row_height + 4
        parts.append(Markup('<text class="row" x="0" y="{}">{}</text>').format(top + 12, shortened(name, 18)))
        parts += [
            Markup('<rect class="f{}" x="{:.2f}" y="{}" width="{:.2f}" height="16"><title>{}</title></rect>').format(
                bar.colour % NUM_COLOURS,
                label_width + (bar.begin - low) * scale,
                top,
                max(0.75, (bar.end - bar.begin) * scale),
                bar.title,
            )
            for bar in row
        ]
    return _svg(bottom + 34, Markup("").join(parts), x_label)


def heat_map(
    rows: Mapping[str, Sequence[float | None]], *, x_label: str, x_range: Point, unit: str = "", label_width: int = 110
) -> Markup:
    """Return a row of shaded cells for each name; a darker shade is a higher value.

    Args:
        rows: equally many values for each name; None leaves a cell empty.
        x_range: values of the axis at the left and at the right end.
    """
    known = [value for row in rows.values() for value in row if value is not None]
    if not known:
        return Markup()
    low, high = min(known), max(known)
    num_columns = max(map(len, rows.values()))
    width = (WIDTH - label_width - _RIGHT) / num_columns
    height = 14 if len(rows) > 12 else 20
    shades: list[list[str]] = [[] for _ in range(NUM_SHADES)]
    parts = []
    for index, (name, row) in enumerate(rows.items()):
        top = index * height + 2
        parts.append(Markup('<text class="row" x="0" y="{}">{}</text>').format(top + height - 5, shortened(name, 18)))
        for column, value in enumerate(row):
            if value is not None:
                shade = min(NUM_SHADES - 1, int(_share(value, (low, high)) * NUM_SHADES)) if high > low else 0
                left = label_width + column * width
                shades[shade].append(f"M{left:.1f} {top}h{width:.1f}v{height - 2}h-{width:.1f}z")
    # One path per shade: a rectangle per cell would need ten times the space.
    parts += [
        Markup('<path class="h{}" d="{}"/>').format(shade, "".join(cells))
        for shade, cells in enumerate(shades)
        if cells
    ]
    bottom = len(rows) * height + 4
    for share in (0.0, 0.5, 1.0):
        x = x_range[0] + share * (x_range[1] - x_range[0])
        parts.append(
            Markup('<text class="tick mid" x="{:.1f}" y="{}">{}</text>').format(
                label_width + share * (WIDTH - label_width - _RIGHT - 14), bottom + 12, number(round(x))
            )
        )
    parts.append(
        Markup('<text class="label mid" x="{:.1f}" y="{}">{}</text>').format(
            label_width + (WIDTH - label_width) / 4, bottom + 12, x_label
        )
    )
    return _svg(bottom + 20, Markup("").join(parts), x_label) + _shade_legend(low, high, unit)


def _shade_legend(low: float, high: float, unit: str) -> Markup:
    cells = Markup("").join(Markup('<i class="hb{}"></i>').format(shade) for shade in range(NUM_SHADES))
    return Markup('<div class="legend">{}{} {} {}{}</div>').format(number(low), unit, cells, number(high), unit)


def shortened(text: str, length: int) -> str:
    """Return a text of at most `length` characters; the middle of a longer one is left out."""
    if len(text) <= length:
        return text
    half = (length - 1) // 2
    return f"{text[:half]}…{text[-half:]}"
