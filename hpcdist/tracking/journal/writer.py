"""The journal: metrics of one rank and attempt, one JSON line per record.

    journal/attempt-001.rank-00000.jsonl     {"format":1}
                                             {"t":1760000000000,"s":120,"m":{"train/loss":0.31}}

Ranks append to the journal and the shipper reads it, so a rank never waits for a tracking server. It is written by hand
because a record must cost microseconds and survive crashes of the process, the node and the file server, which
logging handlers and MLflow's asynchronous logging do not guarantee.

The steps of a key should increase over the attempts of a run: the shipper omits steps that a later attempt repeats. A
record longer than MAX_LINE_BYTES is split into lines of the same time and step.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.files import retry
from hpcdist.files.formats import stamped
from hpcdist.tracking.journal.names import MAX_NAME, suffix

log = logging.getLogger(__name__)

#: JSON text of non-finite numbers, as Python's parser accepts it.
_JSON_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
#: Limit of the records that are kept in memory while the disk is unavailable.
MAX_PENDING_BYTES = 64 << 20
#: Limit of the data that is kept since the last fsync, in case the file server loses it.
MAX_UNSYNCED_BYTES = 4 << 20
#: Limit of a line, so that a reader finds the end of each line in one chunk.
MAX_LINE_BYTES = 1 << 18
#: Limit of a metric's name as JSON, so that a record of one metric fits in a line.
MAX_NAME_BYTES = 4096
#: Steps that fit in the columns of MLflow's database.
_STEPS = range(-(2**63), 2**63)


class JournalWriter:
    """Append records to the journal file of one rank; thread-safe. The first record creates the file.

    Each write goes to a known offset, where a partial write is repeated, so no record is lost or duplicated.
    """

    def __init__(self, folder: Path, attempt: int = 1, rank: int = 0, *, suffix: str = "") -> None:
        self.path = folder / f"attempt-{attempt:03d}.rank-{rank:05d}{suffix}.jsonl"
        self._descriptor = -1
        self._pending = bytearray()
        self._offset = 0  #: of the next record
        self._unsynced = bytearray()  #: the last bytes before the offset that are not synced
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

    def log(self, metrics: Mapping[str, float], step: int, time_ms: int | None = None) -> None:
        """Record the metrics of a step, NaN and infinities included, in a few microseconds.

        While the disk is full, records are kept in memory, with one warning. A name longer than MAX_NAME_BYTES is
        shortened to a unique name, with one warning. The time is that of the call if `time_ms` is None.

        Raises:
            UserMistake: A value is not a number, or the step is not a 64-bit integer.
            HpcdistError: More than MAX_PENDING_BYTES are pending.
        """
        names, parts = self._names, []
        for key, value in metrics.items():
            text = repr(value if type(value) is float else _number(key, value))
            name = names.get(key) or self._name(key)
            parts.append(name + _JSON_NAMES.get(text, text))
        try:
            number = operator.index(step)
        except TypeError as error:
            raise UserMistake(f"metrics were logged with step {step!r}: a step must be an integer") from error
        if number not in _STEPS:
            raise UserMistake(
                f"metrics were logged with a step outside of -2^63 … 2^63 - 1 ({number.bit_length()} bits)"
            )
        # json.dumps takes twice as long.
        time_ms = time.time_ns() // 1_000_000 if time_ms is None else time_ms
        head = f'{{"t":{time_ms},"s":{number},"m":{{'
        text = f"{head}{','.join(parts)}}}}}\n"
        self._append((text if len(text) <= MAX_LINE_BYTES else _split(head, parts)).encode())

    def _name(self, key: object) -> str:
        """Return a metric's name as JSON with a colon, from a cache."""
        if not isinstance(key, str):
            raise UserMistake(f"metric name {key!r} must be a string")
        name = key.encode(errors="replace").decode()
        quoted = json.dumps(name if name == key else name + suffix(key))
        if len(quoted) > MAX_NAME_BYTES:
            if (cut := name[:MAX_NAME] + suffix(key)) not in self._cut:
                self._cut.add(cut)
                log.warning("a metric's name has %d characters, which is too long: it is recorded as %r", len(key), cut)
            return json.dumps(cut) + ":"
        return self._names.setdefault(key, quoted + ":")

    def _append(self, line: bytes) -> None:
        with self._lock:
            self._pending += line
            failure = self._write()
            if failure is not None and len(self._pending) > MAX_PENDING_BYTES:
                raise HpcdistError(
                    f"the metrics journal {self.path} cannot be written ({_reason(failure)}), and"
                    f" {MAX_PENDING_BYTES >> 20} MiB of records are pending: restore the disk and resume the run, which"
                    " repeats the steps since the last checkpoint"
                )
            if failure is not None and not self._failed:
                log.warning("metrics are kept in memory: %s cannot be written (%s)", self.path, _reason(failure))
            elif failure is None and self._failed:
                log.warning("%s can be written again: no metrics were lost", self.path)
            self._failed = failure is not None

    def flush(self, durable: bool = True) -> None:
        """Write the pending records, with `durable` also to disk. Raises HpcdistError if that fails.

        Called before a checkpoint is saved: each record is then on disk, or belongs to a step that a resumed run
        repeats.
        """
        try:
            retry.retry(lambda: self._flush(durable=durable), self.path)
        except OSError as failure:
            raise HpcdistError(
                f"the metrics journal {self.path} cannot be written ({_reason(failure)}):"
                " free space, or set `runs_dir` to a writable folder"
            ) from failure

    def _flush(self, *, durable: bool) -> None:
        with self._lock:
            if (failure := self._write()) is not None:
                raise failure
            if durable and self._descriptor >= 0:
                try:
                    os.fsync(self._descriptor)
                except OSError:
                    # The kernel drops pages that it failed to write, and reports the error only once.
                    self._rewind(len(self._unsynced))
                    raise
                self._unsynced.clear()
            self._failed = False

    def close(self) -> None:
        """Write the pending records and close the file. Raises HpcdistError if records would be lost."""
        if self._closed:
            return
        try:
            self.flush(durable=False)
        finally:
            with self._lock:
                self._closed = True
                self._close()

    def _write(self) -> OSError | None:
        """Write the pending bytes, usually with one system call. Returns the error if that fails."""
        try:
            if self._pending and self._descriptor < 0:
                self._open()
            while self._pending:
                written = os.pwrite(self._descriptor, self._pending, self._offset)
                self._unsynced += self._pending[:written]
                del self._pending[:written], self._unsynced[:-MAX_UNSYNCED_BYTES]
                self._offset += written
        except OSError as error:
            self._close()  # a stale NFS handle does not recover
            return error
        return None

    def _rewind(self, num_bytes: int) -> None:
        """Make the last bytes pending again."""
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
                    self._pending[:0] = b"\n"  # an earlier writer was killed within a line
            elif size < self._offset:
                self._rewind(min(self._offset - size, len(self._unsynced)))  # the file server lost data
        except OSError:
            os.close(descriptor)
            raise
        self._is_new, self._descriptor = False, descriptor

    def _close(self) -> None:
        """Close the file descriptor; errors are ignored, since fsync has reported them."""
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
            return float(value)  # type: ignore[arg-type]  # scalars of NumPy and torch included
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            cause = error
    raise UserMistake(f"metric {key!r} must be a number, got {repr(value)[:80]} ({type(value).__name__})") from cause


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
