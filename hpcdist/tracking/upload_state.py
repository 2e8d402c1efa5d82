"""The data of a run that MLflow already has: states from which the next process continues after any end of the last.

Only its owner writes the file of a state.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from hpcdist.errors import RunFolderError, TrackingError
from hpcdist.host.files import write_atomic
from hpcdist.host.json_files import fill, read_json, stamped
from hpcdist.run.folder import State


@dataclass(kw_only=True)
class Sent:
    """A state of the upload in the folder of the journal; the subclasses name its file."""

    FILE: ClassVar[str]
    run_id: str = ""  #: of MLflow

    @classmethod
    def load(cls, folder: Path, run_id: str = "") -> Self:
        """Return the state in the journal's folder.

        If the file is missing, damaged or about another MLflow run than `run_id`, the upload starts from the
        beginning, which is safe.
        """
        path = folder / cls.FILE
        raw = read_json(path) or {}
        try:
            saved = fill(cls, raw, path)
        except RunFolderError:
            return cls(run_id=run_id)
        if run_id not in ("", saved.run_id):
            return cls(run_id=run_id)
        return saved

    def save(self, folder: Path) -> None:
        """Replace the file of the state. Raises TrackingError."""
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
    report: str = ""  #: state of the run in `report.html` (`state_key`)
    complete: str = ""  #: ended state of which MLflow had everything (`state_key`)


@dataclass(kw_only=True)
class SentFiles(Sent):
    """The files and models in MLflow; the owner is `Uploads`."""

    FILE = "sent-files.json"
    artifacts: dict[str, str] = field(default_factory=dict)
    """Artifact → fingerprint of the uploaded file."""
    model: dict[str, str] = field(default_factory=dict)
    """The final model: `fingerprint`, `model_id` and, if it is registered, `registered` (name/version)."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """Checkpoint folder → fingerprint of the manifest that its logged model has completely."""


def state_key(state: State) -> str:
    """Return a text that differs between the starts and ends of a run."""
    return f"{state.status} {state.attempt}"
