"""Progress of the ranks of one attempt, from their heartbeats, and the reporters that show the events of a run."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from hpcdist.config.schema import Config, find_trainer
from hpcdist.config.topology import Roles
from hpcdist.host.files import open_regular, parse_json, read_json
from hpcdist.host.log_files import RANK_LINE, LogTail
from hpcdist.run.folder import Attempt
from hpcdist.run.status import BEAT_EVERY_S, beat_interval_s, num_due_ranks
from hpcdist.supervisor.launcher import Ranks
from hpcdist.supervisor.restart_policy import Failure
from hpcdist.supervisor.stragglers import StragglerEvent, Stragglers

# Reporters receive the events of a supervised run.


class Reporter(Protocol):
    """Receives the events of a run, such as `RunView` in `cli/run_views.py`, which shows them to a user."""

    def attempt(self, attempt: Attempt, num_ranks: int) -> None:
        """An attempt begins."""

    def progress(self, beat: Mapping[str, Any]) -> None:
        """A heartbeat of a rank has arrived."""

    def note(self, text: str) -> None:
        """The supervisor has a message for the user."""

    def output(self, text: str) -> None:
        """A script or an own trainer has printed lines."""

    def failure(self, failure: Failure, log: Path) -> None:
        """An attempt has failed; `log` is that of the first failed rank."""


def log_of(attempt: Attempt, failure: Failure) -> Path:
    if failure.kind == "unfit":
        return attempt.preflight.with_suffix(".txt")
    srun = attempt.path / "srun.log"  # on Slurm only
    return srun if failure.kind == "not_started" and srun.exists() else attempt.log(failure.rank)


# Progress of the ranks of one attempt, from their heartbeats: hung ranks, stragglers, and the last known steps.

log = logging.getLogger(__name__)


class ProgressMonitor:
    """Detects hung ranks and stragglers in one attempt, and reports the progress of rank 0.

    The cost of a check does not depend on the number of ranks: it covers some of them in turn
    (`num_due_ranks`). For plain scripts the size of the log counts as progress as well, since only those that
    report steps (`rank/script_api.py`) write heartbeats.

    A rank of a trainer that reports each step must go on doing so. All other ranks may be silent as long as one of them
    makes progress, since often rank 0 alone prints and logs.

    Attributes:
        unavailable_until: last time at which the attempt's folder was unavailable; missing heartbeats before it are no
            sign of a hang.
    """

    def __init__(self, attempt: Attempt, ranks: Ranks, config: Config, report: Reporter, now: float) -> None:
        self._attempt = attempt
        self._ranks = ranks
        self._report = report
        self._is_script = bool(config.trainer.script)
        self._timeout_s = config.launch.hang_s
        self._num_ranks = len(ranks.running) + len(ranks.exits)
        self._signs: list[tuple[object, float]] = [(None, now)] * self._num_ranks
        roles = Roles.of(config.roles, self._num_ranks)
        self._stragglers = Stragglers(lambda rank: roles.of_rank(rank)[0])
        self._next_rank = 0
        self._last_check = self._last_progress = now
        self._shown: object = None
        self._diverged = ""
        is_own = self._is_script or find_trainer(config.trainer.target) is None
        self._output = RankOutput(attempt.log(0)) if is_own else None
        self.unavailable_until = now

    def last_step(self, rank: int) -> int | None:
        """Return the last known step of a rank; None before its first heartbeat."""
        step = self._beat_step(rank)
        if step is not None and beat_interval_s(rank, self._num_ranks, self._timeout_s) > BEAT_EVERY_S:
            # Heartbeats of large runs may be a minute old; rank 0, at the same step, writes more often.
            step = max(step, self._beat_step(0) or 0)
        return step

    def _beat_step(self, rank: int) -> int | None:
        try:
            step: int | None = (read_json(self._attempt.beat(rank)) or {}).get("step")
        except OSError as unread:
            log.warning("%s: %s; its last step is unknown", unread.filename, unread.strerror)
            return None
        return step

    def show(self) -> None:
        """Report a changed heartbeat of rank 0 and, for a script or an own trainer, its new output."""
        try:
            printed = _size_and_time(self._attempt.log(0)) if self._output is not None else None
            sign = self._sign(0), printed
            if sign == self._shown:
                return
            if self._output is not None and printed is not None:
                for text in self._output.news():
                    self._report.output(text)
            beat, self._shown = read_json(self._attempt.beat(0), within_s=0), sign
            if beat is not None:
                self._report.progress(beat)
                if (diverged := beat.get("diverged", "")) != self._diverged:
                    self._diverged = diverged
                    self._report.note(f"{diverged}: the training has diverged; `stop.nan_losses` ends such a run")
        except OSError:
            return  # reported with the next change; `Watch` logs an unavailable folder

    def find_hung(self, now: float) -> int | None:
        """Return the rank without progress for the longest time if that exceeds the hang timeout, else None."""
        if not any(self._is_overdue(rank, now) for rank in self._due_ranks(now)) or not self._takes_writes(now):
            return None
        return min(self._ranks.running, key=self._last_sign)

    def silent_s(self, now: float) -> float:
        """Return the time since the last progress of any rank."""
        return now - max(self._last_progress, self.unavailable_until)

    def overdue(self, now: float) -> set[int]:
        """Return the running ranks without progress for the hang timeout."""
        since = now - self._timeout_s
        return {rank for rank in self._ranks.running if max(self._signs[rank][1], self.unavailable_until) <= since}

    def postpone(self, now: float) -> None:
        """Count the time from now on as silence, since the ranks do not hang."""
        self._last_progress = now
        self._signs = [(known, now) for known, _ in self._signs]

    def _due_ranks(self, now: float) -> list[int]:
        count = num_due_ranks(self._num_ranks, now - self._last_check, self._timeout_s)
        self._last_check = now
        first, self._next_rank = self._next_rank, (self._next_rank + count) % self._num_ranks
        ranks = ((first + offset) % self._num_ranks for offset in range(count))
        return [rank for rank in ranks if rank not in self._ranks.exits]

    def _is_overdue(self, rank: int, now: float) -> bool:
        known, since = self._signs[rank]
        try:
            # Plain scripts have no step timing.
            timing_due = not self._is_script and self._stragglers.is_due(rank, now)
            sign = self._read_timing(rank, now) if timing_due else self._sign(rank)
            if sign == known and now - max(since, self.unavailable_until) >= self._timeout_s:
                if self.silent_s(now) >= self._timeout_s or self._is_regular(rank):
                    return True
                since = self._last_progress  # the next check that reads its heartbeat is due later
        except OSError:
            since, sign = now, known  # an unreadable heartbeat is no sign of a hang
        if sign != known:
            since = now
        self._signs[rank] = (sign, since)
        self._last_progress = max(self._last_progress, since)
        return False

    def _is_regular(self, rank: int) -> bool:
        """Return whether a rank must go on reporting: one of a trainer that has begun to report each step."""
        beat = None if self._is_script else read_json(self._attempt.beat(rank), within_s=0) or {}
        return beat is not None and bool(beat.get("regular", True))

    def _takes_writes(self, now: float) -> bool:
        """Return whether ranks can write heartbeats; if not, missing heartbeats are no sign of a hang."""
        probe = self._attempt.path / ".supervisor.probe"
        try:
            probe.write_bytes(bytes(1024))
            probe.unlink()
        except OSError as error:
            log.warning("%s: %s; ranks without a heartbeat do not count as hung", probe, error.strerror)
            self.unavailable_until = now
            return False
        return True

    def _last_sign(self, rank: int) -> tuple[float, float]:
        """Return the time of a rank's last heartbeat, and the time at which this process last saw progress."""
        beat = None if self._is_script else read_json(self._attempt.beat(rank))
        return (float(beat["time"]) if beat else 0.0, self._signs[rank][1])

    def _sign(self, rank: int) -> object:
        """Return a value that changes with a rank's progress: of its heartbeat file, and of a plain script's log."""
        beat = _size_and_time(self._attempt.beat(rank))
        return (beat, _size_and_time(self._attempt.log(rank))) if self._is_script else beat

    def _read_timing(self, rank: int, now: float) -> object:
        """Return `_sign` of a rank, and pass its heartbeat to the straggler detection."""
        try:
            with open_regular(self._attempt.beat(rank)) as file:
                found = os.fstat(file.fileno())
                text = file.read()
        except FileNotFoundError:
            return None
        sign = found.st_size, found.st_mtime_ns
        try:
            beat = parse_json(text)
        except ValueError:  # half written: the next check reads it again
            return sign
        for event in self._stragglers.note(rank, beat, now):
            self._report_straggler(event)
        return sign

    def _report_straggler(self, event: StragglerEvent) -> None:
        self._report.note(event.text)
        line = json.dumps({"time": time.time(), "text": event.text, **asdict(event)})
        try:
            with open(self._attempt.stragglers, "a") as file:
                file.write(line + "\n")
        except OSError as error:
            self._report.note(f"{self._attempt.stragglers} cannot be written ({error.strerror})")


class RankOutput:
    """New output of a rank since the last call, without hpcdist's own lines except its warnings.

    An error is reported with its traceback by `Reporter.failure`, so nothing is shown after its line.
    """

    def __init__(self, log: Path) -> None:
        self._tail = LogTail(log)
        self._failed = False

    def news(self) -> Iterator[str]:
        """Yield the new text in pieces. Raises OSError if the log cannot be read."""
        for text in self._tail.news():
            if shown := "".join(line for line in text.splitlines(keepends=True) if self._is_shown(line)):
                yield shown

    def _is_shown(self, line: str) -> bool:
        own = RANK_LINE.match(line)
        self._failed = self._failed or (own is not None and own["level"] == "ERROR")
        return not self._failed and (own is None or own["level"] == "WARNING")


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns
