"""Watch over the ranks of one attempt: exits, heartbeats and requests."""

import logging
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from hpcdist.config.schema import Config
from hpcdist.run.folder import Attempt, StopRequest
from hpcdist.supervisor.hang import Activity, Summary, busy_ranks, collect, ranks_text, read_activities
from hpcdist.supervisor.progress import ProgressMonitor, Reporter
from hpcdist.supervisor.protocols import NodeChanges, Ranks
from hpcdist.supervisor.restart_policy import Failure, not_started

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Interval of looks at the ranks, the requests and the heartbeats.
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


#: Number of looks at the activities of silent ranks within `launch.idle_timeout_s`.
IDLE_LOOKS = 8
#: A rank that has used more than this share of a core is not idle; waiting threads and measurements use less.
IDLE_SHARE = 0.02


class IdleTime:
    """The time since which no rank has shown progress or been active. Times are on the monotonic clock."""

    def __init__(self, now: float) -> None:
        self.since = now
        self.looked = now  #: time of the last look at the activities
        self._activities: dict[int, Activity] = {}

    def note_progress(self, at: float) -> None:
        """Note the time of the last progress of any rank."""
        if at > self.since:
            self.since = at
            self.looked = at
            self._activities = {}

    def note_activities(self, now: float, activities: dict[int, Activity], ranks: Collection[int]) -> None:
        """Note the activities of ranks; the time begins again if one was busy since the last look, or is unknown."""
        is_known = self._activities.keys() & activities.keys() >= set(ranks)
        if not is_known or busy_ranks(self._activities, activities, IDLE_SHARE):
            self.since = now
        self._activities = activities
        self.looked = now


class Allocation(NamedTuple):
    """Time limit of the ranks. Times are seconds since the epoch."""

    stop_at: float  #: time of the stop request
    end: float  #: time at which all processes are killed


