"""Watch over the ranks of one attempt: exits, heartbeats and requests."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, NamedTuple

from hpcdist.config.schema import Config
from hpcdist.files.atomic import read_json
from hpcdist.files.bounded_json import parse_json
from hpcdist.files.log_text import LogTail
from hpcdist.rank.roles import Roles
from hpcdist.run.attempt import Attempt, Request
from hpcdist.run.polling import BEAT_EVERY_S, beat_interval_s, num_due_ranks
from hpcdist.supervisor.hang.collect import collect
from hpcdist.supervisor.launcher import Ranks
from hpcdist.supervisor.reporter import Reporter
from hpcdist.supervisor.restart_policy import Failure, not_started
from hpcdist.supervisor.stragglers import StragglerEvent, Stragglers

log = logging.getLogger(__name__)
POLL_S = 0.2
#: Interval of retries to write a request.
REWRITE_S = 1.0
#: After this time of failed writes ranks get SIGTERM, which would kill a rank that is still starting.
SIGNAL_AFTER_S = 3.0
#: A longer poll has waited for the file system.
SLOW_POLL_S = 2.0
#: Time for other ranks to report their failures after the first one.
PEER_GRACE_S = 3.0
#: Time limit for collecting stack traces of hung ranks; dead nodes do not answer.
STACKS_S = 15.0
#: Less time is not enough to collect any stack trace.
LEAST_STACKS_S = 3.0
#: Time before the end of an allocation that is reserved for killing ranks and requeueing the job.
REST_S = 15.0


class Allocation(NamedTuple):
    """Time limit of the ranks. Times are seconds since the epoch."""

    stop_at: float  #: time of the stop request
    by: str  #: author of the stop request
    end: float  #: time at which all processes are killed


class LastSteps(Mapping[int, int | None]):
    """Last known step of each rank; heartbeats are read on access."""

    def __init__(self, attempt: Attempt, num_ranks: int, hang_timeout_s: float) -> None:
        self._attempt = attempt
        self._num_ranks = num_ranks
        self._hang_timeout_s = hang_timeout_s

    def __getitem__(self, rank: int) -> int | None:
        if not 0 <= rank < self._num_ranks:
            raise KeyError(rank)
        step: int | None = self._beat(rank).get("step")
        if step is not None and beat_interval_s(rank, self._num_ranks, self._hang_timeout_s) > BEAT_EVERY_S:
            # Heartbeats of large runs may be a minute old; rank 0, at the same step, writes more often.
            step = max(step, self._front)
        return step

    @cached_property
    def _front(self) -> int:
        return int(self._beat(0).get("step", 0))

    def _beat(self, rank: int) -> dict[str, Any]:
        try:
            return read_json(self._attempt.beat(rank)) or {}
        except OSError as unread:
            log.warning("%s: %s; its last step is unknown", unread.filename, unread.strerror)
            return {}

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._num_ranks))

    def __len__(self) -> int:
        return self._num_ranks


class Watch:
    """Watches the ranks of one attempt until all have ended.

    The cost of a poll does not depend on the number of ranks: it covers exits, requests, rank 0, and some of the other
    ranks in turn (`polling.num_due_ranks`).
    """

    def __init__(
        self,
        attempt: Attempt,
        ranks: Ranks,
        config: Config,
        report: Reporter,
        allocation: Allocation | None = None,
        *,
        signal_request: Callable[[], Request | None] = lambda: None,
        check_lease: Callable[[], None] = lambda: None,
    ) -> None:
        self._attempt = attempt
        self._ranks = ranks
        self._config = config
        self._report = report
        self._allocation = allocation
        self._signal_request = signal_request
        self._check_lease = check_lease
        self._clock: Callable[[], float] = time.monotonic
        self._num_ranks = len(ranks.running) + len(ranks.exits)
        self._progress: list[tuple[object, float]] = [(None, self._clock())] * self._num_ranks
        roles = Roles.of(config.roles, self._num_ranks)
        self._stragglers = Stragglers(lambda rank: roles.of_rank(rank)[0])
        self._turn = 0
        self._last_turn = self._clock()
        self._all_started = False
        #: Last time at which the attempt's folder was unavailable; missing heartbeats before it are no sign of a hang.
        self._unavailable_until = self._last_turn
        self._unavailable_since: float | None = None
        self._write_at = 0.0
        self._unwritten_since: float | None = None
        self._sent_sigterm = False
        self._kill_at: float | None = None
        self._shown: object = None
        self._output = LogTail(attempt.log(0))
        self.stop_requested = False
        self.cancelled = False

    def until_over(self) -> Failure | None:
        """Wait until all ranks have ended, or return the failure of ranks that hang or were not started.

        The caller kills the remaining ranks.
        """
        while self._ranks.running:
            began = self._clock()
            self._ranks.wait(POLL_S)
            self._check_lease()
            now = self._clock()
            self._note_delay(began, now)
            self._handle_requests(now)
            if self.cancelled:
                return None
            failed = any(self._is_failure(code) for code in self._ranks.exits.values())
            if failed:
                self._kill_by(now + PEER_GRACE_S)
            if self._kill_at is not None and now >= self._kill_at:
                return None if failed else self._overdue()
            if self._kill_at is None and (failure := self._late(now) or self._hung(now)) is not None:
                return failure
            self._show_progress()
            self._note_delay(now, self._clock())
        return None

    def _late(self, now: float) -> Failure | None:
        """Return the failure of ranks that were not started in time; checks once, when the time is over."""
        limit_s = self._config.launch.init_timeout_s
        if self._all_started or now < self._unavailable_until + limit_s:
            return None
        absent = self._ranks.absent()
        self._all_started = not absent
        why = f"within launch.init_timeout_s={limit_s:g} s: {self._ranks.last_message()}" if absent else ""
        return not_started(absent, self._num_ranks, why, self._ranks.host_of)

    def _note_delay(self, began: float, now: float) -> None:
        """Record a poll that has waited for the file system, because the ranks had to wait as well."""
        if now - began > SLOW_POLL_S:
            self._unavailable_until = now

    def _show_progress(self) -> None:
        """Report a changed heartbeat of rank 0 or, for a plain script, its new output."""
        try:
            sign = self._sign(0)
            if sign == self._shown:
                return
            if not self._config.trainer.script:
                beat, self._shown = read_json(self._attempt.beat(0), within_s=0), sign
                if beat is not None:
                    self._report.progress(beat)
                return
            for text in self._output.news():
                self._report.output(text)
            self._shown = sign
        except OSError:
            return  # reported with the next change; `_handle_requests` logs an unavailable folder

    def steps(self) -> Mapping[int, int | None]:
        """Return the last known step of each rank."""
        return LastSteps(self._attempt, self._num_ranks, self._config.launch.hang_timeout_s)

    def _handle_requests(self, now: float) -> None:
        request = self._request(now)
        if request is None:
            return
        if request.action == "cancel":
            self.cancelled = True
        elif not self.stop_requested:
            self.stop_requested = True
            self._kill_by(now + self._grace_s())
            self._report.note(f"stopping: the ranks save a checkpoint and exit ({request.reason})")
            if self._config.trainer.script:
                # A plain script does not read requests; it gets a signal.
                self._send_sigterm()

    def _request(self, now: float) -> Request | None:
        """Return the request to the attempt: from its folder, from a signal, or because the allocation ends soon."""
        found = self._read_request(now)
        asked = self._signal_request()
        if asked is None and self._allocation is not None and time.time() >= self._allocation.stop_at:
            asked = Request(action="stop", by=self._allocation.by, reason=self._allocation.by)
        if asked is None or (found is not None and (asked.action == "stop" or found.action == "cancel")):
            return found
        if now >= self._write_at:
            self._write_at = now + REWRITE_S
            self._write_request(asked, now)
        return asked

    def _read_request(self, now: float) -> Request | None:
        try:
            found = self._attempt.read_request(within_s=0)
        except OSError as error:
            if self._unavailable_since is None:
                self._unavailable_since = now
                log.warning("%s: %s; the ranks continue", error.filename, error.strerror)
            self._unavailable_until = now
            return None
        if self._unavailable_since is not None:
            log.warning("%s is available again after %.1f s", self._attempt.path, now - self._unavailable_since)
            self._unavailable_since = None
        return found

    def _write_request(self, asked: Request, now: float) -> None:
        """Write a request to the attempt's folder; if writes keep failing, send SIGTERM to the ranks."""
        try:
            self._attempt.send_request(asked.action, by=asked.by, reason=asked.reason, within_s=0)
        except OSError as error:
            self._unwritten_since = now if self._unwritten_since is None else self._unwritten_since
            late = now - self._unwritten_since >= SIGNAL_AFTER_S
            if late and asked.action == "stop" and not self._sent_sigterm:
                self._report.note(f"{self._attempt.request}: {error.strerror}; sending SIGTERM to the ranks")
                self._send_sigterm()

    def _send_sigterm(self) -> None:
        if not self._sent_sigterm:
            self._sent_sigterm = True
            self._ranks.signal(signal.SIGTERM)

    def _grace_s(self) -> float:
        """Return the time for ranks to save and exit, within the allocation."""
        grace_s = self._config.launch.stop_grace_s
        if self._allocation is None:
            return grace_s
        left_s = max(0.0, self._allocation.end - time.time())
        return min(grace_s, max(left_s - REST_S, left_s / 2))

    def _kill_by(self, then: float) -> None:
        self._kill_at = then if self._kill_at is None else min(self._kill_at, then)

    def _is_failure(self, code: int) -> bool:
        obeyed = self.stop_requested and bool(self._config.trainer.script) and code == -signal.SIGTERM
        return code != 0 and not obeyed

    def _overdue(self) -> Failure:
        return self._hang_failure(
            self._ranks.running[0],
            f"did not save and exit within launch.stop_grace_s={self._config.launch.stop_grace_s:g} s"
            + (", or before the end of the allocation" if self._allocation is not None else ""),
        )

    def _hang_failure(self, rank: int, error: str) -> Failure:
        """Collect stack traces, and return the failure of hung ranks.

        Args:
            rank: the culprit, unless the stack traces show another one.
        """
        left_s = STACKS_S
        if self._allocation is not None:
            left_s = min(left_s, self._allocation.end - time.time() - REST_S)
        found = None
        if left_s >= LEAST_STACKS_S:
            try:
                found = collect(self._attempt, self._ranks, limit_s=left_s, interrupted=self._is_cancelled)
            except OSError as unread:
                log.warning("%s: %s; no stack traces of this hang can be collected", unread.filename, unread.strerror)
        if found is not None and len(found.suspects) == 1:
            (rank,) = found.suspects
        return Failure(
            kind="hung",
            rank=rank,
            host=(found.hosts.get(rank) if found is not None else None) or self._ranks.host_of(rank),
            step=self.steps()[rank],
            error=error,
            detail=found.sentence if found is not None else "",
        )

    def _is_cancelled(self) -> bool:
        self._handle_requests(self._clock())
        return self.cancelled

    def _hung(self, now: float) -> Failure | None:
        """Return the failure of the rank without progress for the longest time, if that exceeds the limit."""
        if not any(self._is_overdue(rank, now) for rank in self._in_turn(now)) or not self._takes_writes(now):
            return None
        return self._hang_failure(
            min(self._ranks.running, key=self._last_sign),
            f"made no progress for launch.hang_timeout_s={self._config.launch.hang_timeout_s:g} s"
            f" (stack traces of all ranks are in {self._attempt.path})",
        )

    def _in_turn(self, now: float) -> list[int]:
        """Return the ranks that are due for a check."""
        count = num_due_ranks(self._num_ranks, now - self._last_turn, self._config.launch.hang_timeout_s)
        self._last_turn = now
        first, self._turn = self._turn, (self._turn + count) % self._num_ranks
        ranks = ((first + place) % self._num_ranks for place in range(count))
        return [rank for rank in ranks if rank not in self._ranks.exits]

    def _is_overdue(self, rank: int, now: float) -> bool:
        known, since = self._progress[rank]
        try:
            sign = self._read(rank, now) if self._is_due(rank, now) else self._sign(rank)
        except OSError:
            self._progress[rank] = (known, now)  # an unreadable heartbeat is no sign of a hang
            return False
        if sign != known:
            self._progress[rank] = (sign, now)
            return False
        return now - max(since, self._unavailable_until) >= self._config.launch.hang_timeout_s

    def _takes_writes(self, now: float) -> bool:
        """Return whether ranks can write heartbeats; if not, missing heartbeats are no sign of a hang."""
        probe = self._attempt.path / ".supervisor.probe"
        try:
            probe.write_bytes(bytes(1024))
            probe.unlink()
        except OSError as error:
            log.warning("%s: %s; ranks without a heartbeat do not count as hung", probe, error.strerror)
            self._unavailable_until = now
            return False
        return True

    def _is_due(self, rank: int, now: float) -> bool:
        """Return whether the step timing of a rank is due to be read; plain scripts have none."""
        return not self._config.trainer.script and self._stragglers.is_due(rank, now)

    def _read(self, rank: int, now: float) -> object:
        """Return `_sign` of a rank, and pass its heartbeat to the straggler detection."""
        try:
            with open(self._attempt.beat(rank), "rb") as file:
                found = os.fstat(file.fileno())
                text = file.read()
        except FileNotFoundError:
            return None
        sign = found.st_size, found.st_mtime_ns
        try:
            beat = parse_json(text)
        except ValueError:  # half written: the next turn reads it again
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

    def _last_sign(self, rank: int) -> tuple[float, float]:
        """Return the time of a rank's last heartbeat, and the time at which this process last saw progress."""
        beat = None if self._config.trainer.script else read_json(self._attempt.beat(rank))
        return (float(beat["time"]) if beat else 0.0, self._progress[rank][1])

    def _sign(self, rank: int) -> object:
        """Return a value that changes with a rank's progress: of its heartbeat file, or of a plain script's log."""
        path = self._attempt.log(rank) if self._config.trainer.script else self._attempt.beat(rank)
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        return found.st_size, found.st_mtime_ns
