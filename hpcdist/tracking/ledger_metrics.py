"""The ledger of a run as metrics in MLflow."""

import logging
import time

from hpcdist.errors import RunFolderError
from hpcdist.review.ledger import Ledger, read_ledger
from hpcdist.run.folder import RunDir, State
from hpcdist.run.reached_steps import reached_step
from hpcdist.tracking.metric_point import Point
from hpcdist.tracking.mlflow_client import MlflowRun, translated
from hpcdist.tracking.upload_state import state_key

log = logging.getLogger(__name__)
#: Interval of the metrics of a running run.
LEDGER_INTERVAL_S = 60.0
#: MLflow draws the charts of metrics in the order of their prefixes: these come after `eval/` and `train/`.
LEDGER_PREFIX = "usage/"
#: Significant digits: MLflow's list of runs shows all digits of a number.
_DIGITS = 4


class LedgerMetrics:
    """Logs the ledger of a run once a minute while it runs, and when it has stopped or ended.

    The step of a record is the last training step, or the one after the step of the record before if that is larger:
    training steps are repeated after a restart, and accounting may change the ledger of an ended run. No two records
    have the same step, and a later record has a later time, also if another process uploads it: the first request is
    for the last record in MLflow.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._logged_at = time.monotonic()
        self._state = ""
        self._values: dict[str, float] | None = None  #: in MLflow; None if not known
        self._step, self._time_ms = 0, 0  #: of these values

    def ship(self, state: State, mlflow_run: MlflowRun) -> None:
        """Log the ledger if it is due. A run of which nothing was measured has none. Raises TrackingError."""
        now = time.monotonic()
        current = state_key(state)
        is_due = current != self._state
        if state.status == "running":
            is_due = now - self._logged_at >= LEDGER_INTERVAL_S
        if not is_due:
            return
        try:
            ledger = read_ledger(self._run)
            last_step = reached_step(self._run.attempt(state.attempt)) if state.attempt else 0
        except RunFolderError as error:  # a damaged file, which must not prevent the upload of everything else
            log.warning("the ledger of %s is not uploaded: %s", self._run.name, error)
            ledger = Ledger()
            last_step = 0
        values = _ledger_values(ledger)
        if values:
            if self._values is None:
                self._values = self._read_last(mlflow_run)
            known = self._values
            if not values.items() <= known.items():
                step = max(last_step, self._step + 1)
                time_ms = max(self._time_ms + 1, int(1000 * ledger.ended))
                self._values = None  # if the response is lost
                mlflow_run.log_points([Point(key, value, time_ms, step) for key, value in values.items()])
                self._values = values
                self._step = step
                self._time_ms = time_ms
        self._state = current
        self._logged_at = now

    def _read_last(self, mlflow_run: MlflowRun) -> dict[str, float]:
        """Return the last values in MLflow, and note their step and time."""
        logged = mlflow_run.current().data.metrics
        values = {key: value for key, value in logged.items() if key.startswith(LEDGER_PREFIX)}
        history = []
        if values:
            key = f"{LEDGER_PREFIX}allocated_hours"
            with translated(mlflow_run.uri):
                history = mlflow_run.client.get_metric_history(mlflow_run.run_id, key)
        self._step, self._time_ms = max(((point.step, point.timestamp) for point in history), default=(0, 0))
        return values


def _ledger_values(ledger: Ledger) -> dict[str, float]:
    """Return the metrics of a ledger; empty if nothing was measured. Its causes are in the description and report."""
    if not ledger.entries:
        return {}
    values = {"allocated_hours": ledger.allocated_s / 3600, "queue_hours": ledger.queue_s / 3600}
    if ledger.goodput is not None:
        values["goodput"] = ledger.goodput
    if ledger.energy_kwh is not None:
        values["energy_kwh"] = ledger.energy_kwh
    return {LEDGER_PREFIX + name: float(f"{value:.{_DIGITS}g}") for name, value in values.items()}
