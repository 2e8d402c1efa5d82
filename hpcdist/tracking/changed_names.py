"""The originals of names that MLflow does not accept."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from hpcdist.errors import TrackingError
from hpcdist.files.atomic import read_json, write_json

log = logging.getLogger(__name__)

#: How much of a name is kept in `names.json` and shown in a log.
_KEPT_CHARS, _SHOWN_CHARS = 1000, 80


class ChangedNames:
    """The original of every changed name: `journal/names.json`, which is also an artifact of the MLflow run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._originals = {key: text for key, text in (read_json(path) or {}).items() if isinstance(text, str)}

    def note(self, names: Iterable[tuple[str, str]]) -> None:
        """Write down the pairs (original, cleaned) that differ, and log each of them once per run.

        Raises TrackingError when the disk refuses.
        """
        new = {clean: name for name, clean in names if clean != name and clean not in self._originals}
        if not new:
            return
        for clean, name in new.items():
            shown = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}… ({len(name)} characters)"
            log.warning("MLflow does not accept the name %r: it is shipped as %r", shown, clean)
            self._originals[clean] = name[:_KEPT_CHARS]
        try:
            write_json(self._path, self._originals)
        except OSError as error:
            raise TrackingError(f"{self._path} cannot be written ({error.strerror}): make room there") from error
