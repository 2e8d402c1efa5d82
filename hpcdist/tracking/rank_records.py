"""The records of one rank: metrics to the journal, parameters, tags and models to its event file.

`Context.log`, `hpcdist.log` and MLflow's tracking store `hpcdist` (`script_store.py`) write here. Nothing waits for a
server, and only the standard library is needed. Rank 0's records are uploaded; records of other ranks by MLflow are
only kept for reading them back. The metrics of their nodes, which `Context.should_stop` and `rank/system_metrics.py`
write to `journal` directly, are uploaded.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import parse_qs, quote, urlsplit

from hpcdist.errors import TrackingError, UserMistake, shown
from hpcdist.run import mlflow_limits
from hpcdist.run.folder import RunDir
from hpcdist.tracking import journal

log = logging.getLogger(__name__)
SCHEME = "hpcdist"
#: Maximum number of metrics that ranks other than 0 keep for reading back.
MAX_KEPT = 1000
#: Prefix for a name of the rank's code that hpcdist uses itself.
SCRIPT_PREFIX = "script."
#: Metrics that hpcdist logs: the ledger, system metrics and the time account.
RESERVED_PREFIXES = ("usage/", "system/", "time/")
URI_VARIABLE = "MLFLOW_TRACKING_URI"


def run_id_of(run: RunDir) -> str:
    """Return the id by which the code of a rank knows its run; MLflow's own id may not exist yet."""
    return hashlib.sha256(f"{run.experiment}/{run.name}".encode()).hexdigest()[:32]


def not_reserved(key: str) -> str:
    """Return the name of a script's metric, with a prefix if hpcdist logs metrics of its own beside it."""
    if str(key).startswith(RESERVED_PREFIXES):
        return SCRIPT_PREFIX + key
    return key


def is_of_code(record: journal.Record) -> bool:
    """Return whether a record has a metric of the user's code, besides those that hpcdist measures."""
    return any(not_reserved(key) == key for key in record.metrics)


def has_metrics(run: RunDir) -> bool:
    """Return whether the code of a run has logged a metric."""
    for file in journal.journal_files(run.journal):
        offset = 0
        while True:
            chunk = journal.read_chunk(file.path, offset, final=True)
            if any(map(is_of_code, chunk.records)):
                return True
            if chunk.offset == offset:
                break
            offset = chunk.offset
    return False


class Value(NamedTuple):
    """The value of a metric at a step."""

    value: float
    time_ms: int
    step: int


