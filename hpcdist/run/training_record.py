"""What rank 0 writes about an attempt in `training.json`: devices, datasets, size of the model and first step."""

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
    name: str
    split: str = "train"
    num_samples: int | None = None
    digest: str = ""  #: at most 36 characters, equal for equal content
    source: str = ""  #: where the data comes from, such as a folder or a URL


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    first_step: int = 0  #: steps done when the attempt began: that of the restored checkpoint
    began: float | None = None  #: when training began, in seconds since the epoch
    num_parameters: int | None = None  #: trainable parameters of the whole model
    datasets: tuple[DatasetRecord, ...] = ()
    cpu: str = ""  #: of the node of rank 0: `AMD EPYC 7B13, 8 logical CPUs`
    devices: str = ""  #: `2 × NVIDIA H100 80GB HBM3`, or `CPU`: of all ranks; of a script those that rank 0 sees


def write_training(attempt: Attempt, record: TrainingRecord) -> None:
    write_json(attempt.path / "training.json", asdict(record))


def read_training(attempt: Attempt) -> TrainingRecord | None:
    path = attempt.path / "training.json"
    try:
        if (raw := read_json(path)) is None:
            return None
        found = raw.pop("datasets", None)
        entries = [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list) else []
        datasets = tuple(fill(DatasetRecord, entry, path) for entry in entries)
        return replace(fill(TrainingRecord, raw, path), datasets=datasets)
    except (RunFolderError, OSError):
        return None


def devices_of(run: RunDir) -> tuple[str, str]:
    """Return the devices of the ranks, and the CPU of rank 0; empty if they are unknown."""
    records = map(read_training, reversed(run.attempts()))
    return next(((one.devices, one.cpu) for one in records if one is not None and one.devices), ("", ""))


class TrainingNotes:
    """Writes `training.json` of an attempt at each change, on rank 0."""

    def __init__(self, attempt: Attempt, *, is_main: bool) -> None:
        self._attempt = attempt
        self._is_main = is_main
        self._record = TrainingRecord()

    def begin(self, first_step: int) -> None:
        self._write(replace(self._record, first_step=first_step, began=time.time()))

    def add_dataset(self, dataset: DatasetRecord) -> None:
        others = [one for one in self._record.datasets if (one.name, one.split) != (dataset.name, dataset.split)]
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
