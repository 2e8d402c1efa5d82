"""Writes the report of a run (`report.html`) in the shipper: after each change of the run's state, and now and then."""

from __future__ import annotations

import logging
import math
import time

from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.tracking.journal.metric_series import read_series
from hpcdist.tracking.journal.shipping_state import ShippingState

log = logging.getLogger(__name__)

#: Minimum interval between two reports of a run whose state does not change …
INTERVAL_S = 300.0
#: … and minimum ratio of the interval to the duration of writing one, since the shipper does nothing else meanwhile.
COST_FACTOR = 100.0


class ReportWriter:
    """Writes the report of one run when it is due."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._next = -math.inf
        self._tried = ""

    def write_if_due(self, state: State, progress: ShippingState) -> None:
        """Write the report if the run has another state than in the last one. A failure is logged, not raised.

        Args:
            progress: its `report` names the state in the last report.
        """
        ended = state.status in ENDED
        # Records may arrive after the end.
        mark = f"{state.status} {state.attempt}" + (f" {progress.num_points}" if ended else "")
        if mark in (progress.report, self._tried) and (ended or time.monotonic() < self._next):
            return
        self._tried = mark
        began = time.monotonic()
        try:
            # Imported here: other commands that import the shipper draw nothing.
            from hpcdist.review.html_report import write_report

            write_report(self._run, read_series(self._run))
            progress.report = mark
        except Exception:  # a report must not stop the upload of the metrics
            log.warning("the report of %s cannot be written", self._run.name, exc_info=True)
        self._next = time.monotonic() + max(INTERVAL_S, COST_FACTOR * (time.monotonic() - began))
