"""The original names of metrics, parameters and tags with names that MLflow does not accept."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from hpcdist.errors import TrackingError
from hpcdist.files.atomic import read_json, write_json

log = logging.getLogger(__name__)

#: Length of a name in `names.json` and in a log line.
_KEPT_CHARS, _SHOWN_CHARS = 1000, 80


class ChangedNames:
    """The original of each changed name, in `journal/names.json`, which is also an artifact of the MLflow run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._originals = {key: text for key, text in (read_json(path) or {}).items() if isinstance(text, str)}

    def note(self, names: Iterable[tuple[str, str]]) -> None:
        """Record the pairs (original, cleaned) that differ, and log each of them once per run.

        Raises TrackingError if the file cannot be written.
        """
        new = {clean: name for name, clean in names if clean != name and clean not in self._originals}
        if not new:
            return
        for clean, name in new.items():
            shown = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}… ({len(name)} characters)"
            log.warning("MLflow does not accept the name %r: it is uploaded as %r", shown, clean)
            self._originals[clean] = name[:_KEPT_CHARS]
        try:
            write_json(self._path, self._originals)
        except OSError as error:
            raise TrackingError(f"{self._path} cannot be written ({error.strerror}): free space there") from error
