"""Drawings of the ledger, the timeline and the figures of a trainer."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

from hpcdist.review.charts import (
    NUM_SHADES,
    Bar,
    Line,
    bar_rows,
    heat_map,
    histogram_chart,
    legend,
    line_chart,
    number,
)
from hpcdist.review.figures import Curves, Figure, Histogram, Matrix, Text
from hpcdist.review.ledger import CAUSES, Interval, Ledger

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
