"""The shipper process, which uploads a run to MLflow while it runs, and `sync`, which uploads the rest later.

    python -P -m hpcdist.tracking.shipper RUN_DIR [--through-queue]     HPCDIST_TRACKING_URI in the environment

It reads the files of the ranks and the supervisor. A failure of the server, the shipper or the supervisor delays points
but neither loses nor duplicates any, see `SentPoints`.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcdist.config.redaction import redact_text
from hpcdist.errors import HpcdistError, RunFolderError, TrackingError
from hpcdist.host import log_files, retry
from hpcdist.host.lock import lock_now, open_lock
from hpcdist.host.log_files import limit_log
from hpcdist.run import lease
from hpcdist.run.folder import ENDED, RunDir, State, require_same
from hpcdist.run.status import close_if_lost
from hpcdist.tracking import run_metadata
from hpcdist.tracking.points import EXACT_POINTS, Counts

if TYPE_CHECKING:
    from hpcdist.tracking.delivery import Delivery


log = logging.getLogger(__name__)

POLL_S = 2.0
#: Time limit of the wait for the first step, and interval of its polls.
IMPORT_WITHIN_S = 10.0
START_POLL_S = 0.2
MAX_BACKOFF_S = 30.0
_SIGNALS = {signal.SIGTERM, signal.SIGINT}


@contextmanager
def _only_shipper(run: RunDir) -> Iterator[bool]:
    """Hold the lock of the run's shipper. Yields False if another process holds it."""
    path = run.journal / ".shipper.lock"
    with retry.retry(lambda: open_lock(path), path) as file:
        yield lock_now(file)


def ship_forever(run: RunDir, uri: str, parent_pid: int, *, through_queue: bool = False) -> bool:
    """Upload until the run has ended and MLflow has all records. Returns whether MLflow has all records.

    A requeued run counts as ended: its next job has its own shipper. SIGTERM and SIGINT only end a wait early. If the
    supervisor, process `parent_pid`, exits before the run has ended, the run is marked as failed in MLflow once.

    With `through_queue` the parent is a command that follows a Slurm run. It reports the end of the run on standard
    input; its own exit has no effect on the run.
    """
    parent = _Parent(parent_pid, through_queue=through_queue)
    logged = False
    while True:
        with _only_shipper(run) as only:
            if only:
                if not through_queue:
                    _wait_for_first_step(run, parent)
                # Imports MLflow: seconds of CPU time, which starting ranks need.
                from hpcdist.tracking.delivery import Delivery

                return _Loop(Delivery(run, uri), parent).run()
        if not logged:
            log.info("another shipper uploads %s: waiting until it exits", run.name)
            logged = True
        if parent.gone or parent.reported_end:
            return False
        parent.wait(POLL_S)


class _Parent:
    """The parent process: the supervisor of the run, or a command that follows it."""

    def __init__(self, pid: int, *, through_queue: bool) -> None:
        self.through_queue = through_queue
        self.reported_end = False
        self._pid = pid

    @property
    def gone(self) -> bool:
        return os.getppid() != self._pid

    def wait(self, seconds: float) -> bool:
        """Wait for a signal, a message of the parent, or a timeout. Returns False after a timeout."""
        if not self.through_queue or self.reported_end:
            return signal.sigtimedwait(_SIGNALS, seconds) is not None
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return False
        # The end of the pipe without a byte means that the parent died.
        self.reported_end = os.read(sys.stdin.fileno(), 1) != b""
        return self.reported_end or signal.sigtimedwait(_SIGNALS, seconds) is not None


def _wait_for_first_step(run: RunDir, parent: _Parent) -> None:
    """Wait until rank 0 has done a step, the run or its supervisor has ended, or a signal arrives.

    Plain scripts may report no steps, so the wait has a limit.
    """
    began = time.time()
    end = time.monotonic() + IMPORT_WITHIN_S
    while time.monotonic() < end and not parent.gone:
        state = run.read_state()
        if state.status in (*ENDED, "queued") or _has_stepped(run, state, began) or parent.wait(START_POLL_S):
            return


def _has_stepped(run: RunDir, state: State, since: float) -> bool:
    try:
        beat = run.attempt(state.attempt).read_beat(0) if state.attempt else None
        return beat is not None and beat["step"] > 0 and beat["time"] > since
    except (RunFolderError, OSError):
        return False


