"""The file `training.json` of an attempt, which rank 0 writes: devices, datasets, size of the model and first step."""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from hpcdist.errors import RunFolderError
from hpcdist.host.json_files import fill, read_json, write_json
from hpcdist.host.machine import cpu_name
from hpcdist.run.folder import Attempt, RunDir

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """A dataset that the trainer has used."""

    name: str
    split: str = "train"
    num_samples: int | None = None
    digest: str = ""  #: at most 36 characters, equal for equal content
    source: str = ""  #: where the data comes from, such as a folder or a URL


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """The content of `training.json`."""

    #: Step of the restored checkpoint, or 0; None if it is unknown, as for a script that reports every hundredth step.
    first_step: int | None = 0
    counts_from_zero: bool = False  #: whether `first_step` itself is the first step of the attempt, as of some scripts
    began: float | None = None  #: when training began, in seconds since the epoch
    num_parameters: int | None = None  #: trainable parameters of the whole model
    datasets: tuple[DatasetRecord, ...] = ()
    cpu: str = ""  #: CPU of the node of rank 0: `AMD EPYC 7B13, 8 logical CPUs`
    devices: str = ""  #: devices of all ranks, for a script those of rank 0: `2 × NVIDIA H100 80GB HBM3`, or `CPU`

    @property
    def step_before(self) -> int | None:
        """The step before the first one of the attempt, -1 if that is 0; None if it is unknown."""
        if self.first_step is None or not self.counts_from_zero:
            return self.first_step
        return self.first_step - 1


def write_training(attempt: Attempt, record: TrainingRecord) -> None:
    write_json(attempt.path / "training.json", asdict(record))


def read_training(attempt: Attempt) -> TrainingRecord | None:
    """Return the record of an attempt; None if it is missing or damaged."""
    path = attempt.path / "training.json"
    try:
        raw = read_json(path)
        if raw is None:
            return None
        entries = raw.pop("datasets", None)
        if not isinstance(entries, list):
            entries = []
        datasets = tuple(fill(DatasetRecord, entry, path) for entry in entries if isinstance(entry, Mapping))
        return replace(fill(TrainingRecord, raw, path), datasets=datasets)
    except (RunFolderError, OSError):
        return None


def devices_of(run: RunDir) -> tuple[str, str]:
    """Return the devices of the ranks, and the CPU of rank 0; empty if they are unknown."""
    for attempt in reversed(run.attempts()):
        record = read_training(attempt)
        if record is not None and record.devices:
            return record.devices, record.cpu
    return "", ""


class TrainingNotes:
    """Writes `training.json` of an attempt after each change, on rank 0 only."""

    def __init__(self, attempt: Attempt, *, is_main: bool) -> None:
        self._attempt = attempt
        self._is_main = is_main
        self._record = TrainingRecord()

    def begin(self, first_step: int | None) -> None:
        """Record that training begins now, after `first_step` steps; None if their number is unknown."""
        self._write(replace(self._record, first_step=first_step, began=time.time()))

    def set_first_step(self, first_step: int, *, counts_from_zero: bool) -> None:
        """Record after how many steps the training has begun.

        Args:
            counts_from_zero: the first step has the number `first_step`, not the one after it.
        """
        self._write(replace(self._record, first_step=first_step, counts_from_zero=counts_from_zero))

    def add_dataset(self, dataset: DatasetRecord) -> None:
        """Add a dataset; it replaces one of the same name and split."""
        others = []
        for other in self._record.datasets:
            if (other.name, other.split) != (dataset.name, dataset.split):
                others.append(other)
        self._write(replace(self._record, datasets=(*others, dataset)))

    def set_num_parameters(self, num_parameters: int) -> None:
        self._write(replace(self._record, num_parameters=num_parameters))

    def set_devices(self, devices: str) -> None:
        self._write(replace(self._record, devices=devices, cpu=cpu_name()))

    def _write(self, record: TrainingRecord) -> None:
        if not self._is_main or record == self._record:
            return
        self._record = record
        try:
            write_training(self._attempt, record)
        except OSError as error:
            log.warning("training.json of attempt %d cannot be written: %s", self._attempt.number, error.strerror)
