"""Parts of charts as SVG: elements, axes, legends, numbers on axes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hpcdist.review.markdown import one_line

# Inline SVG, without scripts: the style sheet of the page sets its colours, also for dark mode. `Markup.format` escapes
# all texts.

Point = tuple[float, float]

WIDTH, HEIGHT = 640, 236
LEFT = 74
RIGHT = WIDTH - 12
TOP = 10
BOTTOM = HEIGHT - 42
#: Share of the vertical axis that is free above and below the points.
_Y_MARGIN = 0.04
_RADIUS = 4
#: Number of colours in the style sheet (`--c0`, `--c1`, …).
NUM_COLOURS = 12
#: Colour of lines and dots without a name of their own.
OTHER_COLOUR = "var(--muted)"
#: Whole numbers from here on have an exponent, because an axis has no space for more digits.
_LARGE = 1e6
#: Numbers from here on have no decimals: they have four digits before them.
_THOUSAND = 1e3
#: A logarithmic axis of fewer powers of ten also has ticks at 2 and 5 times a power.
_FEW_POWERS = 3


def number(value: float) -> str:
    """Return a number with four significant digits; below a million, whole numbers and thousands with all digits."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) < _LARGE and (value == int(value) or abs(value) >= _THOUSAND):
        return f"{round(value):,}"
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


def tag(name: str, content: str = "", **attributes: object) -> Markup:
    """Return an element.

    Names of attributes have `_` instead of `-`, and end with `_` if they are a keyword of Python.
    """
    words = []
    for key, value in attributes.items():
        if isinstance(value, float):
            value = f"{value:.1f}"
        words.append(Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value))
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup("").join(words), content)


def rect(colour: str, title: str, x: float, y: float, width: float, height: float) -> Markup:
    return tag("rect", tag("title", title), style=f"fill:{colour}", x=x, y=y, width=width, height=height)


def text_at(kind: str, text: str, x: float, y: float) -> Markup:
    return tag("text", text, class_=kind, x=x, y=y)


def colour_of(index: int) -> str:
    return f"var(--c{index % NUM_COLOURS})"


@dataclass(frozen=True)
class ChartFrame:
    """The coordinates of a chart: a range of values on each axis."""

    x: Point  #: on a logarithmic axis the logarithms of the values, as in `y`
    y: Point
    is_log: bool = False  #: of the vertical axis
    is_log_x: bool = False
    x_names: Sequence[str] = ()  #: of the values 0, 1, 2, … of a horizontal axis without numbers

    def left(self, x: float) -> float:
        """Return the horizontal position of a value."""
        if self.is_log_x:
            x = math.log10(x)
        return LEFT + share_of(x, self.x) * (RIGHT - LEFT)

    def top(self, y: float) -> float:
        """Return the vertical position of a value."""
        if self.is_log:
            y = math.log10(y)
        return BOTTOM - share_of(y, self.y) * (BOTTOM - TOP)

    def axes(self, x_label: str, y_label: str) -> list[Markup]:
        """Return the grid, the numbers and the labels of both axes."""
        y_ticks = powers(*self.y) if self.is_log else ticks(*self.y)
        grid = "".join(f"M{LEFT} {self.top(y):.1f}H{RIGHT}" for y in y_ticks)
        parts = [tag("path", class_="grid", d=grid)]
        for y in y_ticks:
            parts.append(text_at("tick", number(y), LEFT - 5, self.top(y) + 3.5))
        for x, name in self._x_ticks():
            parts.append(text_at("tick mid", name, self.left(x), BOTTOM + 14))
        parts.append(tag("path", class_="axis", d=f"M{LEFT} {BOTTOM}H{RIGHT}"))
        parts.append(text_at("label mid", x_label, (LEFT + RIGHT) / 2, HEIGHT - 6))
        rotated = f"translate(12 {(TOP + BOTTOM) / 2:.1f}) rotate(-90)"
        parts.append(tag("text", y_label, class_="label mid", transform=rotated))
        return parts

    def _x_ticks(self) -> list[tuple[float, str]]:
        if self.x_names:
            return [(float(index), name) for index, name in enumerate(self.x_names)]
        values = powers(*self.x) if self.is_log_x else ticks(*self.x, 8)
        return [(x, number(x)) for x in values]


def frame_of(
    points: Sequence[Point],
    *,
    x_margin: float = 0.0,
    is_log: bool = False,
    is_log_x: bool = False,
    x_names: Sequence[str] = (),
) -> ChartFrame:
    """Return a frame around all points, with a margin above and below.

    Args:
        x_margin: share of the horizontal axis that is free on each side of the points.
        is_log: whether the vertical axis is logarithmic.
    """
    xs, ys = zip(*points, strict=True)
    if is_log_x:
        xs = tuple(map(math.log10, xs))
    if is_log:
        ys = tuple(map(math.log10, ys))
    x = _with_margin(xs, x_margin)
    return ChartFrame(x, _with_margin(ys, _Y_MARGIN), is_log=is_log, is_log_x=is_log_x, x_names=x_names)


def _with_margin(values: Sequence[float], share: float) -> Point:
    """Return the ends of an axis. Equal values are in its middle."""
    width = max(values) - min(values) or abs(max(values)) or 1.0
    margin = share * width
    return min(values) - margin, max(values) + margin


def spans_power_of_ten(values: Iterable[float]) -> bool:
    """Return whether positive values differ by a factor of at least ten."""
    numbers = list(values)
    return 0 < 10 * min(numbers) <= max(numbers)


def places_of(frame: ChartFrame, points: Iterable[Point]) -> str:
    """Return points as the attribute `points` of a line or an area."""
    return " ".join(f"{frame.left(x):.1f},{frame.top(y):.1f}" for x, y in points)


def line(frame: ChartFrame, name: str, points: Sequence[Point], colour: str) -> Markup:
    """Return a line through points, or a dot for a single one."""
    if len(points) == 1:
        return dot_at(frame, points[0], colour, f"{name}: {number(points[0][1])}")
    title = tag("title", name)
    return tag("polyline", title, class_="line", style=f"stroke:{colour}", points=places_of(frame, points))


def dot_at(frame: ChartFrame, point: Point, colour: str, title: str) -> Markup:
    """Return a dot with a title that appears under the mouse pointer."""
    x, y = point
    return tag("circle", tag("title", title), style=f"fill:{colour}", cx=frame.left(x), cy=frame.top(y), r=_RADIUS)


def share_of(value: float, ends: Point) -> float:
    """Return the place of a value between two ends as a number from 0 to 1; the middle if they are equal."""
    low, high = ends
    if high > low:
        return (value - low) / (high - low)
    return 0.5


def svg(height: int, parts: Iterable[Markup], label: str) -> Markup:
    """Return an image of parts.

    Args:
        height: in the unit of WIDTH. Pages scale the image; MLflow's viewer shows none without a size.
        label: for readers who cannot see it.
    """
    box = f"0 0 {WIDTH} {height}"
    content = Markup("").join(parts)
    return tag("svg", content, width=WIDTH, height=height, viewBox=box, role="img", aria_label=label)


#: Side of the coloured squares in a legend, and the height of its rows.
_SWATCH = 11
_LEGEND_ROW = 20
#: Space between the label of the horizontal axis and the legend.
_LEGEND_GAP = 8
#: Characters of a name in a legend; shorter names have two columns.
_MAX_NAME = 64
_SHORT_NAME = 28


def with_legend(parts: Iterable[Markup], colours: Mapping[str, str], label: str, dot: str = "") -> Markup:
    """Return a chart with the names of its lines below it, which an image file needs as well.

    Args:
        colours: by name, empty for an entry without a colour; without names there is no legend.
        label: of the chart, see `svg`.
        dot: the name of the marked point; empty without one.
    """
    drawn = list(parts)
    names = [*colours, dot] if dot else list(colours)
    num_columns = 2
    if any(len(name) > _SHORT_NAME for name in names):
        num_columns = 1
    for index, name in enumerate(names):
        row, column = divmod(index, num_columns)
        left = LEFT + column * (RIGHT - LEFT) / num_columns
        top = float(HEIGHT + _LEGEND_GAP + row * _LEGEND_ROW)
        if colours.get(name):
            drawn.append(rect(colours[name], name, left, top, _SWATCH, _SWATCH))
        elif name == dot:
            radius = _SWATCH / 2
            drawn.append(tag("circle", class_="dot", cx=left + radius, cy=top + radius, r=radius))
        drawn.append(text_at("row", one_line(name, _MAX_NAME), left + _SWATCH + 6, top + _SWATCH - 1))
    height = HEIGHT
    if names:
        height += _LEGEND_GAP + math.ceil(len(names) / num_columns) * _LEGEND_ROW
    return svg(height, drawn, label)


def swatch(colour: str) -> Markup:
    """Return a small square in a colour."""
    return tag("i", style=f"background:{colour}")
