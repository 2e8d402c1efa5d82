"""History of an attempt: `attempt.json` of the supervisor, and `training.json` of rank 0, in the attempt's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcdist.errors import RunFolderError
from hpcdist.files.atomic import read_json, write_json
from hpcdist.files.formats import fill
from hpcdist.run.attempt import Attempt

#: Maximum length of a reason and of the name of a dataset.
_MAX_TEXT = 2000


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """The content of `attempt.json`. Times are seconds since the epoch.

    An attempt without `ended` is live, or its supervisor was killed.
    """

    started: float
    num_ranks: int = 0
    nodes: list[str] = field(default_factory=list)
    time_limit: float | None = None  #: end of the allocation; None without a time limit
    ended: float | None = None
    status: str = ""  #: `finished`, `stopped`, `cancelled` or `failed`
    reason: str = ""  #: one sentence: the cause of the end


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
    """The content of `training.json`: what rank 0 trains in this attempt."""

    first_step: int = 0  #: steps done when the attempt began: that of the restored checkpoint
    began: float | None = None  #: when training began, in seconds since the epoch
    num_parameters: int | None = None  #: trainable parameters of the whole model
    datasets: tuple[Dataset, ...] = ()


def start_record(attempt: Attempt, *, num_ranks: int, nodes: Sequence[str], time_limit: float | None) -> None:
    """Write `attempt.json` at the start of an attempt. Raises OSError if that fails."""
    _write(attempt, AttemptRecord(started=time.time(), num_ranks=num_ranks, nodes=list(nodes), time_limit=time_limit))


def end_record(attempt: Attempt, status: str, reason: str) -> None:
    """Add the end to `attempt.json`. Raises OSError if that fails."""
    started = read_attempt(attempt) or AttemptRecord(started=time.time())
    _write(attempt, replace(started, ended=time.time(), status=status, reason=reason[:_MAX_TEXT]))


def _write(attempt: Attempt, record: AttemptRecord) -> None:
    write_json(attempt.path / "attempt.json", asdict(record))


def read_attempt(attempt: Attempt) -> AttemptRecord | None:
    """Return the supervisor's record; None if there is none or it is damaged."""
    path = attempt.path / "attempt.json"
    raw = _read(path)
    try:
        return None if raw is None else fill(AttemptRecord, raw, path)
    except RunFolderError:
        return None


def write_training(attempt: Attempt, record: TrainingRecord) -> None:
    """Replace `training.json`. Raises OSError if it cannot be written."""
    write_json(attempt.path / "training.json", asdict(record))


def read_training(attempt: Attempt) -> TrainingRecord | None:
    """Return rank 0's record; None if there is none or it is damaged."""
    path = attempt.path / "training.json"
    raw = _read(path)
    if raw is None:
        return None
    found = raw.pop("datasets", None)
    try:
        record = fill(TrainingRecord, raw, path)
        datasets = tuple(fill(Dataset, item, path) for item in found or () if isinstance(item, Mapping))
    except (RunFolderError, TypeError):
        return None
    return replace(record, datasets=datasets)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except (RunFolderError, OSError):
        return None
