"""The journal: metrics and events of the ranks, in files of the folder `journal/`."""

import json
import logging
import operator
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.host import retry
from hpcdist.host.files import open_regular
from hpcdist.host.json_files import KEY, parse_json, stamped, unstamped
from hpcdist.run.mlflow_limits import MAX_NAME, hash_suffix

log = logging.getLogger(__name__)

# The journal: metrics of one rank and attempt, one JSON line per record.
#
#     journal/attempt-001.rank-00000.jsonl     {"format":1}
#                                              {"t":1760000000000,"s":120,"m":{"train/loss":0.31}}
#
# Ranks append to the journal and the shipper reads it, so a rank never waits for a tracking server. It is written by
# hand because a record must cost microseconds and survive crashes of the process, the node and the file server, which
# logging handlers and MLflow's asynchronous logging do not guarantee.
#
# The steps of a key should increase over the attempts of a run: the shipper omits steps that a trainer repeats. A
# record longer than MAX_LINE_BYTES is split into lines of the same time and step.

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

    Each write goes to a known offset, where a partial write is repeated: no record is lost or duplicated.
    """

    def __init__(self, folder: Path, attempt: int = 1, rank: int = 0, *, file_suffix: str = "") -> None:
        self.path = folder / f"attempt-{attempt:03d}.rank-{rank:05d}{file_suffix}.jsonl"
        self._descriptor = -1
        self._pending = bytearray()
        self._offset = 0  #: of the next record
        self._unsynced = bytearray()  #: the last bytes before the offset that are not synced
        self._is_new = True
        self._newest: tuple[int, int] | None = None  #: step and time of the last record
        self._names: dict[str, str] = {}
        self._failed = False
        self._closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, metrics: Mapping[str, float], step: int, time_ms: int | None = None) -> None:
        """Record the metrics of a step, NaN and infinities included, in a few microseconds.

        While the disk is full, records are kept in memory, with one warning. Raises UserMistake if a value is not a
        number, the step not a 64-bit integer or a name longer than MAX_NAME_BYTES, HpcdistError if more than
        MAX_PENDING_BYTES are pending.
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
        if time_ms is None:
            time_ms = time.time_ns() // 1_000_000
        if self._newest is not None and self._newest[0] == number:
            # Of two values at one step, MLflow shows the later one, and at equal times the larger one.
            time_ms = max(time_ms, self._newest[1] + 1)
        self._newest = (number, time_ms)
        # json.dumps takes twice as long.
        head = f'{{"t":{time_ms},"s":{number},"m":{{'
        text = f"{head}{','.join(parts)}}}}}\n"
        if len(text) > MAX_LINE_BYTES:
            text = _several_lines(head, parts)
        self._append(text.encode())

    def _name(self, key: object) -> str:
        """Return the beginning of a metric in a record: its name as JSON, and a colon."""
        if not isinstance(key, str):
            raise UserMistake(f"metric name {key!r} must be a string")
        name = key.encode(errors="replace").decode()
        text = json.dumps(name if name == key else name + hash_suffix(key))
        if len(text) > MAX_NAME_BYTES:
            raise UserMistake(f"metric name {key[:40]!r}… has {len(key)} characters: use at most {MAX_NAME}")
        return self._names.setdefault(key, f"{text}:")

    def _append(self, line: bytes) -> None:
        """Write a record, or keep it in memory while the disk is unavailable."""
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

        def write() -> None:
            with self._lock:
                failure = self._write()
                if failure is not None:
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

        try:
            retry.retry(write, self.path)
        except OSError as failure:
            raise HpcdistError(
                f"the metrics journal {self.path} cannot be written ({_reason(failure)}):"
                " free space, or set `runs_dir` to a writable folder"
            ) from failure

    def close(self) -> None:
        """Write the pending records, and close the file. Raises HpcdistError if that fails."""
        if self._closed:
            return
        try:
            self.flush(durable=False)
        finally:
            with self._lock:
                self._closed = True
                self._close()

    def _write(self) -> OSError | None:
        """Write as much of the pending data as possible. Returns the error that ended it, if any."""
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
        """Make the last bytes that were written pending again."""
        if num_bytes:
            self._pending[:0] = self._unsynced[-num_bytes:]
            del self._unsynced[-num_bytes:]
            self._offset -= num_bytes

    def _open(self) -> None:
        """Open the file, and repair its end, or write again the data that the file server has lost."""
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
        self._is_new = False
        self._descriptor = descriptor

    def _close(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):  # fsync has reported it
                os.close(self._descriptor)
            self._descriptor = -1


