"""The state of the upload of a run (`journal/shipped.json`), and the rule that sends each (key, step) once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcdist.errors import RunFolderError, TrackingError
from hpcdist.files.atomic import read_json, write_atomic
from hpcdist.files.formats import fill, stamped
from hpcdist.run.folder import ENDED, RunDir, State


@dataclass(kw_only=True)
class ShippingState:
    """State from which a new shipper continues after any end of the last one."""

    run_id: str = ""  #: of MLflow
    offsets: dict[str, int] = field(default_factory=dict)
    """Journal file → bytes that are in MLflow."""
    intent: dict[str, int] = field(default_factory=dict)
    """Offsets up to which records are being sent. After a crash the same records are sent again: MLflow stores points
    that agree in key, time, step and value once."""
    steps: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Metric → attempt → lowest and highest step in MLflow."""
    closing: dict[str, int] = field(default_factory=dict)
    """Attempt → last interval of node metrics that is being sent; part of the intent."""
    flushing: bool = False
    """Whether the points of open buckets (`series`) are being sent; part of the intent."""
    series: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Metric → its number of points, and its open bucket (`point_budget.py`)."""
    node_intervals: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Attempt → its intervals of node metrics (`node_charts.py`)."""
    marks: dict[str, list[int]] = field(default_factory=dict)
    """Attempt → time in ms and step of its point of the metric `attempt`."""
    artifacts: dict[str, str] = field(default_factory=dict)
    """Artifact → fingerprint of the uploaded file."""
    left: int = 0  #: artifacts of an ended run that are not uploaded yet
    model: dict[str, str] = field(default_factory=dict)
    """The logged model: `fingerprint`, `model_id` and, if it is registered, `registered` (name/version)."""
    events: dict[str, int] = field(default_factory=dict)
    """Event file → bytes that are in MLflow (`rank_events.py`)."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """Checkpoint folder → fingerprint of the manifest that its logged model has completely."""
    command: dict[str, str] = field(default_factory=dict)
    """The command of the tag `hpcdist.command` that is not completely answered (`command_tag.py`)."""
    ledger_step: int = 0  #: of the last points of the ledger
    ledger_time: float = 0.0  #: their time, in seconds since the epoch
    ledger_digest: str = ""  #: their values
    tags: dict[str, str] = field(default_factory=dict)
    page: dict[str, str] = field(default_factory=dict)
    """Hashes of `description`, `datasets` and `tags`, and the `primary_metric`, see `run_page.py`."""
    status: str = ""
    complete: str = ""
    """Status and attempt at whose end MLflow had everything; empty before."""
    report: str = ""  #: state of the run in `report.html`
    num_points: int = 0  #: sent
    num_repeated: int = 0  #: omitted, since MLflow has the step of the key from an earlier attempt
    num_broken: int = 0  #: lines that are not records
    num_refused: int = 0  #: points that MLflow rejected
    num_thinned: int = 0  #: omitted beyond EXACT_POINTS, or held until their bucket ends

    @property
    def is_sending(self) -> bool:
        """Whether the last batch may have been sent partly."""
        return bool(self.intent or self.closing or self.flushing)

    def commit(self) -> None:
        """Record that MLflow has the last batch."""
        self.offsets |= self.intent
        self.intent, self.closing, self.flushing = {}, {}, False

    @classmethod
    def load(cls, path: Path) -> ShippingState:
        """Return the state in a file. A missing or damaged file means a start from the beginning, which is safe.

        Raises RunFolderError if a newer version of hpcdist has written the file.
        """
        raw = read_json(path) or {}
        try:
            return fill(cls, raw, path)
        except RunFolderError:
            return cls()

    def save(self, path: Path) -> None:
        """Write the state to a file. Raises TrackingError if that fails."""
        try:
            write_atomic(path, json.dumps(stamped(asdict(self)), sort_keys=True))
        except OSError as error:
            raise TrackingError(f"{path} cannot be written ({error.strerror}): free space there") from error

    def admit(self, attempt: int, key: str, step: int, was_seen: Callable[[], bool]) -> bool:
        """Return whether a point is new to MLflow, and record it as sent.

        A resumed attempt repeats steps that an earlier one logged after its last checkpoint: the first value is kept.
        Records of an earlier attempt that arrive late, as on a network file system, count only below the first step
        of later attempts.

        Args:
            was_seen: Returns whether a step between this attempt's lowest and highest was sent; expensive, and called
                only if the steps of a key do not increase.
        """
        shipped = self.steps.setdefault(key, {})
        for other, (low, high) in shipped.items():
            if (int(other) < attempt and step <= high) or (int(other) > attempt and step >= low):
                return False
        own = shipped.get(str(attempt))
        if own is None:
            shipped[str(attempt)] = [step, step]
        elif step > own[1]:
            own[1] = step
        elif step < own[0]:
            own[0] = step
        else:
            return step not in own and not was_seen()
        return True

    def mark(self, attempt: int, time_ms: int, step: int) -> int | None:
        """Return the step for an attempt's point of the metric `attempt`; None if it has one."""
        if str(attempt) in self.marks or any(int(other) > attempt for other in self.marks):
            return None
        step = max([step, *(mark[1] + 1 for mark in self.marks.values())])
        self.marks[str(attempt)] = [time_ms, step]
        return step


def completion_of(state: State) -> str:
    """Return the value of `ShippingState.complete` for an ended run; empty for others."""
    return f"{state.status} {state.attempt}" if state.status in ENDED else ""


def is_complete(run: RunDir) -> bool:
    """Return whether MLflow has everything of an ended run, without a request. Raises RunFolderError and OSError."""
    mark = completion_of(run.read_state())
    if not mark:
        return False
    shipped = ShippingState.load(run.journal / "shipped.json")
    return shipped.complete == mark and all(
        path.stat().st_size <= shipped.offsets.get(path.name, 0) for path in run.journal.glob("*.jsonl")
    )


def upload_progress(run: RunDir) -> str:
    """Return what the shipper of an ended run does. Raises RunFolderError and OSError."""
    shipped = ShippingState.load(run.journal / "shipped.json")
    num_done = len(shipped.artifacts)
    return "uploading to MLflow" + (f": {num_done} of {num_done + shipped.left} files" if shipped.left else "")
