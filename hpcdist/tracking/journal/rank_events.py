"""What the code of a rank logs besides metrics, one JSON line per event, in files beside the journal.

    journal/attempt-001.rank-00000.events.jsonl     {"format":1}
                                                    {"t":1760000000000,"param":{"lr":"0.1"}}
                                                    {"t":1760000000000,"tag":{"stage":"pretraining"}}
                                                    {"t":1760000000000,"dataset":{"name":"digits","digest":"…"}}
                                                    {"t":1760000000000,"model":"m-…"}

An event `model` names a folder in `logged_models/`, whose model is complete or has changed since. Parameters and tags
are cut to MLflow's limits when they are written.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hpcdist.files import retry
from hpcdist.files.bounded_json import parse_json
from hpcdist.files.formats import KEY, unstamped
from hpcdist.files.regular_file import open_regular
from hpcdist.tracking.journal.writer import MAX_LINE_BYTES, JournalWriter

log = logging.getLogger(__name__)

#: Maximum number of characters of the value of a parameter or tag, as in MLflow.
MAX_VALUE = 8000
#: Maximum number of characters of a name; `names.py` shortens it further.
MAX_NAME = 1000
_FILE_NAME = re.compile(r"attempt-(\d+)\.rank-(\d+)(?:\.pid-\d+)?\.events\.jsonl")
#: Limit of one read; longer files are read in several passes.
_READ_BYTES = 16 << 20
_KINDS = ("param", "tag", "dataset", "model")


class Event(NamedTuple):
    """One event: `kind` is param, tag, dataset or model."""

    kind: str
    content: Any


class EventWriter(JournalWriter):
    """Append events to a file of one process, as safely as the journal."""

    def __init__(self, folder: Path, attempt: int, rank: int, *, suffix: str = "") -> None:
        super().__init__(folder, attempt, rank, suffix=f"{suffix}.events")

    def pair(self, kind: str, name: str, value: str) -> None:
        """Record a parameter or a tag."""
        self.record(kind, {name[:MAX_NAME]: value[:MAX_VALUE]})

    def record(self, kind: str, content: Any) -> None:
        """Record an event. One that is longer than MAX_LINE_BYTES is left out with a warning."""
        event = {"t": time.time_ns() // 1_000_000, kind: content}
        line = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"
        if len(line) > MAX_LINE_BYTES:
            log.warning("a %s of %d bytes is not recorded: it is too long", kind, len(line))
            return
        self._append(line)


def event_files(folder: Path) -> list[Path]:
    """Return all event files of a run, sorted by attempt and rank."""
    entries = retry.retry(lambda: list(folder.iterdir()), folder)
    found = [(match, entry) for entry in entries if (match := _FILE_NAME.fullmatch(entry.name))]
    return [path for _, path in sorted(found, key=lambda it: (int(it[0][1]), int(it[0][2]), it[1].name))]


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Return the complete events from `offset` on, and the offset at which the next call continues.

    Lines that are not events are skipped. Raises RunFolderError if a newer hpcdist has written the file, OSError if it
    cannot be read.
    """

    def read() -> bytes:
        with open_regular(path) as file:
            file.seek(offset)
            return file.read(_READ_BYTES)

    data = retry.retry(read, path)
    end = data.rfind(b"\n") + 1
    if end == 0 and len(data) == _READ_BYTES:
        end = len(data)  # no event is so long: damaged
    return [event for line in data[:end].split(b"\n") for event in _parse(line, path)], offset + end


def _parse(line: bytes, path: Path) -> Iterator[Event]:
    if not line:
        return
    try:
        raw = parse_json(line)
    except ValueError:
        raw = None
    if isinstance(raw, dict) and KEY in raw:
        unstamped(raw, path)
        return
    kind = next((kind for kind in _KINDS if isinstance(raw, dict) and kind in raw), None)
    if kind is None or raw is None or not _is_content(kind, raw[kind]):
        log.warning("%s: skipped a damaged line", path)
        return
    yield Event(kind, raw[kind])


def _is_content(kind: str, content: object) -> bool:
    if kind == "model":
        return isinstance(content, str) and re.fullmatch(r"m-[0-9a-f]{32}", content) is not None
    if not isinstance(content, dict):
        return False
    return kind == "dataset" or all(isinstance(value, str) for value in content.values())
