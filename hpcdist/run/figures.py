"""Figures that a trainer writes with `ReportData.figure`: small JSON files that the report draws beside its metrics."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpcdist.errors import RunFolderError
from hpcdist.host.files import write_atomic
from hpcdist.host.json_files import fill, read_json_value, stamped, unstamped
from hpcdist.host.retry import retry

log = logging.getLogger(__name__)

#: Folder of the figures among the artifacts of a run.
FOLDER = "figures"
MAX_BYTES = 1 << 20
#: Limits of the figures that the report draws.
MAX_CLASSES = 100
MAX_LINES = 8
MAX_POINTS = 2000
MAX_BINS = 20


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Numbers by row and column, such as a confusion matrix."""

    title: str
    row_label: str
    column_label: str
    names: list[str]  #: names of the rows, and of the columns; at most MAX_CLASSES
    values: list[list[float]]  #: as many rows and columns as names
    step: int = 0  #: steps done, set by `ReportData.figure`


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Lines over a common axis, such as a calibration curve."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, list[list[float]]]  #: name → pairs (x, y) in the order of x
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Numbers of samples in intervals of a value."""

    title: str
    x_label: str
    y_label: str
    edges: list[float]  #: edges of the intervals, ascending
    counts: list[float]  #: number of samples in each interval; one entry less than `edges`
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text, such as one that a language model has written."""

    title: str
    text: str
    step: int = 0


Figure = Matrix | Curves | Histogram | Text
KINDS: dict[str, type[Figure]] = {"matrix": Matrix, "curves": Curves, "histogram": Histogram, "text": Text}


def histogram(title: str, values: Sequence[float], *, x_label: str, y_label: str) -> Histogram:
    """Return the histogram of values, in at most MAX_BINS intervals of equal width, without those that are not finite.

    Without any finite value it has one empty interval.
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return Histogram(title=title, x_label=x_label, y_label=y_label, edges=[0.0, 1.0], counts=[0.0])
    low, high = min(values), max(values)
    num_bins = 1
    if high > low:
        num_bins = min(MAX_BINS, len(values))
    width = (high - low) / num_bins or 1.0
    counts = [0.0] * num_bins
    for value in values:
        counts[min(num_bins - 1, int((value - low) / width))] += 1
    edges = [low + width * number for number in range(num_bins + 1)]
    return Histogram(title=title, x_label=x_label, y_label=y_label, edges=edges, counts=counts)


def write_figure(artifacts: Path, name: str, figure: Figure, step: int | None = None) -> None:
    """Write a figure atomically. A failure is only logged, because a run does not end for a figure."""
    kind = next(name for name, figure_class in KINDS.items() if isinstance(figure, figure_class))
    content = {"kind": kind, **asdict(figure), "step": step or figure.step}
    path = artifacts / FOLDER / f"{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(stamped(content)) + "\n")
    except OSError as error:
        log.warning("the figure %s cannot be written: %s", path, error.strerror)


def read_figures(artifacts: Path) -> tuple[list[Figure], list[str]]:
    """Return the figures among the artifacts of a run by file name, and a sentence for each file that is none."""
    figures: list[Figure] = []
    problems = []
    for path in sorted((artifacts / FOLDER).glob("*.json")):
        if path.name.startswith(".") or path.is_symlink():
            continue
        try:
            raw = retry(lambda path=path: read_json_value(path, MAX_BYTES), path)  # type: ignore[misc]
            if not isinstance(raw, dict) or raw.get("kind") not in KINDS:
                raise ValueError(f"its kind must be one of {', '.join(KINDS)}")
            figure: Figure = fill(KINDS[raw["kind"]], unstamped(raw, path), path)
            if not _is_regular(figure):
                raise ValueError("its numbers do not fit its names")
            figures.append(figure)
        except (RunFolderError, OSError, ValueError) as error:
            problems.append(f"{FOLDER}/{path.name} is not a figure: {error}")
    return figures, problems


def read_texts(artifacts: Path) -> tuple[Text, ...]:
    """Return the texts among the figures of a run."""
    figures, _ = read_figures(artifacts)
    return tuple(figure for figure in figures if isinstance(figure, Text))


def _is_regular(figure: Figure) -> bool:
    """Return whether the numbers of a figure fit its names, and whether the report can draw all of them."""
    match figure:
        case Matrix(names=names, values=rows):
            if not len(rows) == len(names) <= MAX_CLASSES:
                return False
            if not all(isinstance(name, str) for name in names):
                return False
            return all(_are_numbers(row) and len(row) == len(names) for row in rows)
        case Curves(lines=lines):
            return len(lines) <= MAX_LINES and all(_is_line(line) for line in lines.values())
        case Histogram(edges=edges, counts=counts):
            if not (_are_numbers(edges) and _are_numbers(counts)):
                return False
            is_ascending = all(left < right for left, right in pairwise(edges))
            return is_ascending and 0 < len(counts) == len(edges) - 1 <= MAX_POINTS
        case Text():  # the report shows the beginning of a long one
            return True


def _is_line(points: Any) -> bool:
    if not isinstance(points, list) or len(points) > MAX_POINTS:
        return False
    num_coordinates = 2
    return all(_are_numbers(point) and len(point) == num_coordinates for point in points)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) and math.isfinite(value) for value in values)
