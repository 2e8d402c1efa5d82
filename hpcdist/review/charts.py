"""Charts of metrics and of ranks as SVG, for the report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from markupsafe import Markup, escape

from hpcdist.review.facts import Series, thinned
from hpcdist.review.figures import Curves, Figure, Histogram, Matrix, Text
from hpcdist.review.ledger import CAUSES, Interval, Ledger

# Charts as inline SVG, without scripts: the style sheet of the page sets their colours, also for dark mode.
#
# All texts are escaped by `Markup.format`.

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


# Drawings of the ledger, the timeline and the figures of a trainer.

#: Colours of causes and phases. A phase that is one cause has its colour; `train` consists of several causes, and time
#: in the queue is none.
_CAUSE_COLOURS: dict[str, int] = {cause: index for index, cause in enumerate(CAUSES)}
PHASE_COLOURS = {
    "queue": 10,
    "start": _CAUSE_COLOURS["start"],
    "compile": _CAUSE_COLOURS["compile"],
    "train": 11,
    "evaluate": _CAUSE_COLOURS["evaluation"],
    "save": _CAUSE_COLOURS["checkpoint"],
    "down": _CAUSE_COLOURS["down"],
}
#: Attempts with a row of their own in the timeline.
MAX_ATTEMPTS = 40
#: Intervals of an attempt that are drawn; of more, those of the same phase with a short gap are joined.
MAX_INTERVALS = 300
#: Rows of a matrix that are shown with their numbers.
_MAX_NUMBERS = 20


def duration(seconds: float) -> str:
    """Return a duration such as `2 h 05 min`, `3 min 20 s` or `4.2 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours / 24:.1f} days"


def timeline(ledger: Ledger) -> Markup:
    """Return a row of phases for each attempt over the time since the first one; empty without intervals."""
    if not ledger.intervals:
        return Markup()
    began = min(interval.began for interval in ledger.intervals)
    ended = max(interval.ended for interval in ledger.intervals)
    unit, scale = _time_unit(ended - began)
    numbers = sorted({interval.attempt for interval in ledger.intervals})[-MAX_ATTEMPTS:]
    rows = {}
    for attempt in numbers:
        own = sorted((it for it in ledger.intervals if it.attempt == attempt), key=lambda it: it.began)
        rows[f"attempt {attempt}" if attempt else "between attempts"] = [
            Bar(
                (interval.began - began) / scale,
                (interval.ended - began) / scale,
                PHASE_COLOURS[interval.phase],
                f"{interval.phase}: {duration(interval.ended - interval.began)}",
            )
            for interval in joined(own, (ended - began) / MAX_INTERVALS)
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
            last = own.pop()
            interval = Interval(
                phase=last.phase,
                attempt=last.attempt,
                began=last.began,
                ended=max(last.ended, interval.ended),
            )
        own.append(interval)
    # Long phases first, so that short ones are drawn over them.
    flat = [interval for own in found.values() for interval in own]
    return sorted(flat, key=lambda interval: interval.began - interval.ended)


def _time_unit(seconds: float) -> tuple[str, float]:
    return ("hours", 3600.0) if seconds > 7200 else ("minutes", 60.0) if seconds > 180 else ("seconds", 1.0)


def ledger_bar(ledger: Ledger) -> Markup:
    """Return one bar of the allocated time by cause; empty without entries."""
    sums = ledger.by(lambda entry: entry.cause)
    if not ledger.allocated_s:
        return Markup()
    bars, end = [], 0.0
    for cause, colour in _CAUSE_COLOURS.items():
        share = 100 * sums.get(cause, 0.0) / ledger.allocated_s
        if share:
            bars.append(Bar(end, end + share, colour, f"{cause}: {share:.1f} %"))
        end += share
    return bar_rows({"allocated": bars}, x_label="percent of the allocated time") + legend(_CAUSE_COLOURS)


def draw(figure: Figure) -> Markup:
    """Return a figure of a trainer as HTML."""
    match figure:
        case Matrix():
            return _matrix_table(figure) if len(figure.names) <= _MAX_NUMBERS else _matrix_map(figure)
        case Curves(lines=lines):
            drawn = [Line(name, [(x, y) for x, y in points]) for name, points in lines.items()]
            return line_chart(drawn, x_label=figure.x_label, y_label=figure.y_label)
        case Histogram():
            return histogram_chart(figure.edges, figure.counts, x_label=figure.x_label, y_label=figure.y_label)
        case Text(text=text):
            return Markup("<pre>{}</pre>").format(text)


def draw_patch(text: str) -> Markup:
    """Return a patch of git with its files, added and removed lines marked."""
    return Markup('<pre class="diff">{}</pre>').format(Markup("\n").join(map(_patch_line, text.splitlines())))


def _patch_line(line: str) -> Markup:
    if line.startswith("diff --git "):
        return Markup('<span class="file">{}</span>').format(line)
    if line.startswith(("+++ ", "--- ")):
        return escape(line)
    kind = {"+": "add", "-": "del"}.get(line[:1])
    return Markup('<span class="{}">{}</span>').format(kind, line) if kind else escape(line)


def _matrix_table(matrix: Matrix) -> Markup:
    """Return a table whose cells are shaded by their share of the row."""
    head = Markup("").join(Markup("<th>{}</th>").format(name) for name in matrix.names)
    rows = []
    for name, values in zip(matrix.names, matrix.values, strict=True):
        total = sum(abs(value) for value in values) or 1.0
        cells = Markup("").join(
            Markup('<td class="n hb{}">{}</td>').format(_shade(abs(value) / total), number(value)) for value in values
        )
        rows.append(Markup("<tr><th>{}</th>{}</tr>").format(name, cells))
    caption = Markup("<caption>rows: {}, columns: {}</caption>").format(matrix.row_label, matrix.column_label)
    return Markup('<div class="scroll"><table class="matrix">{}<tr><th></th>{}</tr>{}</table></div>').format(
        caption, head, Markup("").join(rows)
    )


def _matrix_map(matrix: Matrix) -> Markup:
    totals = [sum(abs(value) for value in row) or 1.0 for row in matrix.values]
    rows = {
        f"{index} {name}": [value / total for value in values]
        for index, (name, values, total) in enumerate(zip(matrix.names, matrix.values, totals, strict=True))
    }
    return heat_map(rows, x_label=f"{matrix.column_label} (share of the row)", x_range=(0, len(rows) - 1))


def _shade(share: float) -> int:
    return min(NUM_SHADES - 1, int(share * NUM_SHADES))


# Charts of the metrics of a run, and the heat map of step times by node.

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
