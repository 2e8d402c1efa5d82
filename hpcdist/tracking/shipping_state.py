"""How far MLflow has a run: `journal/shipped.json`, and the rule that gives it each (key, step) once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpcdist.errors import RunFolderError, TrackingError
from hpcdist.files.formats import fill, stamped
from hpcdist.run.folder import read_json, write_atomic


@dataclass(kw_only=True)
class ShippingState:
    """All that a new shipper must know to go on where the last one ended, however that one ended."""

    run_id: str = ""  #: the MLflow run that all of this is about
    offsets: dict[str, int] = field(default_factory=dict)
    """Bytes of each journal file that MLflow has."""
    intent: dict[str, int] = field(default_factory=dict)
    """Offsets up to which records are being sent. Found again after a crash, exactly these are sent again: MLflow
    keeps one of two records that agree in key, time, step and value."""
    steps: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Metric name → attempt → lowest and highest step that MLflow has of it."""
    marks: dict[str, list[int]] = field(default_factory=dict)
    """Attempt → time in ms and step of its point in the `attempt` metric."""
    artifacts: dict[str, str] = field(default_factory=dict)
    """Artifact → fingerprint of the file when it was uploaded."""
    model: dict[str, str] = field(default_factory=dict)
    """The logged model: `fingerprint`, `model_id`, and `registered` (name/version) once it is."""
    tags: dict[str, str] = field(default_factory=dict)
    status: str = ""
    num_points: int = 0  #: sent
    num_repeated: int = 0  #: left out, because MLflow had the key's step already
    num_broken: int = 0  #: lines that held no record
    num_refused: int = 0  #: points that MLflow would not take

    @classmethod
    def load(cls, path: Path) -> ShippingState:
        """What the file says. Nothing or nonsense in it means: from the beginning, which MLflow absorbs.

        Raises RunFolderError when a newer hpcdist has written it.
        """
        raw = read_json(path) or {}
        try:
            return fill(cls, raw, path)
        except RunFolderError:
            return cls()

    def save(self, path: Path) -> None:
        """Raises TrackingError when the disk does not take it."""
        try:
            write_atomic(path, json.dumps(stamped(asdict(self)), sort_keys=True))
        except OSError as error:
            raise TrackingError(f"{path} cannot be written ({error.strerror}): make room there") from error

    def admit(self, attempt: int, key: str, step: int, was_seen: Callable[[], bool]) -> bool:
        """Whether a point is new to MLflow; it counts as shipped from then on.

        A resumed attempt does steps again that the one before had logged after its last checkpoint: what is there
        stays. Records of an earlier attempt that arrive late (a network file system shows another node's lines with
        delay) count only below the first step that a later attempt has shipped.

        Args:
            was_seen: tells for a step between this attempt's lowest and highest whether it was among them; asked
                only when a key's steps do not rise, since it is not cheap.
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
        """The step of an attempt's own point when it has none yet: its first, or the next free one."""
        if str(attempt) in self.marks or any(int(other) > attempt for other in self.marks):
            return None
        step = max([step, *(mark[1] + 1 for mark in self.marks.values())])
        self.marks[str(attempt)] = [time_ms, step]
        return step
