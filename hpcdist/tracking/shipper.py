"""The process that ships a run folder to MLflow while the run goes on, and `hpcdist sync`, which ships what is left.

    python -P -m hpcdist.tracking.shipper RUN_DIR [--through-queue]     HPCDIST_TRACKING_URI in the environment

It only reads what the ranks and the supervisor write. A dead server, a dead shipper, a dead supervisor delay points;
none of them loses or doubles one: see `progress.py`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hpcdist import logs
from hpcdist.config.schema import LaunchConfig
from hpcdist.errors import HpcdistError, TrackingError
from hpcdist.files import retry
from hpcdist.files.log_limit import limit_log
from hpcdist.run import lease
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.status import close_if_dead
from hpcdist.tracking import run_metadata
from hpcdist.tracking.delivery import Delivery
from hpcdist.tracking.uri import choose_uri, redact_uri

log = logging.getLogger(__name__)

POLL_S = 2.0
MAX_BACKOFF_S = 30.0
_SIGNALS = {signal.SIGTERM, signal.SIGINT}


@contextmanager
def _only_shipper(run: RunDir) -> Iterator[bool]:
    """Whether this process is the run's only shipper, for as long as the block lasts."""
    path = run.journal / ".shipper.lock"
    with retry.retry(lambda: open(path, "a"), path) as file:
        only = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            only = False
        except OSError as error:
            # Some network file systems have no locks; the lease keeps two supervisors apart all the same.
            log.warning("no lock on %s (%s): do not ship it from elsewhere at the same time", run.name, error)
        yield only


def ship_forever(run: RunDir, uri: str, parent_pid: int, *, through_queue: bool = False) -> bool:
    """Ship until the run has ended and MLflow has everything; returns whether it has.

    A run that is queued again counts as ended: its next job has a shipper of its own. SIGTERM and SIGINT only end a
    wait early. When the process `parent_pid`, the supervisor, is gone and the run has not ended, MLflow is told so
    once, if it answers.

    With `through_queue` the parent is someone who follows the run from elsewhere: only he knows when it is over, and
    says so on standard input. That he goes away says nothing of the run.
    """
    parent = _Parent(parent_pid, through_queue=through_queue)
    told = False
    while True:
        with _only_shipper(run) as only:
            if only:
                return _Loop(Delivery(run, uri), parent).run()
        if not told:
            log.info("another shipper is at work on %s: waiting for its end", run.name)
            told = True
        if parent.gone or parent.said_over:
            return False
        parent.wait(POLL_S)


class _Parent:
    """Whoever started this process: the run's supervisor, or someone who follows it."""

    def __init__(self, pid: int, *, through_queue: bool) -> None:
        self.through_queue = through_queue
        self.said_over = False
        self._pid = pid

    @property
    def gone(self) -> bool:
        return os.getppid() != self._pid

    def wait(self, seconds: float) -> bool:
        """Wait, but not past a signal or a word of the parent; whether there was one."""
        if not self.through_queue or self.said_over:
            return signal.sigtimedwait(_SIGNALS, seconds) is not None
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return False
        # The mere end of the pipe means that the parent has died.
        self.said_over = os.read(sys.stdin.fileno(), 1) != b""
        return self.said_over or signal.sigtimedwait(_SIGNALS, seconds) is not None


