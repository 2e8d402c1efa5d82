"""The process that reads the metrics of a script which does not log with MLflow: from its files and its output.

    python -P -m hpcdist.tracking.script_metrics RUN_DIR

It appends the metrics in event files, csv files and the log of rank 0 to its own journal file, which the shipper
uploads like all others. The supervisor starts it before the first attempt, and it makes a last pass after the ranks of
the last one have ended: nothing is lost if a rank is killed. It is a process of its own because a regular expression of
the user may take forever.

How much has been read is saved after the journal. After a kill in between, the same points are appended again: a point
has the same step in the same attempt, so that the shipper sends it once.
"""

import logging
import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcdist.config.record_schema import TrackingConfig
from hpcdist.config.written import read_section
from hpcdist.errors import HpcdistError, RunFolderError, UserMistake
from hpcdist.host import log_files, retry
from hpcdist.host.json_files import fill, read_json, write_json
from hpcdist.host.locks import lock_now, open_lock
from hpcdist.run.folder import Attempt, RunDir, require_same
from hpcdist.tracking.csv_logs import NotALog, read_rows
from hpcdist.tracking.event_files import read_scalars
from hpcdist.tracking.journal import READER_SUFFIX, JournalWriter, is_of_reader, journal_files, read_records
from hpcdist.tracking.output_metrics import OutputPatterns, read_lines
from hpcdist.tracking.rank_records import is_of_code, not_reserved
from hpcdist.tracking.written_files import WrittenFile, is_event_file, read_written_files

log = logging.getLogger(__name__)

POLL_S = 1.0
#: Longest time between two saves of the state.
SAVE_S = 20.0
#: A file of an ended attempt that has changed so long after the last pass was changed by another program.
OTHER_PROGRAM_S = 60.0
#: Names of csv files with columns that need no prefix.
_PLAIN_NAMES = ("metrics", "log", "logs", "progress", "history", "summary", "training_log", "results")
_STDIN = 0
_SIGNALS = {signal.SIGTERM, signal.SIGINT}


@dataclass(kw_only=True)
class ReadParts:
    """How much of the files of one attempt has been read."""

    rows: dict[str, int] = field(default_factory=dict)  #: csv file → number of rows
    offsets: dict[str, int] = field(default_factory=dict)  #: event file → bytes
    log_offset: int = 0
    matches: dict[str, int] = field(default_factory=dict)  #: metric of the output → number of its values
    time: float = 0.0  #: of the last pass
    complete: bool = False  #: the attempt has ended, and all was read


def _read_state(path: Path) -> dict[int, ReadParts]:
    """Return by attempt how much has been read. Raises RunFolderError and ValueError if the file is damaged."""
    raw = (read_json(path) or {}).get("attempts", {})
    if not isinstance(raw, dict) or not all(isinstance(parts, dict) for parts in raw.values()):
        raise ValueError(f"{path} is damaged")
    return {int(number): fill(ReadParts, parts, path) for number, parts in raw.items()}