class _Loop:
    """The polling loop of the shipper of one run."""

    def __init__(self, delivery: Delivery, parent: _Parent) -> None:
        self._parent = parent
        self._delivery = delivery
        self._run = delivery.run
        self._drain_s = delivery.stored.config.tracking.drain_timeout_s
        self._backoff_s = 0.0
        self._drain_until: float | None = None

    def run(self) -> bool:
        """Upload until the run has ended. Returns whether MLflow has all records."""
        next_try = 0.0
        while True:
            # Read before the state: a supervisor that exits after it has ended the run did not die.
            orphaned = self._parent.gone
            follows, reported_end = self._parent.through_queue, self._parent.reported_end
            state = self._run.read_state()
            ended = reported_end if follows else state.status in (*ENDED, "queued")
            if orphaned and not ended:
                return not follows and self._report_orphan(state)
            if ended and self._drain_until is None:
                self._drain_until = time.monotonic() + self._drain_s
                next_try = 0.0
            if time.monotonic() >= next_try:
                if self._try(state) and ended:
                    return True
                next_try = time.monotonic() + max(self._backoff_s, self._delivery.pause_s)
            if self._drain_until is not None and time.monotonic() >= self._drain_until:
                log.warning(
                    "not all records were uploaded within %g s: `hpcdist sync %s` uploads the rest",
                    self._drain_s,
                    self._run.name,
                )
                return False
            if self._parent.wait(min(POLL_S, self._backoff_s or POLL_S)):
                next_try = 0.0

    def _try(self, state: State) -> bool:
        try:
            self._delivery.ship_once(state)
        except (TrackingError, OSError) as error:
            if not self._backoff_s:
                log.warning("%s; records stay in the journal until MLflow is available", error)
            self._backoff_s = min(MAX_BACKOFF_S, max(1.0, 2 * self._backoff_s))
            return False
        if self._backoff_s:
            log.warning("MLflow at %s is available again: no records were lost", redact_text(self._delivery.uri))
            self._backoff_s = 0.0
        return True

    def _report_orphan(self, state: State) -> bool:
        if lease.holder(self._run) is not None:
            return False  # another supervisor has taken over, with its own shipper
        reason = f"the supervisor died before the end of the run: `hpcdist resume {self._run.name}` continues it"
        log.warning("%s", reason)
        return self._try(replace(state, status="failed", reason=reason, ended=time.time()))


@dataclass(kw_only=True)
class SyncReport(Counts):
    """Result of one `sync`."""

    num_artifacts: int = 0  #: uploaded
    closed: str = ""  #: reason with which a run of a dead supervisor or job was closed
    busy: str = ""  #: what uploads the run instead; nothing was done

    @property
    def kind(self) -> str:
        """`busy`, `unchanged` or `uploaded`."""
        return "busy" if self.busy else "unchanged" if self == SyncReport() else "uploaded"

    def __str__(self) -> str:
        if self.busy:
            return self.busy
        text = f"{self.num_points} points and {self.num_artifacts} artifacts uploaded"
        for number, meaning in (
            (self.num_repeated, "points omitted that an earlier attempt had logged"),
            (self.num_refused, "points rejected by MLflow"),
            (self.num_thinned, f"points after the first {EXACT_POINTS:,} of a metric in the journal only"),
            (self.num_broken, "damaged lines skipped"),
        ):
            text += f", {number} {meaning}" if number else ""
        return text + (f"; closed: {self.closed}" if self.closed else "")


def sync(run: RunDir, uri: str, *, close_dead: bool = True) -> SyncReport:
    """Upload in this process all records that MLflow does not have.

    Args:
        close_dead: Close the run if its supervisor or job died without recording a status.

    Raises:
        TrackingError: MLflow is unavailable or rejects a request.
        RunFolderError: A supervisor starts the run at the same time.
    """
    with _only_shipper(run) as only:
        if not only:
            return SyncReport(busy="another process uploads it at the moment")
        from hpcdist.tracking.delivery import Delivery  # imports MLflow

        closed = close_if_lost(run) if close_dead else ""
        delivery = Delivery(run, uri)
        delivery.open_run()
        before = dict(delivery.uploads.sent.artifacts)
        delivery.ship_once()
        num_artifacts = len(delivery.uploads.sent.artifacts.items() - before.items())
        return SyncReport(**asdict(delivery.batches.counts), num_artifacts=num_artifacts, closed=closed)


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Upload the run in folder `argv[0]` until it has ended. Returns the exit code."""
    # Passed by the parent, which may die before this line and leave another parent id.
    parent_pid = int(env.get("HPCDIST_SUPERVISOR_PID") or os.getppid())
    # Received by sigtimedwait: the batch system's SIGTERM is for the ranks, which still send their last points.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    log_files.configure()
    try:
        require_same(Path(argv[0]), env)
        run = RunDir.open(Path(argv[0]))
        limit_log(run.path, run_metadata.read_config(run).config.launch.log_max_mb)
        uri = env["HPCDIST_TRACKING_URI"]  # resolved by the process that starts this one
        with retry.patient(retry.UNATTENDED_S):
            return 0 if ship_forever(run, uri, parent_pid, through_queue="--through-queue" in argv[1:]) else 1
    except HpcdistError as error:
        log.error("%s", error)
        return error.exit_code
    except OSError as error:
        log.error("%s: %s; `hpcdist sync` uploads the rest", error.filename, error.strerror)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
