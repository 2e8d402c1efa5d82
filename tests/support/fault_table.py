"""The table at the end of `make faults`: one row per fault and trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

COLUMNS = ("fault", "trainer", "s", "steps lost", "starts", "attempts", "restarts", "weights", "points", "MLflow", "")


@dataclass
class Cell:
    """A row of the table. Tests fill it in step by step, so that a failed test leaves a partial row."""

    fault: str
    trainer: str
    seconds: float = 0.0
    steps_lost: int | None = None  #: total number of steps that were repeated
    starts: int | None = None  #: of the Slurm job
    attempts: int | None = None
    restarts: int | None = None
    weights: str = "?"
    points: str = "?"
    mlflow: str = "?"
    verdict: str = "not run"


def as_lines(cells: Sequence[Cell]) -> list[str]:
    """Render the table with aligned columns."""
    rows = [COLUMNS]
    for cell in cells:
        values = [getattr(cell, field.name) for field in fields(cell)]
        rows.append(tuple(f"{v:.0f}" if isinstance(v, float) else "-" if v is None else str(v) for v in values))
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


@dataclass(frozen=True)
class MatrixEntry:
    """One entry of the matrix of container runtimes and faults."""

    runtime: str
    fault: str
    verdict: str  #: `12 s`, `FAILED` or `skipped`


def matrix_lines(entries: Sequence[MatrixEntry]) -> list[str]:
    """Render one row per runtime and one column per fault."""
    runtimes, faults = (list(dict.fromkeys(getattr(e, name) for e in entries)) for name in ("runtime", "fault"))
    verdicts = {(entry.runtime, entry.fault): entry.verdict for entry in entries}
    rows = [["runtime", *faults], *([r, *(verdicts.get((r, fault), "-") for fault in faults)] for r in runtimes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(faults) + 1)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
