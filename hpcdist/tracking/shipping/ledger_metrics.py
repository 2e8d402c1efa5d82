"""The ledger of a run as metrics of MLflow."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable

from hpcdist.errors import RunFolderError
from hpcdist.review.ledger import CAUSES, Ledger, read_ledger
from hpcdist.run.attempt_times import reached_step
from hpcdist.run.folder import RunDir, State
from hpcdist.tracking.client.mlflow_run import MlflowRun
from hpcdist.tracking.journal.shipping_state import ShippingState
from hpcdist.tracking.journal.tail import Point

log = logging.getLogger(__name__)
#: Interval of the metrics of a running run.
INTERVAL_S = 60.0
#: MLflow draws the charts of metrics in the order of their prefixes: these come after `eval/` and `train/`.
PREFIX = "usage/"
#: Digits after the point. MLflow's list of runs shows all digits of a number; 1e-6 hours are 3.6 ms, less than the
#: differences between the clocks of nodes, and Slurm's accounting has whole seconds.
_DIGITS = 6


class LedgerMetrics:
    """Logs the ledger of a run once a minute while it runs, and when it has stopped or ended.

    The step of a record is the last training step, or the one after the step of the record before if that is larger:
    training steps are repeated after a restart, and accounting may change the ledger of an ended run. No two records
    have the same step, and a later record has a later time, also if another process uploads it.

    Args:
        save: writes the state of the upload to its file.
    """

    def __init__(self, run: RunDir, save: Callable[[], None]) -> None:
        self._run = run
        self._save = save
        self._logged = time.monotonic()
        self._state: tuple[str, int] | None = None

    def ship(self, state: State, mlflow: MlflowRun, progress: ShippingState) -> None:
        """Log the ledger if it is due. A run of an older hpcdist has none. Raises TrackingError like `log_points`."""
        now, mark = time.monotonic(), (state.status, state.attempt)
        if (now - self._logged < INTERVAL_S) if state.status == "running" else (mark == self._state):
            return
        try:
            ledger, step = read_ledger(self._run), self._last_step(state)
        except RunFolderError as error:  # a damaged file, which must not prevent the upload of everything else
            log.warning("the ledger of %s is not uploaded: %s", self._run.name, error)
            ledger, step = Ledger(), 0
        found = points(ledger, max(step, progress.ledger_step + 1), after=progress.ledger_time)
        digest = hashlib.sha256(repr([(point.key, point.value) for point in found]).encode()).hexdigest()[:16]
        if found and digest != progress.ledger_digest:
            mlflow.log_points(found)
            progress.ledger_step, progress.ledger_time = found[0].step, found[0].time_ms / 1000
            progress.ledger_digest = digest
            self._save()
        self._state, self._logged = mark, now

    def _last_step(self, state: State) -> int:
        return reached_step(self._run.attempt(state.attempt)) if state.attempt else 0


def points(ledger: Ledger, step: int, *, after: float = 0.0) -> list[Point]:
    """Return the ledger as points: GPU-hours or core-hours by cause, goodput, queue time and energy.

    Their time is the end of the ledger.

    Args:
        step: of the points.
        after: time of the points before, in seconds since the epoch.
    """
    if not ledger.entries:
        return []
    sums = ledger.by(lambda entry: entry.cause)
    values: dict[str, float] = {cause: sums.get(cause, 0.0) / 3600 for cause in CAUSES}
    values |= {"allocated": ledger.allocated_s / 3600, "queue": ledger.queue_s / 3600}
    if ledger.goodput is not None:
        values["goodput"] = ledger.goodput
    if ledger.energy_kwh is not None:
        values["energy_kwh"] = ledger.energy_kwh
    time_ms = max(round(1000 * after) + 1, int(1000 * ledger.ended))
    return [
        Point(key=PREFIX + name, value=round(value, _DIGITS), time_ms=time_ms, step=step)
        for name, value in values.items()
    ]
