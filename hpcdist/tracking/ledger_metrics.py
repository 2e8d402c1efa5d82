"""The ledger of a run as metrics of MLflow."""

from __future__ import annotations

import logging
import time

from hpcdist.errors import RunFolderError
from hpcdist.review.ledger import CAUSES, Ledger, read_ledger
from hpcdist.run.folder import RunDir, State
from hpcdist.tracking.journal_tail import Point
from hpcdist.tracking.mlflow_run import MlflowRun

log = logging.getLogger(__name__)
#: Interval of the metrics of a running run.
INTERVAL_S = 60.0
PREFIX = "ledger/"


class LedgerMetrics:
    """Logs the ledger of a run once a minute, and whenever its state changes."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._logged = float("-inf")
        self._state: tuple[str, int] | None = None

    def ship(self, state: State, mlflow: MlflowRun) -> None:
        """Log the ledger if it is due. A run of an older hpcdist has none. Raises TrackingError like `log_points`."""
        now, mark = time.monotonic(), (state.status, state.attempt)
        if mark == self._state and (state.status != "running" or now - self._logged < INTERVAL_S):
            return
        beat = self._run.attempt(state.attempt).read_beat(0) if state.attempt else None
        try:
            ledger = read_ledger(self._run)
        except RunFolderError as error:  # a damaged file, which must not prevent the upload of everything else
            log.warning("the ledger of %s is not uploaded: %s", self._run.name, error)
            ledger = Ledger()
        if found := points(ledger, int(beat["step"]) if beat is not None else 0):
            mlflow.log_points(found)
        self._state, self._logged = mark, now


def points(ledger: Ledger, step: int) -> list[Point]:
    """Return the ledger as points at a step: GPU-hours or core-hours by cause, goodput, queue time and energy.

    Their time is the end of the ledger, so that another upload of the same ledger adds no points.
    """
    if not ledger.entries or not ledger.intervals:
        return []
    sums = ledger.by(lambda entry: entry.cause)
    values: dict[str, float] = {cause: sums.get(cause, 0.0) / 3600 for cause in CAUSES}
    values |= {"allocated": ledger.allocated_s / 3600, "goodput": ledger.goodput, "queue": ledger.queue_s / 3600}
    if ledger.energy_kwh is not None:
        values["energy_kwh"] = ledger.energy_kwh
    time_ms = int(1000 * max(interval.ended for interval in ledger.intervals))
    return [Point(key=PREFIX + name, value=value, time_ms=time_ms, step=step) for name, value in values.items()]
