"""The data of a run that MLflow already has, in states from which the next process continues after any end of the last.

Each is a file in `journal/`, which only its owner writes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from hpcdist.errors import RunFolderError, TrackingError
from hpcdist.host.files import fill, read_json, stamped, write_atomic
from hpcdist.run.folder import RunDir, State


@dataclass(kw_only=True)
class Sent:
    """State from which a new shipper continues after any end of the last one."""

    FILE: ClassVar[str]
    run_id: str = ""  #: of MLflow

    @classmethod
    def load(cls, folder: Path, run_id: str = "") -> Self:
        """Return the state in the journal's folder.

        If the file is missing, damaged or about another MLflow run than `run_id`, the upload starts from the
        beginning, which is safe.

        Raises RunFolderError if a newer version of hpcdist has written the file.
        """
        path = folder / cls.FILE
        raw = read_json(path) or {}
        try:
            found = fill(cls, raw, path)
        except RunFolderError:
            found = cls(run_id=run_id)
        return found if run_id in ("", found.run_id) else cls(run_id=run_id)

    def save(self, folder: Path) -> None:
        """Write the state to the journal's folder. Raises TrackingError if that fails."""
        path = folder / self.FILE
        try:
            write_atomic(path, json.dumps(stamped(asdict(self)), sort_keys=True))
        except OSError as error:
            raise TrackingError(f"{path} cannot be written ({error.strerror}): free space there") from error


@dataclass(kw_only=True)
class SentFacts(Sent):
    """The other data of the run in MLflow; its owner is `Delivery`."""

    FILE = "sent-facts.json"
    tags: dict[str, str] = field(default_factory=dict)
    """A tag that a user changes in MLflow is not set back."""
    events: dict[str, int] = field(default_factory=dict)
    """Event file → bytes that are in MLflow."""
    page: str = ""  #: digest of the description, datasets and columns in MLflow (`RunPage`)
    report: str = ""  #: state of the run in `report.html` (`mark_of`)
    complete: str = ""  #: ended state of which MLflow had everything (`mark_of`)


@dataclass(kw_only=True)
class SentFiles(Sent):
    """The files and models in MLflow; the owner is `Uploads`."""

    FILE = "sent-files.json"
    artifacts: dict[str, str] = field(default_factory=dict)
    """Artifact → fingerprint of the uploaded file."""
    left: int = 0  #: artifacts of an ended run that are not uploaded yet
    model: dict[str, str] = field(default_factory=dict)
    """The final model: `fingerprint`, `model_id` and, if it is registered, `registered` (name/version)."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """Checkpoint folder → fingerprint of the manifest that its logged model has completely."""


def mark_of(state: State) -> str:
    """Return a text that differs between the starts and ends of a run."""
    return f"{state.status} {state.attempt}"


def upload_progress(run: RunDir) -> str:
    """Return a line on the upload of an ended run: files sent, of all. Raises RunFolderError and OSError."""
    sent = SentFiles.load(run.journal)
    num_done = len(sent.artifacts)
    return "uploading to MLflow" + (f": {num_done} of {num_done + sent.left} files" if sent.left else "")
