"""The report of a run that is being uploaded."""

import logging
import math
import time

from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.tracking.series import read_last_values, read_series
from hpcdist.tracking.upload_state import state_key

log = logging.getLogger(__name__)
#: Minimum interval between two reports of a run in the same state.
REPORT_INTERVAL_S = 300.0


class ReportWriter:
    """Writes the report of a run to its folder."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._next = -math.inf
        self._tried = ""

    def write_if_due(self, state: State, last: str, *, has_new_points: bool) -> bool:
        """Write the report if the run has another state than in the last one. Returns whether it was written.

        A failure is logged, not raised. New points may arrive after the end of the run.
        """
        current = state_key(state)
        if current in (last, self._tried):
            is_due = has_new_points if state.status in ENDED else time.monotonic() >= self._next
            if not is_due:
                return False
        self._tried = current
        try:
            from hpcdist.review.report import write_report  # other commands that import this module draw nothing

            write_report(self._run, read_series, read_last_values)
        except Exception:  # a report must not stop the upload of the metrics
            log.warning("the report of %s cannot be written", self._run.name, exc_info=True)
            return False
        finally:
            self._next = time.monotonic() + REPORT_INTERVAL_S
        return True