class ScriptMetrics:
    """Appends the new metrics of a run's script to the journal, at each call of `read`."""

    def __init__(self, run: RunDir, tracking: TrackingConfig) -> None:
        self._run = run
        self._reads_files = tracking.script_files
        self._patterns = OutputPatterns(tracking.stdout_metrics)
        self._has_patterns = bool(tracking.stdout_metrics)
        self._state = run.journal / "read-files.json"
        self._parts: dict[int, ReadParts] = {}
        with suppress(RunFolderError, ValueError):  # a damaged file: everything is read again, which is safe
            self._parts = _read_state(self._state)
        self._saved = ""
        self._saved_at = -math.inf
        #: Up to which it is known that the script has logged nothing itself, by journal file.
        self._searched: dict[Path, int] = {}
        #: Files that are not read.
        self._left_out: set[Path] = set()
        #: Size and time of a csv file that was read.
        self._seen: dict[Path, tuple[int, int]] = {}

    def read(self, *, over: bool) -> None:
        """Append the new metrics; the newest attempt has ended if it is `over`. Raises HpcdistError and OSError."""
        attempts = self._run.attempts()
        if self._reads_files and self._logs_itself():
            # Its files would repeat the metrics at other steps, as Lightning's csv log beside MLflow's autologging.
            self._reads_files = False
        written = {attempt.number: read_written_files(attempt) for attempt in attempts if self._reads_files}
        for attempt in attempts:
            parts = self._parts.setdefault(attempt.number, ReadParts())
            if parts.complete:
                continue
            final = over or attempt is not attempts[-1]
            # Lines that later attempts have appended to the same files, or replaced, are theirs.
            ends: dict[Path, int] = {}
            for number in sorted(written, reverse=True):
                if number > attempt.number:
                    ends |= {file.path: file.start for file in written[number]}
            with JournalWriter(self._run.journal, attempt.number, file_suffix=READER_SUFFIX) as journal:
                self._read_files(written.get(attempt.number, []), ends, parts, journal, final=final)
                if self._has_patterns:
                    self._read_output(attempt, parts, journal, final=final)
            parts.time = time.time()
            parts.complete = final
        self._save()

    def _logs_itself(self) -> bool:
        """Return whether the script has logged metrics with MLflow or hpcdist.log since the last call."""
        for file in journal_files(self._run.journal):
            if is_of_reader(file.path.name):
                continue
            records, self._searched[file.path] = read_records(file.path, self._searched.get(file.path, 0))
            if any(map(is_of_code, records)):
                return True
        return False

    def _save(self) -> None:
        """Save how much has been read: at once if it is more than before, else now and then."""
        now = time.monotonic()
        amounts = str([replace(parts, time=0.0) for parts in self._parts.values()])
        if amounts == self._saved and now < self._saved_at + SAVE_S:
            return
        write_json(self._state, {"attempts": {str(number): vars(parts) for number, parts in self._parts.items()}})
        self._saved = amounts
        self._saved_at = now

    def _read_files(
        self,
        files: Sequence[WrittenFile],
        ends: Mapping[Path, int],
        parts: ReadParts,
        journal: JournalWriter,
        *,
        final: bool,
    ) -> None:
        prefixes = prefixes_of([file.path for file in files])
        for file in files:
            path = file.path
            if path in self._left_out:
                continue
            try:
                status = retry.retry(path.stat, path, within_s=0)
                if final and parts.time and status.st_mtime > parts.time + OTHER_PROGRAM_S:
                    continue
                if is_event_file(path):
                    self._read_events(file, ends.get(path), prefixes[path], parts, journal)
                elif final or self._seen.get(path) != (status.st_size, status.st_mtime_ns):
                    self._read_csv(file, ends.get(path), prefixes[path], parts, journal, final=final)
                    self._seen[path] = (status.st_size, status.st_mtime_ns)
            except FileNotFoundError:  # the script has removed it, or it is visible inside a container only
                continue
            except NotALog as error:
                self._left_out.add(path)
                log.info("%s: %s", path, error)
            except (ValueError, OSError) as error:
                if isinstance(error, OSError) and retry.is_away(error) and not final:
                    continue  # the next pass reads it
                self._left_out.add(path)
                log.warning("metrics in %s are not read any more: %s", path, error)

    def _read_events(
        self, file: WrittenFile, end: int | None, prefix: str, parts: ReadParts, journal: JournalWriter
    ) -> None:
        offset = parts.offsets.get(str(file.path), file.start)
        while end is None or offset < end:
            scalars, new_offset = read_scalars(file.path, offset)
            if new_offset == offset:
                break
            for scalar in scalars:
                _log(journal, {prefix + scalar.tag: scalar.value}, scalar.step, scalar.time_ms)
            offset = new_offset
        parts.offsets[str(file.path)] = offset

    def _read_csv(
        self, file: WrittenFile, end: int | None, prefix: str, parts: ReadParts, journal: JournalWriter, *, final: bool
    ) -> None:
        if end == 0:  # a later attempt has begun the file anew
            return
        done = parts.rows.get(str(file.path), -1)
        rows, num_rows = read_rows(file.path, done, start=file.start, end=end, final=final)
        for row in rows:
            _log(journal, {prefix + name: value for name, value in row.metrics.items()}, row.step)
        parts.rows[str(file.path)] = num_rows

    def _read_output(self, attempt: Attempt, parts: ReadParts, journal: JournalWriter, *, final: bool) -> None:
        while True:
            try:
                lines, offset = read_lines(attempt.log(0), parts.log_offset, final=final)
            except FileNotFoundError:
                return
            has_read_all = offset <= parts.log_offset  # a shortened log is read on from its new end
            parts.log_offset = offset
            for line in lines:
                for metric, value, step in self._patterns.find(line):
                    number = parts.matches.get(metric, 0)
                    parts.matches[metric] = number + 1
                    _log(journal, {metric: value}, number if step is None else step)
            if has_read_all:
                return


