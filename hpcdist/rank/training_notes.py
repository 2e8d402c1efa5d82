"""Rank 0's record of what an attempt trains: datasets, model size, and the step at which the attempt began."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from hpcdist.run.attempt import Attempt
from hpcdist.run.training_record import Dataset, TrainingRecord, write_training

log = logging.getLogger(__name__)


class TrainingNotes:
    """Writes `training.json` of an attempt at each change; does nothing on ranks other than 0."""

    def __init__(self, attempt: Attempt, *, is_main: bool) -> None:
        self._attempt = attempt
        self._is_main = is_main
        self._record = TrainingRecord()

    def begin(self, first_step: int) -> None:
        """Record the start of training: the number of steps that earlier attempts have done."""
        self._write(replace(self._record, first_step=first_step, began=time.time()))

    def add_dataset(self, dataset: Dataset) -> None:
        """Record a dataset; a second one of the same name and split replaces the first."""
        others = [one for one in self._record.datasets if (one.name, one.split) != (dataset.name, dataset.split)]
        self._write(replace(self._record, datasets=(*others, dataset)))

    def set_num_parameters(self, num_parameters: int) -> None:
        """Record the number of the model's parameters."""
        self._write(replace(self._record, num_parameters=num_parameters))

    def _write(self, record: TrainingRecord) -> None:
        if not self._is_main or record == self._record:
            return
        self._record = record
        try:
            write_training(self._attempt, record)
        except OSError as error:
            log.warning("training.json of attempt %d cannot be written: %s", self._attempt.number, error.strerror)
