"""Find a loss that has become NaN or infinite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from hpcdist.errors import TrainerError

log = logging.getLogger(__name__)
#: Logged values in a row after which a loss is reported if `stop.nan_losses` is not set.
REPORT_AFTER = 3


class LossWatch:
    """Reports the first loss that stays NaN or infinite: a metric whose name contains `loss`.

    Args:
        limit: number of logged values in a row that ends the training, `stop.nan_losses`; None only reports it.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._rows: dict[str, tuple[int, int]] = {}
        #: The report; empty if all is well.
        self.finding = ""

    def note(self, metrics: Mapping[str, float], step: int) -> None:
        """Note the metrics of a step. Raises TrainerError at the limit."""
        for key, value in metrics.items():
            if "loss" not in key.lower() or math.isfinite(value):
                self._rows.pop(key, None)
                continue
            first, number = self._rows.get(key, (step, 0))
            self._rows[key] = first, number + 1
            if number + 1 < (self._limit or REPORT_AFTER) or self.finding:
                continue
            self.finding = f"{key} is {float(value)} since step {first} ({number + 1} logged values in a row)"
            if self._limit is not None:
                raise TrainerError(
                    f"{self.finding}, which ends the run (stop.nan_losses={self._limit}): lower the learning"
                    f" rate, clip the gradients, or check the data before step {first}"
                )
            log.info("%s", self.finding)  # a warning would repeat the message of the supervisor
