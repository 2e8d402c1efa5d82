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
#: Limits of what the report draws.
MAX_CLASSES = 100
MAX_LINES = 8
MAX_POINTS = 2000


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Numbers by row and column, such as a confusion matrix."""

    title: str
    row_label: str
    column_label: str
    names: list[str]  #: of the rows and of the columns, at most MAX_CLASSES
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
    edges: list[float]  #: of the intervals, ascending
    counts: list[float]  #: one less than edges
    step: int = 0


Figure = Matrix | Curves | Histogram
KINDS: dict[str, type[Figure]] = {"matrix": Matrix, "curves": Curves, "histogram": Histogram}


def histogram(title: str, values: Sequence[float], *, x_label: str, y_label: str) -> Histogram:
    """Return the histogram of some values, at least one, in at most 20 intervals of equal width."""
    low, high = min(values), max(values)
    num_bins = min(20, max(1, len(values))) if high > low else 1
    width = (high - low) / num_bins or 1.0
    counts = [0.0] * num_bins
    for value in values:
        counts[min(num_bins - 1, int((value - low) / width))] += 1
    edges = [low + width * number for number in range(num_bins + 1)]
    return Histogram(title=title, x_label=x_label, y_label=y_label, edges=edges, counts=counts)


def write_figure(artifacts: Path, name: str, figure: Figure, step: int | None = None) -> None:
    """Write a figure atomically. A failure is logged, because a figure is not worth the end of a run."""
    kind = next(key for key, known in KINDS.items() if isinstance(figure, known))
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


def _is_regular(figure: Figure) -> bool:
    match figure:
        case Matrix(names=names, values=values):
            rows = [row for row in values if _are_numbers(row) and len(row) == len(names)]
            return len(rows) == len(values) == len(names) <= MAX_CLASSES and all(
                isinstance(name, str) for name in names
            )
        case Curves(lines=lines):
            points = [point for line in lines.values() if isinstance(line, list) for point in line]
            return (
                all(isinstance(line, list) and len(line) <= MAX_POINTS for line in lines.values())
                and len(lines) <= MAX_LINES
                and all(_are_numbers(point) and len(point) == 2 for point in points)
            )
        case Histogram(edges=edges, counts=counts):
            is_ascending = _are_numbers(edges) and all(a < b for a, b in pairwise(edges))
            return is_ascending and _are_numbers(counts) and 0 < len(counts) == len(edges) - 1 <= MAX_POINTS


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(one) in (int, float) and math.isfinite(one) for one in values)
