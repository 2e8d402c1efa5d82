"""The table of all metrics of nodes, `node_metrics.csv.gz`, of runs whose nodes have no charts of their own.

Each append is a gzip member. `ShippingState` records the valid size, to which a next process truncates the file, so
that each row is in it once.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hpcdist.errors import TrackingError
from hpcdist.tracking.journal.shipping_state import ShippingState

#: Step times of a node; always columns, because they appear after the first system metrics.
STEP_TIMES = ("step_s", "data_s", "compute_s")
_KEYS = ("attempt", "node", "time_ms", "step")


class Row(NamedTuple):
    """The system metrics or the step times of a node at one time."""

    attempt: int
    node: str
    group: str  #: `system` or `time`
    time_ms: int
    step: int
    metrics: dict[str, float]


class NodeTable:
    """A CSV file with a row for each record of a node, a column for each metric, and the column `more`.

    The first rows determine the columns. `more` holds metrics that appear later, as `name=value` with a space between
    them.
    """

    def __init__(self, path: Path, progress: ShippingState) -> None:
        self._path = path
        self._progress = progress

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows in the order of attempt, node and time. Raises TrackingError if the file cannot be written."""
        ordered = sorted(rows, key=lambda row: (row.attempt, row.node, row.group, row.time_ms))
        if not ordered:
            return
        is_new = not self._progress.table_bytes or not self._path.exists()
        if not self._progress.columns:
            first = {f"{row.group}/{name}" for row in ordered for name in row.metrics}
            self._progress.columns = sorted(first | {f"time/{name}" for name in STEP_TIMES})
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if is_new:
            self._progress.table_bytes = 0
            writer.writerow([*_KEYS, *self._progress.columns, "more"])
        columns = {name: place for place, name in enumerate(self._progress.columns)}
        for row in ordered:
            cells, more = [""] * len(columns), []
            for name, value in row.metrics.items():
                place = columns.get(f"{row.group}/{name}")
                if place is None:
                    more.append(f"{row.group}/{name}={value!r}")
                else:
                    cells[place] = repr(value)
            writer.writerow([row.attempt, row.node, row.time_ms, row.step, *cells, " ".join(more)])
        member = gzip.compress(text.getvalue().encode(), mtime=0)
        try:
            self._write(member)
        except OSError as error:
            raise TrackingError(f"{self._path} cannot be written ({error.strerror}): free space there") from error
        self._progress.table_bytes += len(member)

    def _write(self, member: bytes) -> None:
        with open(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
            file.truncate(self._progress.table_bytes)
            file.seek(self._progress.table_bytes)
            file.write(member)
            file.flush()
            os.fsync(file.fileno())