class _Loop:
    def __init__(self, shipper: Delivery, parent: _Parent) -> None:
        self._parent = parent
        self._shipper = shipper
        self._run = shipper.run
        self._drain_s = float((shipper.config.get("tracking") or {}).get("drain_timeout_s", 60.0))
        self._backoff_s = 0.0
        self._drain_until: float | None = None

    def run(self) -> bool:
        next_try = 0.0
        while True:
            # In this order: a supervisor that has just ended the run is no dead supervisor.
            orphaned = self._parent.gone
            follows, said_over = self._parent.through_queue, self._parent.said_over
            state = self._run.read_state()
            ended = said_over if follows else state.status in (*ENDED, "queued")
            if orphaned and not ended:
                return not follows and self._bury(state)
            if ended and self._drain_until is None:
                self._drain_until = time.monotonic() + self._drain_s
                next_try = 0.0
            if time.monotonic() >= next_try:
                if self._try(state) and ended:
                    return True
                next_try = time.monotonic() + max(self._backoff_s, self._shipper.pause_s)
            if self._drain_until is not None and time.monotonic() >= self._drain_until:
                log.warning("gave up after %g s: `hpcdist sync %s` ships the rest", self._drain_s, self._run.name)
                return False
            if self._parent.wait(min(POLL_S, self._backoff_s or POLL_S)):
                next_try = 0.0

    def _try(self, state: State) -> bool:
        try:
            self._shipper.ship_once(state)
        except (TrackingError, OSError) as error:
            if not self._backoff_s:
                log.warning("%s; records wait in the journal", error)
            self._backoff_s = min(MAX_BACKOFF_S, max(1.0, 2 * self._backoff_s))
            return False
        if self._backoff_s:
            log.warning("MLflow at %s takes records again: nothing was lost", redact_uri(self._shipper.uri))
            self._backoff_s = 0.0
        return True

    def _bury(self, state: State) -> bool:
        if lease.holder(self._run) is not None:
            return False  # another supervisor has it already, and a shipper of its own
        reason = f"the supervisor died without ending the run; `hpcdist resume {self._run.name}` goes on"
        log.warning("%s", reason)
        return self._try(replace(state, status="failed", reason=reason, ended=time.time()))


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one `sync` did."""

    num_points: int = 0  #: sent
    num_repeated: int = 0  #: left out: MLflow had this step of the metric from an earlier attempt
    num_broken: int = 0  #: lines of the journal that held no record
    num_refused: int = 0  #: points that MLflow does not take
    num_artifacts: int = 0  #: uploaded
    closed: str = ""  #: why the run, whose supervisor or job had died without a word, has ended now
    busy: bool = False  #: another process ships this run at the moment; nothing was done

    def __str__(self) -> str:
        if self.busy:
            return "another process ships it at this moment"
        text = f"{self.num_points} points and {self.num_artifacts} artifacts shipped"
        for number, what in (
            (self.num_repeated, "points left out that an earlier attempt had logged"),
            (self.num_refused, "points refused by MLflow"),
            (self.num_broken, "broken lines skipped"),
        ):
            text += f", {number} {what}" if number else ""
        return text + (f"; closed: {self.closed}" if self.closed else "")


def sync(run: RunDir, uri: str, *, close_dead: bool = True) -> SyncReport:
    """Ship, in this process, all that MLflow does not have of a run, and close one that died without a word.

    Without `close_dead` nobody asks whether it has.

    Raises TrackingError when MLflow does not answer or refuses, and RunFolderError when a supervisor takes the run
    at this moment.
    """
    with _only_shipper(run) as only:
        if not only:
            return SyncReport(busy=True)
        closed = close_if_dead(run) if close_dead else ""
        shipper = Delivery(run, uri)
        shipper.open_run()
        before = replace(shipper.progress, artifacts=dict(shipper.progress.artifacts))
        num_points = shipper.ship_once()
        after = shipper.progress
        return SyncReport(
            num_points=num_points,
            num_repeated=after.num_repeated - before.num_repeated,
            num_broken=after.num_broken - before.num_broken,
            num_refused=after.num_refused - before.num_refused,
            num_artifacts=len(after.artifacts.items() - before.artifacts.items()),
            closed=closed,
        )


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Ship the run in folder `argv[0]` until it has ended; returns the exit code."""
    # Named by the parent: one that dies before this line would otherwise never be missed.
    parent_pid = int(env.get("HPCDIST_SUPERVISOR_PID") or os.getppid())
    # Taken up by sigtimedwait: a batch system's SIGTERM means the ranks, whose last points are still to come.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    logs.configure()
    try:
        run = RunDir.open(Path(argv[0]))
        config = run_metadata.read_config(run)
        configured = (config.get("tracking") or {}).get("uri") or ""
        limit_log(run.path, float((config.get("launch") or {}).get("log_max_mb", LaunchConfig.log_max_mb)))
        uri = choose_uri(env, configured, run.path.parent.parent)
        with retry.patient(retry.UNATTENDED_S):
            return 0 if ship_forever(run, uri, parent_pid, through_queue="--through-queue" in argv[1:]) else 1
    except HpcdistError as error:
        log.error("%s", error)
        return error.exit_code
    except OSError as error:
        log.error("%s: %s; `hpcdist sync` ships the rest", error.filename, error.strerror)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