def _several_lines(head: str, parts: list[str]) -> str:
    """Return a record that is too long for one line as several lines of the same time and step."""
    groups = [[parts[0]]]
    size = len(parts[0])
    for part in parts[1:]:
        size += len(part) + 1
        if len(head) + size + len("}}\n") > MAX_LINE_BYTES:
            groups.append([])
            size = len(part)
        groups[-1].append(part)
    return "".join(f"{head}{','.join(group)}}}}}\n" for group in groups)


def _number(key: object, value: object) -> float:
    """Return the value of a metric. Raises UserMistake if it is not a number."""
    cause: Exception | None = None
    if not isinstance(value, (str, bytes, bytearray)):
        try:
            return float(value)  # type: ignore[arg-type]  # scalars of NumPy and torch included
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            cause = error
    raise UserMistake(f"metric {key!r} must be a number, got {repr(value)[:80]} ({type(value).__name__})") from cause


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


# Reading of journal files in chunks of bounded size; lines that are not records are skipped with a warning.

#: End of the name of the file that the reader of a script's files writes, see `script_metrics.py`.
READER_SUFFIX = ".files"
#: A process that a rank has started writes files of its own.
_FILE_NAME = re.compile(r"attempt-(\d+)\.rank-(\d+)(?:\.pid-\d+|\.files)?\.jsonl")
#: Size of one read: bounds the memory of a reader for any length of file or line.
CHUNK_BYTES = MAX_LINE_BYTES


class Record(NamedTuple):
    """The metrics of a step."""

    time_ms: int
    step: int
    metrics: dict[str, float]


class Chunk(NamedTuple):
    """Part of a journal file: its records, the offset of the next part, the number of damaged lines."""

    records: list[Record]
    offset: int
    broken: int


class JournalFile(NamedTuple):
    """A file in the folder of the journal, and who writes it."""

    attempt: int
    rank: int
    path: Path


def is_of_reader(file_name: str) -> bool:
    """Return whether the reader of a script's files writes a journal file: a killed one appends records again."""
    return file_name.endswith(f"{READER_SUFFIX}.jsonl")


def attempt_of(file_name: str) -> int:
    """Return the attempt that writes a journal file."""
    return int(file_name.split(".")[0].removeprefix("attempt-"))


def journal_files(folder: Path, name: re.Pattern[str] = _FILE_NAME) -> list[JournalFile]:
    """Return the files with metrics, or those with another `name`, in the order of attempts and ranks."""
    files = []
    for path in retry.retry(lambda: list(folder.iterdir()), folder):
        match = name.fullmatch(path.name)
        if match:
            files.append(JournalFile(int(match[1]), int(match[2]), path))
    return sorted(files)


def read_records(path: Path, offset: int = 0) -> tuple[list[Record], int]:
    """Return all complete records from `offset` on, and the offset at which the next call continues."""
    records: list[Record] = []
    while True:
        chunk = read_chunk(path, offset)
        if chunk.offset == offset:
            return records, offset
        records += chunk.records
        offset = chunk.offset


def read_chunk(path: Path, offset: int, *, final: bool = False) -> Chunk:
    """Read records from at most CHUNK_BYTES of a file; an incomplete last line only if the file is `final`."""
    return _parse(path, offset, _read_lines(path, offset, CHUNK_BYTES, final=final))


def read_range(path: Path, offset: int, end: int) -> Chunk:
    """Return the records between two offsets that `read_chunk` has returned."""
    return _parse(path, offset, _read(path, offset, end - offset))


def _read_lines(path: Path, offset: int, num_bytes: int, *, final: bool = False) -> bytes:
    """Read at most `num_bytes`, without an incomplete last line unless the file is `final`."""
    data = _read(path, offset, num_bytes)
    end = data.rfind(b"\n") + 1
    is_at_end = len(data) < num_bytes
    if is_at_end and final:
        return data
    if not is_at_end and end == 0:  # no line is so long: the data is damaged and is skipped
        return data
    return data[:end]


