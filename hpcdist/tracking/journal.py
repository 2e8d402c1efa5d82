"""The journal: metrics of one rank and attempt, one JSON line a record, appended with one system call.

A record longer than MAX_LINE_BYTES is several lines of the same time and step.

    journal/attempt-001.rank-00000.jsonl     {"format":1}
                                             {"t":1760000000000,"s":120,"m":{"train/loss":0.31}}

A rank never waits for a tracking server: it writes here, and the shipper reads. Steps of a key should rise through
the attempts of a run: what a later attempt repeats is left out when the journal is shipped.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.files import retry
from hpcdist.files.bounded_json import parse_json
from hpcdist.files.formats import KEY, stamped, unstamped
from hpcdist.tracking.names import MAX_NAME, suffix

log = logging.getLogger(__name__)

_FILE_NAME = re.compile(r"attempt-(\d+)\.rank-(\d+)\.jsonl")
_FORMAT_LINE = f'{{"{KEY}"'.encode()
#: How JSON, as Python reads it, writes what is not finite.
_JSON_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
#: What one call of `read_chunk` reads, so that a reader's memory is bounded however long a file or a line is.
CHUNK_BYTES = 1 << 18
#: Records that wait in memory while their disk is away.
MAX_PENDING_BYTES = 64 << 20
#: What is kept of the file since its last fsync, for a file server that loses it.
MAX_UNSYNCED_BYTES = 4 << 20
#: A record that would be longer becomes several lines: a reader finds the end of every line in one chunk.
MAX_LINE_BYTES = CHUNK_BYTES
#: A longer name, as JSON, is cut: a record of one metric must fit a line.
MAX_NAME_BYTES = 4096
#: What the tracking server's columns hold.
_STEPS = range(-(2**63), 2**63)


class JournalWriter:
    """Appends records to one rank's file. Threads of the rank may share it; the file is made at the first record.

    Each write goes to a known offset: one that failed half-way is repeated in the same place, so that nothing is lost
    or written twice.
    """

    def __init__(self, folder: Path, attempt: int = 1, rank: int = 0) -> None:
        self.path = folder / f"attempt-{attempt:03d}.rank-{rank:05d}.jsonl"
        self._descriptor = -1
        self._pending = bytearray()
        self._offset = 0  #: where the next record goes
        self._unsynced = bytearray()  #: the last bytes before it that were not synced yet
        self._is_new = True
        self._names: dict[str, str] = {}
        self._cut: set[str] = set()
        self._failed = False
        self._closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record values of a step; NaN and infinities are values like others. Takes some microseconds.

        A full disk costs one warning: records wait in memory and go first as soon as there is room. A record of any
        size arrives. A name of more than MAX_NAME_BYTES is cut to a unique one, with one warning.

        Raises UserMistake for a value that is not a number, and for a step that is not a 64-bit integer; HpcdistError
        when MAX_PENDING_BYTES wait.
        """
        names, parts = self._names, []
        for key, value in metrics.items():
            text = repr(value if type(value) is float else _number(key, value))
            name = names.get(key) or self._name(key)
            parts.append(name + _JSON_NAMES.get(text, text))
        try:
            number = operator.index(step)
        except TypeError as error:
            raise UserMistake(f"metrics were logged with step {step!r}: a step is a whole number") from error
        if number not in _STEPS:
            raise UserMistake(
                f"metrics were logged with a step outside of -2^63 … 2^63 - 1 ({number.bit_length()} bits)"
            )
        # By hand, since json.dumps takes twice as long.
        head = f'{{"t":{time.time_ns() // 1_000_000},"s":{number},"m":{{'
        text = f"{head}{','.join(parts)}}}}}\n"
        self._append((text if len(text) <= MAX_LINE_BYTES else _split(head, parts)).encode())

    def _name(self, key: object) -> str:
        """Return a metric's name as JSON with its colon, and remember it."""
        if not isinstance(key, str):
            raise UserMistake(f"metric name {key!r} must be a string")
        name = key.encode(errors="replace").decode()
        quoted = json.dumps(name if name == key else name + suffix(key))
        if len(quoted) > MAX_NAME_BYTES:
            if (cut := name[:MAX_NAME] + suffix(key)) not in self._cut:
                self._cut.add(cut)
                log.warning("a metric's name of %d characters is too long: it is recorded as %r", len(key), cut)
            return json.dumps(cut) + ":"
        return self._names.setdefault(key, quoted + ":")

    def _append(self, line: bytes) -> None:
        with self._lock:
            self._pending += line
            failure = self._write()
            if failure is not None and len(self._pending) > MAX_PENDING_BYTES:
                raise HpcdistError(
                    f"the metrics journal {self.path} cannot be written ({_reason(failure)}), and"
                    f" {MAX_PENDING_BYTES >> 20} MiB of records wait: the steps since the last checkpoint are repeated"
                    " when the disk is back"
                )
            if failure is not None and not self._failed:
                log.warning("metrics wait in memory: %s cannot be written (%s)", self.path, _reason(failure))
            elif failure is None and self._failed:
                log.warning("%s can be written again: nothing was lost", self.path)
            self._failed = failure is not None

    def flush(self, durable: bool = True) -> None:
        """Write what waits in memory; `durable` also waits until all of it is on disk.

        Raises HpcdistError when it cannot. The trainer calls this before it saves a checkpoint, so that a point
        either is on disk or belongs to a step that a resumed run does again.
        """
        try:
            retry.retry(lambda: self._flush(durable=durable), self.path)
        except OSError as failure:
            raise HpcdistError(
                f"the metrics journal {self.path} cannot be written ({_reason(failure)}):"
                " make room or set `runs_dir` to a folder that can be written"
            ) from failure

    def _flush(self, *, durable: bool) -> None:
        with self._lock:
            if (failure := self._write()) is not None:
                raise failure
            if durable and self._descriptor >= 0:
                try:
                    os.fsync(self._descriptor)
                except OSError:
                    # The kernel has dropped what it could not write, and would not say so again.
                    self._rewind(len(self._unsynced))
                    raise
                self._unsynced.clear()
            self._failed = False

    def close(self) -> None:
        """Write what waits and close the file. Raises HpcdistError when records would be lost."""
        if self._closed:
            return
        try:
            self.flush(durable=False)
        finally:
            with self._lock:
                self._closed = True
                self._close()

    def _write(self) -> OSError | None:
        """Hand pending bytes to the kernel, in one call when the disk takes them all."""
        try:
            if self._pending and self._descriptor < 0:
                self._open()
            while self._pending:
                written = os.pwrite(self._descriptor, self._pending, self._offset)
                self._unsynced += self._pending[:written]
                del self._pending[:written], self._unsynced[:-MAX_UNSYNCED_BYTES]
                self._offset += written
        except OSError as error:
            self._close()  # a handle that is stale stays so
            return error
        return None

    def _rewind(self, num_bytes: int) -> None:
        """Write the last bytes once more."""
        if num_bytes:
            self._pending[:0] = self._unsynced[-num_bytes:]
            del self._unsynced[-num_bytes:]
            self._offset -= num_bytes

    def _open(self) -> None:
        if self._closed:
            raise OSError("the journal is closed")
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if self._is_new:
                self._offset = size
                if not size:
                    self._pending[:0] = json.dumps(stamped({})).encode() + b"\n"
                elif os.pread(descriptor, 1, size - 1) != b"\n":
                    self._pending[:0] = b"\n"  # an earlier writer was killed in the middle of a line
            elif size < self._offset:
                self._rewind(min(self._offset - size, len(self._unsynced)))  # the server has lost it
        except OSError:
            os.close(descriptor)
            raise
        self._is_new, self._descriptor = False, descriptor

    def _close(self) -> None:
        """Let go of the file. What its close says of the data is not needed: `fsync` has said so before."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


def _split(head: str, parts: Sequence[str]) -> str:
    """Return one record as several lines of at most MAX_LINE_BYTES, all with the same time and step."""
    lines: list[str] = []
    first, size = 0, len(head)
    for number, part in enumerate(parts):
        if size + len(part) + len(",}}\n") > MAX_LINE_BYTES:
            lines.append(f"{head}{','.join(parts[first:number])}}}}}\n")
            first, size = number, len(head)
        size += len(part) + 1
    return "".join([*lines, f"{head}{','.join(parts[first:])}}}}}\n"])


def _number(key: object, value: object) -> float:
    cause: Exception | None = None
    if not isinstance(value, (str, bytes, bytearray)):
        try:
            return float(value)  # type: ignore[arg-type]  # numpy's and torch's scalars too
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            cause = error
    raise UserMistake(f"metric {key!r} must be a number, got {repr(value)[:80]} ({type(value).__name__})") from cause


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


class Record(NamedTuple):
    """One line of the journal: values of one step."""

    time_ms: int
    step: int
    metrics: dict[str, float]


class Chunk(NamedTuple):
    """What was read of a journal file: its records, where to read on, and how many lines were no records."""

    records: list[Record]
    offset: int
    broken: int


class JournalFile(NamedTuple):
    attempt: int
    rank: int
    path: Path


def journal_files(folder: Path) -> list[JournalFile]:
    """All journal files of a run, by attempt and rank."""
    entries = retry.retry(lambda: list(folder.iterdir()), folder)
    found = [(match, entry) for entry in entries if (match := _FILE_NAME.fullmatch(entry.name))]
    return sorted(JournalFile(int(match[1]), int(match[2]), path) for match, path in found)


def read_records(path: Path, offset: int = 0, *, final: bool = False) -> tuple[list[Record], int]:
    """Everything from `offset` on: the records, and the offset to go on from.

    Lines that are no records are skipped with a warning. A last line without its end is left for the next call,
    unless `final` says that nobody writes any more.
    """
    records: list[Record] = []
    while True:
        chunk = read_chunk(path, offset, final=final)
        if chunk.offset == offset:
            return records, offset
        records += chunk.records
        offset = chunk.offset


def read_chunk(path: Path, offset: int, *, final: bool = False) -> Chunk:
    """As `read_records`, but at most CHUNK_BYTES of the file, so that memory stays bounded."""
    data = _read(path, offset, CHUNK_BYTES)
    end = data.rfind(b"\n") + 1
    # No line is longer than a chunk: what has no end in it is garbage and is stepped over.
    if (final and len(data) < CHUNK_BYTES) or (end == 0 and len(data) == CHUNK_BYTES):
        end = len(data)
    return _parse(path, offset, data[:end])


def read_range(path: Path, offset: int, end: int) -> Chunk:
    """The records between two offsets that `read_chunk` gave before."""
    return _parse(path, offset, _read(path, offset, end - offset))


def _read(path: Path, offset: int, num_bytes: int) -> bytes:
    def read() -> bytes:
        with open(path, "rb") as file:
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
        log.warning("%s: %d broken line(s) from byte %d on were skipped", path, broken, offset)
    return Chunk(records, offset + len(data), broken)


def _is_format(line: bytes, path: Path) -> bool:
    """Whether a line says which format those after it have. Raises RunFolderError for a newer one."""
    if not line.startswith(_FORMAT_LINE):
        return False
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    unstamped(found, path)
    return True


def _record(line: bytes) -> Record | None:
    """The record in a line, or None for anything else that a disk, a crash or a stranger may have left there."""
    try:
        raw = parse_json(line)
        time_ms, step, metrics = raw["t"], raw["s"], raw["m"]
        values = {key: float(value) for key, value in metrics.items() if isinstance(value, (int, float))}
        if len(values) != len(metrics) or type(time_ms) is not int or type(step) is not int:
            return None
        # What MLflow's columns hold; names with lone surrogates cannot be sent.
        "".join(values).encode()
        return Record(time_ms, step, values) if 0 <= time_ms < 2**63 and -(2**63) <= step < 2**63 else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
