"""Reading of journal files in chunks of bounded size; lines that are not records are skipped with a warning."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import NamedTuple

from hpcdist.files import retry
from hpcdist.files.bounded_json import parse_json
from hpcdist.files.formats import KEY, unstamped
from hpcdist.files.regular_file import open_regular
from hpcdist.tracking.journal.writer import MAX_LINE_BYTES

log = logging.getLogger(__name__)

#: A process that a rank has started writes files of its own.
_FILE_NAME = re.compile(r"attempt-(\d+)\.rank-(\d+)(?:\.pid-\d+)?\.jsonl")
_FORMAT_LINE = f'{{"{KEY}"'.encode()
#: Size of one read: bounds the memory of a reader for any length of file or line.
CHUNK_BYTES = MAX_LINE_BYTES


class Record(NamedTuple):
    """One line of the journal: metrics of one step."""

    time_ms: int
    step: int
    metrics: dict[str, float]


class Chunk(NamedTuple):
    """Part of a journal file: its records, the offset of the next part, the number of damaged lines."""

    records: list[Record]
    offset: int
    broken: int


class JournalFile(NamedTuple):
    """One journal file with its attempt and rank."""

    attempt: int
    rank: int
    path: Path


def attempt_of(file_name: str) -> int:
    """Return the attempt of a journal file."""
    return int(file_name.split(".")[0].removeprefix("attempt-"))


def journal_files(folder: Path) -> list[JournalFile]:
    """Return all journal files of a run, sorted by attempt and rank."""
    entries = retry.retry(lambda: list(folder.iterdir()), folder)
    found = [(match, entry) for entry in entries if (match := _FILE_NAME.fullmatch(entry.name))]
    return sorted(JournalFile(int(match[1]), int(match[2]), path) for match, path in found)


def read_records(path: Path, offset: int = 0, *, final: bool = False) -> tuple[list[Record], int]:
    """Return all records from `offset` on, and the offset at which the next call continues.

    An incomplete last line is left for the next call, unless the file is `final`.
    """
    records: list[Record] = []
    while True:
        chunk = read_chunk(path, offset, final=final)
        if chunk.offset == offset:
            return records, offset
        records += chunk.records
        offset = chunk.offset


def read_chunk(path: Path, offset: int, *, final: bool = False) -> Chunk:
    """Read records as `read_records` does, from at most CHUNK_BYTES of the file."""
    data = _read(path, offset, CHUNK_BYTES)
    end = data.rfind(b"\n") + 1
    # No line is longer than a chunk: a chunk without a line end is damaged and is skipped.
    if (final and len(data) < CHUNK_BYTES) or (end == 0 and len(data) == CHUNK_BYTES):
        end = len(data)
    return _parse(path, offset, data[:end])


def read_range(path: Path, offset: int, end: int) -> Chunk:
    """Return the records between two offsets that `read_chunk` has returned."""
    return _parse(path, offset, _read(path, offset, end - offset))


def _read(path: Path, offset: int, num_bytes: int) -> bytes:
    def read() -> bytes:
        with open_regular(path) as file:
            file.seek(offset)
            return file.read(num_bytes)

    try:
        return retry.retry(read, path)
    except FileNotFoundError:
        return b""


def _parse(path: Path, offset: int, data: bytes) -> Chunk:
    lines = [line for line in data.split(b"\n") if line and not _is_format(line, path)]
    records = [record for line in lines if (record := _record(line)) is not None]
    broken = len(lines) - len(records)
    if broken:
        log.warning("%s: skipped %d damaged line(s) from byte %d on", path, broken, offset)
    return Chunk(records, offset + len(data), broken)


def _is_format(line: bytes, path: Path) -> bool:
    """Whether a line holds the format number. Raises RunFolderError for a newer format."""
    if not line.startswith(_FORMAT_LINE):
        return False
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    unstamped(found, path)
    return True


def _record(line: bytes) -> Record | None:
    """Return the record of a line, or None if the line is not a record."""
    try:
        raw = parse_json(line)
        time_ms, step, metrics = raw["t"], raw["s"], raw["m"]
        values = {key: float(value) for key, value in metrics.items() if isinstance(value, (int, float))}
        if len(values) != len(metrics) or type(time_ms) is not int or type(step) is not int:
            return None
        # The bounds are those of MLflow's columns; names with lone surrogates cannot be sent.
        "".join(values).encode()
        return Record(time_ms, step, values) if 0 <= time_ms < 2**63 and -(2**63) <= step < 2**63 else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
