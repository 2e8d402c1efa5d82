"""The rows of csv files in which a script logs its metrics."""

import csv
import io
from pathlib import Path
from typing import NamedTuple

from hpcdist.host.files import read_regular

#: Columns that hold the step of a row, the first one that a file has counts. Case does not matter.
STEP_COLUMNS = ("step", "global_step", "iteration", "iter", "epoch")
#: Words in the name of a log. A file without them and without a column of steps is a table, such as predictions.
LOG_WORDS = ("metric", "log", "progress", "history", "summary")
#: Larger files are no logs.
MAX_BYTES = 16 << 20
MAX_COLUMNS = 500
#: From here on, floats do not hold all integers.
_MAX_STEP = 2**53


class NotALog(ValueError):
    """A csv file holds a table, but no log."""


class LogRow(NamedTuple):
    """The numbers of a row, and its step: that of its column, else the number of the row, from 0."""

    step: int
    metrics: dict[str, float]


def read_rows(
    path: Path, done: int, *, start: int = 0, end: int | None = None, final: bool
) -> tuple[list[LogRow], int]:
    """Return the new rows of a log, and the number of rows in it.

    Loggers append rows, or write the whole file again, also with more columns. A file with fewer rows than before is a
    new one.

    Args:
        done: number of rows that earlier calls have returned; -1 in the first call.
        start: in the first call, size of the file before the script has opened it: the rows in it belong to another
            writer.
        end: size of the part that is read; None: the whole file.
        final: the last line is complete even if it has no end.

    Raises OSError, NotALog, and ValueError if the file is damaged or too large.
    """
    data = read_regular(path, MAX_BYTES)[:end]
    table = _table(data, final=final)
    if done < 0:
        done = max(0, len(_table(data[:start], final=False)) - 1)
    if not table:
        return [], 0
    header = [name.strip() for name in table[0]]
    lower = [name.lower() for name in header]
    steps = [lower.index(name) for name in STEP_COLUMNS if name in lower]
    if not steps and not any(word in path.name.lower() for word in LOG_WORDS):
        raise NotALog(f"no column is called {' or '.join(STEP_COLUMNS)}, and {path.name} is not the name of a log")
    if len(header) > MAX_COLUMNS:
        raise ValueError(f"{len(header)} columns, more than {MAX_COLUMNS}")
    rows = table[1:]
    if len(rows) < done:
        done = 0
    step_column = steps[0] if steps else None
    return [_row(header, row, step_column, number) for number, row in enumerate(rows) if number >= done], len(rows)


def _table(data: bytes, *, final: bool) -> list[list[str]]:
    """Return the complete lines of a file, header included."""
    if not final:
        data = data[: data.rfind(b"\n") + 1]
    text = data.decode("utf-8-sig", errors="replace")
    try:
        return [cells for cells in csv.reader(io.StringIO(text, newline="")) if cells]
    except csv.Error as error:
        raise ValueError(str(error)) from error


def _row(header: list[str], cells: list[str], step_column: int | None, number: int) -> LogRow:
    values: dict[str, float] = {}
    step = number
    for column, (name, cell) in enumerate(zip(header, cells, strict=False)):
        value = _number(cell)
        if value is None or not name:
            continue
        if column != step_column:
            values[name] = value
        elif value.is_integer() and abs(value) < _MAX_STEP:  # neither NaN nor infinite
            step = int(value)
    return LogRow(step, values)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