class RankRecords:
    """The records of the code of this process, and how they are written.

    Args:
        pid: process of the rank. Processes that the rank starts write files of their own, because a journal file has
            one writer.
    """

    def __init__(self, run: RunDir, *, attempt: int, rank: int, pid: int) -> None:
        self.run = run
        self.attempt = attempt
        self.rank = rank
        self.is_main = rank == 0  #: whether the records are uploaded
        self.pid = os.getpid()
        self._rank_pid = pid
        file_suffix = "" if pid == self.pid else f".pid-{self.pid}"
        self.journal = journal.JournalWriter(run.journal, attempt, rank, file_suffix=file_suffix)
        self._events = journal.EventWriter(run.journal, attempt, rank, file_suffix=file_suffix)
        #: Called with the metrics of each step, for the heartbeat.
        self.on_metrics: Callable[[Mapping[str, float], int | None], None] = lambda metrics, step: None
        self.params: dict[str, str] = {}  #: MLflow keeps the first value of each
        self._own_params: dict[str, str] = {}  #: those that this process has logged
        self._warned: set[str] = set()
        self.tags: dict[str, str] = {}
        self._latest: dict[str, Value] = {}
        self._offsets: dict[Path, int] = {}  #: up to which `_latest` has the records of journal files
        self._next_step: dict[str, int] = {}
        self._is_loaded = attempt == 1 or not self.is_main

    @property
    def uri(self) -> str:
        """The tracking URI of this rank, `hpcdist:/folder?attempt=1&rank=0&pid=4711`."""
        path = quote(str(self.run.path))
        return f"{SCHEME}://{path}?attempt={self.attempt}&rank={self.rank}&pid={self._rank_pid}"

    def environment(self) -> dict[str, str]:
        """Return the variables by which MLflow in this process and in its children logs to these records."""
        return {
            URI_VARIABLE: self.uri,
            # Without it each call of MLflow tries to import Spark, which takes most of the time of the call.
            "MLFLOW_REGISTRY_URI": self.uri,
            "MLFLOW_RUN_ID": run_id_of(self.run),
            "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",  # hpcdist records them
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }

    @classmethod
    def of_uri(cls, uri: str) -> Self:
        """Return the records of the rank that a tracking URI names. Raises TrackingError for any other URI."""
        parts = urlsplit(uri)
        try:
            given = {key: int(value) for key, (value,) in parse_qs(parts.query, strict_parsing=True).items()}
            run = RunDir(Path(parts.path))
            return cls(run, attempt=given["attempt"], rank=given["rank"], pid=given["pid"])
        except (ValueError, KeyError) as error:
            raise TrackingError(
                f"{uri!r} is not a tracking URI that hpcdist has set for a rank: use the value of {URI_VARIABLE}"
            ) from error

    # --- writing

    def log(self, metrics: Mapping[str, float], step: int, time_ms: int | None = None, *, is_step: bool = True) -> None:
        """Record the metrics of a step; see `JournalWriter.log`, also for the errors.

        Args:
            is_step: False if `step` only numbers the points of a metric, and is no step of the training.
        """
        if time_ms is None:
            time_ms = time.time_ns() // 1_000_000
        metrics = {self._not_reserved(key): value for key, value in metrics.items()}
        if self.is_main:
            self.journal.log(metrics, step, time_ms)
        values = {key: float(value) for key, value in metrics.items()}
        if not self.is_main:
            for key, value in values.items():
                if key in self._latest or len(self._latest) < MAX_KEPT:
                    self._note_latest(key, Value(value, time_ms, step))
        self.on_metrics(values, step if is_step else None)

    def _not_reserved(self, key: str) -> str:
        """Return the name of a metric, with a prefix if hpcdist logs metrics of its own beside it."""
        renamed = not_reserved(key)
        if renamed == key:
            return key
        self._warn_once(f"metric {key[:80]} is logged as {renamed[:80]}: {key.partition('/')[0]}/ is for hpcdist's own")
        return renamed

    def _warn_once(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < MAX_KEPT and self.is_main:
            self._warned.add(text)
            log.warning("%s", text)

    def _shortened(self, kind: str, key: str, value: str, limit: int) -> str:
        """Return a value as MLflow can store it, with a warning if it is too long."""
        shortened = mlflow_limits.cut_with_mark(value, limit)
        if shortened != value:
            self._warn_once(
                f"{kind} {key[:80]} has {len(value)} characters and is cut to {limit}, the limit of MLflow: log longer"
                " texts as artifacts, as with mlflow.log_text"
            )
        return shortened

    def _note_latest(self, key: str, value: Value) -> None:
        if key not in self._latest or value.step >= self._latest[key].step:
            self._latest[key] = value

    def numbered(self, key: str, step: int) -> int:
        """Return the step of a point that may have been logged without one, which MLflow's client turns into 0.

        The points of a metric that has only had step 0 are numbered from 0 in each attempt, since reports show one
        point for each step.
        """
        if step != 0:
            self._next_step[key] = -1
            return step
        number = self._next_step.get(key, 0)
        if number < 0:
            return 0
        self._next_step[key] = number + 1
        return number

    def set_param(self, key: str, value: str) -> None:
        """Record a parameter; one that is known with the same value is not recorded again.

        A later attempt may log another value, such as the time of its start, which becomes a tag in MLflow.

        Raises UserMistake if this process has logged another value before, as MLflow does.
        """
        self._load()
        value = self._shortened("parameter", key, value, mlflow_limits.MAX_PARAM)
        before = self._own_params.setdefault(key, value)
        if before != value:
            raise UserMistake(
                f"Changing param values is not allowed: parameter {shown(key)} was already logged with the value"
                f" {shown(before)}, and now with {shown(value)}: use a tag or a metric for a value that changes"
            )
        if self.params.get(key) != value:
            self.params.setdefault(key, value)
            self.record("param", {key[: journal.MAX_EVENT_NAME]: value})

    def set_tag(self, key: str, value: str) -> None:
        """Record a tag, unless it has this value already."""
        self._load()
        value = self._shortened("tag", key, value, mlflow_limits.MAX_TAG)
        if self.tags.get(key) != value:
            self.tags[key] = value
            self.record("tag", {key[: journal.MAX_EVENT_NAME]: value})

    def record(self, kind: str, content: object) -> None:
        """Record an event (`journal.Event`) for the upload; only rank 0 does."""
        if self.is_main:
            self._events.record(kind, content)

    def close(self) -> None:
        """Write the pending records. Raises HpcdistError if records would be lost."""
        self.journal.close()
        self._events.close()

    # --- reading back

    def latest(self) -> dict[str, Value]:
        """Return the last value of each metric, earlier attempts included; on rank 0 from the journal."""
        self._load()
        if not self.is_main:
            return self._latest
        for file in journal.journal_files(self.run.journal):
            if file.rank != 0:
                continue
            records, self._offsets[file.path] = journal.read_records(file.path, self._offsets.get(file.path, 0))
            for time_ms, step, metrics in records:
                for key, value in metrics.items():
                    self._note_latest(key, Value(value, time_ms, step))
        return self._latest

    def history(self, key: str) -> list[Value]:
        """Return all values of a metric in the journal of rank 0, earlier attempts included."""
        key = self._not_reserved(key)
        values = []
        for file in journal.journal_files(self.run.journal):
            if file.rank != 0:
                continue
            records, _ = journal.read_records(file.path)
            for record in records:
                if key in record.metrics:
                    values.append(Value(record.metrics[key], record.time_ms, record.step))
        return values

    def _load(self) -> None:
        """Load, once, the parameters and tags of earlier attempts."""
        if self._is_loaded:
            return
        self._is_loaded = True
        for path in journal.event_files(self.run.journal):
            for event in journal.read_events(path)[0]:
                if event.kind == "param":
                    self.params = event.content | self.params
                elif event.kind == "tag":
                    self.tags |= event.content


def is_declared() -> bool:
    """Return whether the installed package declares this plugin to MLflow: it may be older than its code."""
    from importlib.metadata import PackageNotFoundError, distribution

    declared = ("mlflow.tracking_store", "hpcdist.tracking.mlflow_plugin")
    try:
        return any((point.group, point.module) == declared for point in distribution("hpcdist").entry_points)
    except PackageNotFoundError:
        return False


_own: RankRecords | None = None


def begin(records: RankRecords) -> RankRecords:
    """Make `records` those of this process, which `current` returns."""
    global _own
    _own = records
    return records


def current() -> RankRecords | None:
    """Return the records of this process; None outside of a run.

    A process that a rank has started finds the rank by its tracking URI.
    """
    global _own
    if _own is None or _own.pid != os.getpid():
        uri = os.environ.get(URI_VARIABLE, "")
        _own = None
        if uri.startswith(f"{SCHEME}:"):
            _own = RankRecords.of_uri(uri)
    return _own