def _read(path: Path, offset: int, num_bytes: int) -> bytes:
    """Return at most `num_bytes` of a file from `offset` on; empty if the file is missing."""

    def read() -> bytes:
        with open_regular(path) as file:
            file.seek(offset)
            return file.read(num_bytes)

    try:
        return retry.retry(read, path)
    except FileNotFoundError:
        return b""


def _parse(path: Path, offset: int, data: bytes) -> Chunk:
    raws = list(_values(data, path))
    records = [record for raw in raws if (record := _record(raw)) is not None]
    broken = len(raws) - len(records)
    if broken:
        log.warning("%s: skipped %d damaged line(s) from byte %d on", path, broken, offset)
    return Chunk(records, offset + len(data), broken)


def _values(data: bytes, path: Path) -> Iterator[Any]:
    """Yield the JSON values of all lines but that of the format number, None for a line that is not JSON."""
    for line in filter(None, data.split(b"\n")):
        try:
            raw = parse_json(line)
        except ValueError:
            raw = None
        if isinstance(raw, dict) and KEY in raw:
            unstamped(raw, path)
        else:
            yield raw


def _record(raw: Any) -> Record | None:
    """Return the record in a JSON value; None if it is none."""
    try:
        time_ms, step, metrics = raw["t"], raw["s"], raw["m"]
        values = {key: float(value) for key, value in metrics.items() if isinstance(value, (int, float))}
        if len(values) != len(metrics) or type(time_ms) is not int or type(step) is not int:
            return None
        # The bounds are those of MLflow's columns.
        if not (0 <= time_ms < 2**63 and -(2**63) <= step < 2**63):
            return None
        "".join(values).encode()  # names with lone surrogates cannot be sent
        return Record(time_ms, step, values)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None


# Other records of the code of a rank than metrics, one JSON line per event, in files beside the journal.
#
#     journal/attempt-001.rank-00000.events.jsonl     {"format":1}
#                                                     {"t":1760000000000,"param":{"lr":"0.1"}}
#                                                     {"t":1760000000000,"tag":{"stage":"pretraining"}}
#                                                     {"t":1760000000000,"dataset":{"name":"digits","digest":"…"}}
#                                                     {"t":1760000000000,"model":"m-…"}
#
# An event `model` names a folder in `logged_models/`: its model is complete or has changed since. Parameters and tags
# are cut to MLflow's limits when they are written.

#: Maximum number of characters of a name; `clean_name` shortens it further.
MAX_EVENT_NAME = 1000
_EVENTS_FILE = re.compile(r"attempt-(\d+)\.rank-(\d+)(?:\.pid-\d+)?\.events\.jsonl")
#: Limit of one read; longer files are read in several passes.
_READ_BYTES = 16 << 20


class Event(NamedTuple):
    """A record of the code of a rank that is no metric."""

    kind: str  #: param, tag, dataset or model
    content: Any


class EventWriter(JournalWriter):
    """Append events to a file of one process, as safely as the journal."""

    def __init__(self, folder: Path, attempt: int, rank: int, *, file_suffix: str = "") -> None:
        super().__init__(folder, attempt, rank, file_suffix=f"{file_suffix}.events")

    def record(self, kind: str, content: Any) -> None:
        """Record an event. One that is longer than MAX_LINE_BYTES is left out with a warning."""
        event = {"t": time.time_ns() // 1_000_000, kind: content}
        line = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"
        if len(line) > MAX_LINE_BYTES:
            log.warning("a %s of %d bytes is not recorded: it is too long", kind, len(line))
            return
        self._append(line)


def event_files(folder: Path) -> list[Path]:
    """Return the files with events, in the order of attempts and ranks."""
    return [file.path for file in journal_files(folder, _EVENTS_FILE)]


def _are_texts(content: dict[str, Any]) -> bool:
    return all(isinstance(value, str) for value in content.values())


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Return the complete events from `offset` on, and the offset at which the next call continues."""
    data = _read_lines(path, offset, _READ_BYTES)
    events = []
    for raw in _values(data, path):
        match raw:
            case {"param": dict(content)} if _are_texts(content):
                events.append(Event("param", content))
            case {"tag": dict(content)} if _are_texts(content):
                events.append(Event("tag", content))
            case {"dataset": dict(content)}:
                events.append(Event("dataset", content))
            case {"model": str(content)} if re.fullmatch(r"m-[0-9a-f]{32}", content):
                events.append(Event("model", content))
            case _:
                log.warning("%s: skipped a damaged line", path)
    return events, offset + len(data)
