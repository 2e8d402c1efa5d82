"""The event files and csv files that a rank has opened for writing, in the folder of its attempt.

    attempts/001/rank-00000.written.jsonl     {"path": "/home/ada/lightning_logs/version_0/metrics.csv", "start": 0}

Python calls an audit hook for each file that it opens. The record is exact where a search in the working folder would
be a guess: several runs, ranks and other programs write there.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

from hpcdist.host.json_files import read_json_lines
from hpcdist.run.folder import Attempt

log = logging.getLogger(__name__)

#: Limit of the files of an attempt.
MAX_FILES = 100


class WrittenFile(NamedTuple):
    """A file that a rank has opened for writing."""

    path: Path
    start: int  #: its size then, in bytes, if the rank appends to it; else 0


def is_event_file(path: str | Path) -> bool:
    """Return whether a file is one of TensorBoard's by its name."""
    return "tfevents" in os.path.basename(path)


class WrittenFiles:
    """Records the files that this process opens for writing: `sys.addaudithook(WrittenFiles(attempt).note)`."""

    def __init__(self, attempt: Attempt) -> None:
        self._record = attempt.written
        self._pid = os.getpid()
        self._noted: set[str] = set()

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note a file that is opened for writing, or renamed; called for each audit event of Python."""
        if event == "open":
            name, _, flags = arguments
            if not isinstance(flags, int) or flags & os.O_ACCMODE == os.O_RDONLY:
                return
        elif event == "os.rename":  # a logger that replaces its file atomically
            name = arguments[1]
            flags = os.O_TRUNC
        else:
            return
        if not isinstance(name, str | bytes | os.PathLike):
            return
        path = os.fsdecode(name)
        if not path.lower().endswith(".csv") and not is_event_file(path):
            return
        self._write(os.path.abspath(path), is_new=bool(flags & os.O_TRUNC))

    def _write(self, path: str, *, is_new: bool) -> None:
        # A process that the rank has forked inherits the hook.
        if path in self._noted or len(self._noted) >= MAX_FILES or os.getpid() != self._pid:
            return
        self._noted.add(path)
        try:
            start = 0 if is_new or not os.path.exists(path) else os.path.getsize(path)
            line = json.dumps({"path": path, "start": start}) + "\n"
            descriptor = os.open(self._record, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:  # the script can write its file nevertheless
            log.warning("metrics in %s do not reach MLflow: %s cannot be written (%s)", path, self._record, error)


def read_written_files(attempt: Attempt) -> list[WrittenFile]:
    """Return the files that rank 0 of an attempt has opened for writing, in the order of their first opening."""
    files = []
    for record in read_json_lines(attempt.written):
        match record:
            case {"path": str(path), "start": int(start)}:
                files.append(WrittenFile(Path(path), start))
    return files[:MAX_FILES]
