"""What an attempt trains, in `training.json` of its folder: datasets, model size, first step. Rank 0 writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from hpcdist.errors import RunFolderError
from hpcdist.files.atomic import read_json, write_json
from hpcdist.files.formats import fill
from hpcdist.run.attempt import Attempt


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset, or one split of it, that a trainer reads."""

    name: str
    split: str = "train"
    num_samples: int | None = None
    digest: str = ""  #: at most 36 characters, equal for equal content
    source: str = ""  #: where the data comes from, such as a folder or a URL


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """The content of `training.json`."""

    first_step: int = 0  #: steps done when the attempt began: that of the restored checkpoint
    began: float | None = None  #: when training began, in seconds since the epoch
    num_parameters: int | None = None  #: trainable parameters of the whole model
    datasets: tuple[Dataset, ...] = ()


def write_training(attempt: Attempt, record: TrainingRecord) -> None:
    """Replace `training.json`. Raises OSError if it cannot be written."""
    write_json(attempt.path / "training.json", asdict(record))


def read_training(attempt: Attempt) -> TrainingRecord | None:
    """Return rank 0's record; None if there is none or it is damaged."""
    path = attempt.path / "training.json"
    try:
        raw = read_json(path)
        if raw is None:
            return None
        found = raw.pop("datasets", None)
        record = fill(TrainingRecord, raw, path)
        entries = found if isinstance(found, list) else []
        datasets = tuple(fill(Dataset, entry, path) for entry in entries if isinstance(entry, Mapping))
    except (RunFolderError, OSError):
        return None
    return replace(record, datasets=datasets)