def _log(journal: JournalWriter, metrics: Mapping[str, float], step: int, time_ms: int | None = None) -> None:
    """Append the metrics of a step to the journal, unless it refuses them, such as a name of 4,000 characters."""
    if not metrics:
        return
    try:
        journal.log({not_reserved(name): value for name, value in metrics.items()}, step, time_ms)
    except UserMistake as error:
        log.warning("%s", error)


def prefixes_of(paths: Sequence[Path]) -> dict[Path, str]:
    """Return a prefix for the metrics of each file, so that those of several files are apart.

    A csv file gives its name, unless it is a usual one as `metrics.csv`. Event files, and csv files of one name, give
    their folder: relative to that of the first one of them, which gives none.
    """
    first: dict[str, Path] = {}
    prefixes = {}
    for path in paths:
        kind = "events" if is_event_file(path) else path.name
        base = first.setdefault(kind, path.parent)
        prefix = ""
        if path.parent != base:
            folder = path.parent
            prefix = f"{folder.relative_to(base) if folder.is_relative_to(base) else folder.name}/"
        if not is_event_file(path) and path.stem.lower() not in _PLAIN_NAMES:
            prefix += f"{path.stem}/"
        prefixes[path] = prefix
    return prefixes


@contextmanager
def _only_reader(run: RunDir) -> Iterator[None]:
    """Hold the lock of the run's reader: the one of a supervisor that has died makes a last pass."""
    path = run.journal / ".script-metrics.lock"
    with retry.retry(lambda: open_lock(path), path) as file:
        while not lock_now(file):
            time.sleep(POLL_S)
        yield


def follow(run: RunDir) -> None:
    """Read until the supervisor sends a byte, or has died, and then once more. Raises HpcdistError and OSError."""
    metrics = ScriptMetrics(run, read_section(run.config, "tracking", TrackingConfig))
    while True:
        is_ending = bool(select.select([_STDIN], [], [], POLL_S)[0])
        # Without a byte the supervisor has died: the next one, if there is one, completes the attempt.
        is_over = is_ending and os.read(_STDIN, 1) != b""
        metrics.read(over=is_over)
        if is_ending:
            return


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Read the metrics of the run in folder `argv[0]` until it has ended. Returns the exit code."""
    # The batch system's SIGTERM is for the ranks, which still write.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    log_files.configure()
    try:
        require_same(Path(argv[0]), env)
        run = RunDir.open(Path(argv[0]))
        log_files.limit_log(run.path)
        with retry.patient(retry.UNATTENDED_S), _only_reader(run):
            follow(run)
    except HpcdistError as error:
        log.error("%s", error)
        return error.exit_code
    except OSError as error:
        log.error("metrics in files of the script are not read any more: %s: %s", error.filename, error.strerror)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