@dataclass(eq=False)
class Watch:
    """Watches the ranks of one attempt until it is over; the caller ends those that still run."""

    attempt: Attempt
    ranks: Ranks
    config: Config
    report: Reporter
    allocation: Allocation | None = None
    signal_request: Callable[[], StopRequest | None] = lambda: None
    check_lease: Callable[[], None] = lambda: None
    nodes: NodeChanges = field(default_factory=NodeChanges)
    idle_s: float | None = None  #: time after which ranks that do nothing are stopped; None: never

    def __post_init__(self) -> None:
        self.progress = ProgressMonitor(self.attempt, self.ranks, self.config, self.report, time.monotonic())
        self._all_started = False
        self._unavailable_since: float | None = None
        self._write_at = 0.0
        self._unwritten_since: float | None = None
        self._sent_sigterm = False
        self._kill_at: float | None = None
        #: Activities of the ranks after half of the time in which they may be silent.
        self._activities: dict[int, Activity] | None = None
        self._warned = False
        #: Duration of the examinations of this poll, which are no delay by the file system.
        self._examined_s = 0.0
        self._idle = IdleTime(time.monotonic())
        self._idle_request: StopRequest | None = None
        #: Since when the ranks have done nothing, if they were stopped for it; in seconds since the epoch.
        self.idle_since: float | None = None
        self.stop_requested = False
        self.cancelled = False

    def until_over(self) -> Failure | None:
        """Wait for the end of the attempt.

        Returns the failure of lost, late or hung ranks. For ranks that end by themselves, and after a cancellation, it
        returns None.
        """
        while self.ranks.remaining:
            began = time.monotonic()
            self.ranks.wait(POLL_S)
            self.check_lease()
            now = time.monotonic()
            self._note_delay(began, now)
            self._handle_requests(now)
            if self.cancelled:
                return None
            lost = self._lost_rank()
            if lost is not None:
                return lost
            # The ranks of a script that has got SIGTERM may save, and end, one after the other.
            has_failed = any(self.ranks.exits.values()) and not self.stops_script
            if has_failed:
                self._kill_by(now + PEER_GRACE_S)
            if self._kill_at is None:
                failure = self._late(now) or self._hung(now)
                if failure is not None:
                    return failure
                self._stop_idle(now)
            elif now >= self._kill_at:
                return None if has_failed else self._stop_failure()
            self.progress.show()
            self._note_delay(now + self._examined_s, time.monotonic())
            self._examined_s = 0.0
        return self._nothing_started()

    def _lost_rank(self) -> Failure | None:
        lost = self.nodes.detect_lost()
        if lost is None:
            return None
        rank, node = lost
        error = "was lost: its node does not answer"
        return Failure(kind="lost", rank=rank, host=node, step=self.progress.last_step(rank), error=error)

    def _stop_failure(self) -> Failure:
        """Return the failure of ranks that did not end after a request to stop."""
        error = f"did not save and exit within launch.stop_grace_s={self.config.launch.stop_grace_s:g} s"
        if self.allocation is not None:
            error += ", or before the end of the allocation"
        rank = self.ranks.remaining[0]
        return self._hang_failure(rank, error, self._examine(collect))

    def _nothing_started(self) -> Failure | None:
        """Return the failure of an attempt that has ended before any rank was started; otherwise None."""
        if not any(self.ranks.exits.values()):
            return None
        absent = self.ranks.absent()
        if len(absent) < len(self.ranks.exits):
            return None
        why = f"at all: {self.ranks.last_message(absent[0])}"
        return not_started(absent, len(absent), why, self.ranks.host_of)

    def _late(self, now: float) -> Failure | None:
        """Return the failure of ranks that did not start within the time limit; None if all have started."""
        limit_s = self.config.launch.init_timeout_s
        if self._all_started or now < self.progress.unavailable_until + limit_s:
            return None
        absent = self.ranks.absent()
        if not absent:
            self._all_started = True
            return None
        why = f"within launch.init_timeout_s={limit_s:g} s: {self.ranks.last_message(absent[0])}"
        num_ranks = len(self.ranks.remaining) + len(self.ranks.exits)
        return not_started(absent, num_ranks, why, self.ranks.host_of)

    def _hung(self, now: float) -> Failure | None:
        """Return the failure of ranks that hang: without progress for the limit, and without any sign of work.

        A plain script is ended only if the user has set the limit; otherwise a warning names the evidence.
        """
        launch = self.config.launch
        if self._warned:
            self.progress.look(now)
            return None
        if self.progress.silent_s(now) < launch.hang_s / 2:
            self._activities = None
        elif self._activities is None:
            self._activities = self._examine(read_activities) or {}
        rank = self.progress.find_hung(now)
        if rank is None:
            return None
        busy: set[int] = set()
        if self._activities:
            busy = busy_ranks(self._activities, self._examine(read_activities) or {})
        busy &= self.progress.overdue(now)
        may_end = launch.hang_timeout_s is not None or not self.config.trainer.script
        summary: Summary | None = None
        # The signal for the stacks may surprise a script, so a script that computes and may not be ended gets none.
        if may_end or not busy:
            summary = self._examine(collect)
        if summary is not None:
            busy -= {rank for rank, pending_s in summary.pending_s.items() if pending_s > launch.hang_s / 2}
        if may_end and not busy:
            error = f"made no progress for launch.hang_timeout_s={launch.hang_s:g} s {self._where_stacks_are}"
            return self._hang_failure(rank, error, summary)
        self._note_silence(busy, summary)
        return None

    def _stop_idle(self, now: float) -> None:
        """Request the end of ranks that have shown no progress and no activity for `idle_s`, with their stacks.

        What is unknown, such as the CPU time on a node that does not answer, is no sign of idleness.
        """
        if self.idle_s is None or self._idle_request is not None:
            return
        self._idle.note_progress(now - self.progress.silent_s(now))
        if now < self._idle.looked + self.idle_s / IDLE_LOOKS:
            return
        self._idle.note_activities(now, self._examine(read_activities) or {}, self.ranks.remaining)
        idle_s = now - self._idle.since
        if idle_s < self.idle_s:
            return
        self.idle_since = time.time() - idle_s
        # Before the request, at which the ranks end.
        summary = self._examine(collect)
        if summary is not None:
            self.report.note(f"the ranks are idle: {summary.sentence} {self._where_stacks_are}")
        self._idle_request = StopRequest(cause="idle", by=f"launch.idle_timeout_s={self.idle_s:g} s")

    @property
    def _where_stacks_are(self) -> str:
        return f"(stack traces of all ranks are in {self.attempt.path})"

    def _note_silence(self, busy: Collection[int], summary: Summary | None) -> None:
        """Report that ranks make no progress and are not ended: some are busy, or a script may take its time."""
        hang_s = self.config.launch.hang_s
        if summary is not None:
            with suppress(OSError):  # `stacks_summary` would explain a later failure
                self.attempt.stacks_summary.replace(self.attempt.silence)
        if busy:
            self.progress.postpone(time.monotonic())
            used = f"{ranks_text(busy)} used CPU, GPU or files meanwhile: the run continues"
            self.report.note(f"no sign of progress for {hang_s:g} s, but {used}")
            return
        self._warned = True
        self.progress.ignore_changes()
        evidence = "no rank uses CPU, GPU or files" if self._activities else "the CPU time of the ranks is unknown"
        if summary is not None:
            evidence += f"; {summary.sentence} {self._where_stacks_are}"
        self.report.note(
            f"the script may hang: no output for {hang_s:g} s, and {evidence};"
            " it is not ended, since launch.hang_timeout_s is not set"
        )

    def _note_delay(self, began: float, now: float) -> None:
        """Record a poll that has waited for the file system, because the ranks had to wait as well."""
        if now - began > SLOW_POLL_S:
            self.progress.unavailable_until = now

    def _handle_requests(self, now: float) -> None:
        request = self._request(now)
        if request is None:
            return
        if request.action == "cancel":
            self.cancelled = True
        elif not self.stop_requested:
            self.stop_requested = True
            self._kill_by(now + self._grace_s())
            how = "the ranks save a checkpoint and exit"
            if self.config.trainer.script:
                # A plain script does not read requests; it gets a signal.
                how = f"the script gets SIGTERM, and SIGKILL unless it ends within {self._grace_s():.0f} s"
                self._send_sigterm()
            self.report.note(f"stopping: {how} ({request.sentence})")

    def _request(self, now: float) -> StopRequest | None:
        """Return the request to the attempt: from its folder, from this process, or because more nodes are available.

        A request that is not in the folder yet is written to it.
        """
        written = self._read_request(now)
        request = self._own_request()
        if request is None and written is None:
            nodes = self.nodes.detect_returned()
            if nodes:
                request = StopRequest(cause="growth", by=nodes)
        if request is None:
            return written
        if written is not None and written.ends_run and (request.action == "stop" or written.action == "cancel"):
            return written
        if now >= self._write_at:
            self._write_at = now + REWRITE_S
            self._write_request(request, now)
        return request

    def _own_request(self) -> StopRequest | None:
        """Return the request of a signal to this process, or of an allocation that ends soon."""
        request = self.signal_request()
        if request is None and self.allocation is not None and time.time() >= self.allocation.stop_at:
            return StopRequest(cause="time_limit")
        return request or self._idle_request

    def _read_request(self, now: float) -> StopRequest | None:
        """Return the request in the attempt's folder; None without one, or while the folder is unavailable."""
        try:
            request = self.attempt.read_request(within_s=0)
        except OSError as error:
            if self._unavailable_since is None:
                self._unavailable_since = now
                log.warning("%s: %s; the ranks continue", error.filename, error.strerror)
            self.progress.unavailable_until = now
            return None
        if self._unavailable_since is not None:
            log.warning("%s is available again after %.1f s", self.attempt.path, now - self._unavailable_since)
            self._unavailable_since = None
        return request

    def _write_request(self, request: StopRequest, now: float) -> None:
        """Write a request to the attempt's folder. The ranks get SIGTERM if it cannot be written for some time."""
        try:
            self.attempt.send_request(request, within_s=0)
        except OSError as error:
            if self._unwritten_since is None:
                self._unwritten_since = now
            is_late = now - self._unwritten_since >= SIGNAL_AFTER_S
            if is_late and request.action == "stop" and not self._sent_sigterm:
                self.report.note(f"{self.attempt.request}: {error.strerror}; sending SIGTERM to the ranks")
                self._send_sigterm()

    def _send_sigterm(self) -> None:
        if not self._sent_sigterm:
            self._sent_sigterm = True
            self.ranks.signal(signal.SIGTERM)

    def _grace_s(self) -> float:
        """Return the time for ranks to save and exit, which the end of the allocation limits."""
        grace_s = self.config.launch.stop_grace_s
        if self.allocation is None:
            return grace_s
        left_s = max(0.0, self.allocation.end - time.time())
        return min(grace_s, max(left_s - REST_S, left_s / 2))

    def _kill_by(self, until: float) -> None:
        """End the ranks at a time on the monotonic clock, or at the earlier one that was set before."""
        if self._kill_at is None or until < self._kill_at:
            self._kill_at = until

    @property
    def stops_script(self) -> bool:
        """Whether a plain script has got SIGTERM."""
        return self.stop_requested and bool(self.config.trainer.script)

    def _examine(self, examination: Callable[..., T]) -> T | None:
        """Return the result of `collect` or `read_activities`; None if there is too little time for it, or it fails."""
        left_s = STACKS_S
        if self.allocation is not None:
            left_s = min(left_s, self.allocation.end - time.time() - REST_S)
        if left_s < LEAST_STACKS_S:
            return None
        began = time.monotonic()
        try:
            return examination(self.attempt, self.ranks, limit_s=left_s, interrupted=self._is_cancelled)
        except OSError as error:
            log.warning("%s: %s; the ranks cannot be examined", error.filename, error.strerror)
            return None
        finally:
            self._examined_s += time.monotonic() - began

    def _hang_failure(self, rank: int, error: str, summary: Summary | None) -> Failure:
        """Return the failure of hung ranks; `rank` is the culprit, unless the stack traces show another one."""
        if summary is not None and len(summary.suspects) == 1:
            (rank,) = summary.suspects
        return Failure(
            kind="hung",
            rank=rank,
            host=self.ranks.host_of(rank),
            step=self.progress.last_step(rank),
            error=error,
            detail=summary.sentence if summary is not None else "",
        )

    def _is_cancelled(self) -> bool:
        self._handle_requests(time.monotonic())
        return self.cancelled
