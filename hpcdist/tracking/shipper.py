"""The shipper process, which uploads a run to MLflow while it runs.

    python -P -m hpcdist.tracking.shipper RUN_DIR [--through-queue]     HPCDIST_TRACKING_URI in the environment

It reads the files of the ranks and the supervisor. A failure of the server, the shipper or the supervisor delays points
but neither loses nor duplicates any, see `SentPoints`. A shipper that has died is not started again: `hpcdist sync` or
a resume sends the rest.
"""

import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcdist.config.redaction import redact_text
from hpcdist.errors import HpcdistError, RunFolderError, TrackingError
from hpcdist.host import log_files, retry
from hpcdist.host.locks import lock_now, long_lock, open_lock
from hpcdist.run import lease
from hpcdist.run.folder import ENDED, RunDir, State, require_same

if TYPE_CHECKING:
    from hpcdist.tracking.delivery import Delivery

log = logging.getLogger(__name__)

POLL_S = 2.0
#: Time limit of the wait for the first step, and interval of its polls.
IMPORT_WITHIN_S = 10.0
START_POLL_S = 0.2
#: Pause after a first failure; it doubles with each further one.
MIN_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
_STDIN = 0
_SIGNALS = {signal.SIGTERM, signal.SIGINT}


@contextmanager
def only_shipper(run: RunDir, *, waits: bool = False) -> Iterator[bool]:
    """Hold the lock of the run's shipper. If another process holds it, wait for its end, or yield False."""
    path = run.journal / ".shipper.lock"
    if waits:
        with long_lock(path):
            yield True
        return
    with retry.retry(lambda: open_lock(path), path) as file:
        yield lock_now(file)


def ship_run(run: RunDir, uri: str, parent_pid: int, *, through_queue: bool = False) -> bool:
    """Upload until the run has ended and MLflow has all records. Returns whether MLflow has all records.

    A requeued run counts as ended: its next job has its own shipper. A byte on standard input ends a wait early: the
    parent sends it when the run has ended. If the supervisor, process `parent_pid`, exits before the run has ended, the
    run is marked as failed in MLflow once, unless another supervisor has taken it over.

    With `through_queue` the parent is a command that follows a Slurm run. It alone reports the end of the run, by the
    byte; its own exit has no effect on the run.
    """
    parent = _Starter(parent_pid, through_queue=through_queue)
    logged = False
    while True:
        with only_shipper(run) as only:
            if only:
                if not through_queue:
                    _wait_for_first_step(run, parent)
                # Imports MLflow: seconds of CPU time, which starting ranks need.
                from hpcdist.tracking.delivery import Delivery

                return _ship_until_end(Delivery(run, uri), parent)
        if not logged:
            log.info("another shipper uploads %s: waiting until it exits", run.name)
            logged = True
        if parent.gone or parent.reported_end:
            return False
        parent.wait(POLL_S)


class _Starter:
    """The process that started this one: the supervisor of the run, or a command that follows it."""

    def __init__(self, pid: int, *, through_queue: bool) -> None:
        self.through_queue = through_queue
        self.reported_end = False
        self._pid = pid

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return os.getppid() != self._pid

    def wait(self, seconds: float) -> bool:
        """Wait for the byte of the parent, or after it for a signal, or a timeout. Returns False after a timeout."""
        if self.reported_end:
            return signal.sigtimedwait(_SIGNALS, seconds) is not None
        if not select.select([_STDIN], [], [], seconds)[0]:
            return False
        # The end of the pipe without a byte means that the parent died.
        self.reported_end = os.read(_STDIN, 1) != b""
        return self.reported_end or signal.sigtimedwait(_SIGNALS, seconds) is not None


def _wait_for_first_step(run: RunDir, parent: _Starter) -> None:
    """Wait until rank 0 has done a step, the run or its supervisor has ended, or a signal arrives.

    Plain scripts may report no steps, so the wait has a limit.
    """
    began = time.time()
    end = time.monotonic() + IMPORT_WITHIN_S
    while time.monotonic() < end and not parent.gone:
        state = run.read_state()
        beat = None
        with suppress(RunFolderError, OSError):
            if state.attempt:
                beat = run.attempt(state.attempt).read_beat(0)
        has_stepped = beat is not None and beat["step"] > 0 and beat["time"] > began
        if has_stepped or state.status in (*ENDED, "queued") or parent.wait(START_POLL_S):
            return


def _ship_until_end(delivery: "Delivery", parent: _Starter) -> bool:
    """Make passes until the run has ended and everything is uploaded, or time is up; see `ship_run`."""
    run = delivery.run
    drain_s = delivery.stored.config.tracking.drain_timeout_s
    backoff_s = next_try = 0.0
    drain_until = math.inf
    while True:
        # Read before the state: a supervisor that exits after it has ended the run did not die.
        orphaned = parent.gone
        reported_end = parent.reported_end
        state = run.read_state()
        ended = reported_end if parent.through_queue else state.status in (*ENDED, "queued")
        if orphaned and not ended:
            if parent.through_queue or lease.holder(run) is not None:
                return False  # another supervisor has taken over, with its own shipper
            reason = f"the supervisor died before the end of the run: `hpcdist resume {run.name}` continues it"
            log.warning("%s", reason)
            failed = replace(state, status="failed", reason=reason, ended=time.time())
            return not _ship(delivery, failed, backoff_s)
        if ended and drain_until == math.inf:
            drain_until = time.monotonic() + drain_s
            next_try = 0.0
        if time.monotonic() >= next_try:
            backoff_s = _ship(delivery, state, backoff_s)
            if ended and not backoff_s:
                return True
            next_try = time.monotonic() + max(backoff_s, delivery.pause_s)
        if time.monotonic() >= drain_until:
            text = "not all records were uploaded within %g s: `hpcdist sync %s` uploads the rest"
            log.warning(text, drain_s, run.name)
            return False
        if parent.wait(min(POLL_S, backoff_s or POLL_S)):
            next_try = 0.0


def _ship(delivery: "Delivery", state: State, backoff_s: float) -> float:
    """Make a pass. Returns the pause before the next try: 0 if it succeeded, else at most MAX_BACKOFF_S."""
    try:
        delivery.ship_once(state)
    except (TrackingError, OSError) as error:
        if not backoff_s:
            log.warning("%s; records stay in the journal until MLflow is available", error)
        return min(MAX_BACKOFF_S, max(MIN_BACKOFF_S, 2 * backoff_s))
    if backoff_s:
        log.warning("MLflow at %s is available again: no records were lost", redact_text(delivery.uri))
    return 0.0


def _end_if_replaced(run: RunDir, parent: _Starter) -> None:
    """End this process, even in a long upload, once another supervisor holds the run of a supervisor that has died.

    Its shipper waits for this one, and repeats the requests that MLflow has not confirmed.
    """
    while True:
        with suppress(RunFolderError, OSError):
            if parent.gone and lease.holder(run) is not None:
                log.warning("another supervisor has taken over %s: its shipper continues", run.name)
                os._exit(1)
        time.sleep(POLL_S)


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Upload the run in folder `argv[0]` until it has ended. Returns the exit code."""
    # Passed by the parent, which may die before this line and leave another parent id.
    parent_pid = int(env.get("HPCDIST_SUPERVISOR_PID") or os.getppid())
    # Received by sigtimedwait: the batch system's SIGTERM is for the ranks, which still send their last points.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    log_files.configure()
    through_queue = "--through-queue" in argv[1:]
    try:
        require_same(Path(argv[0]), env)
        run = RunDir.open(Path(argv[0]))
        log_files.limit_log(run.path)
        uri = env["HPCDIST_TRACKING_URI"]  # resolved by the process that starts this one
        if not through_queue:
            parent = _Starter(parent_pid, through_queue=False)
            threading.Thread(target=_end_if_replaced, args=(run, parent), daemon=True).start()
        with retry.patient(retry.UNATTENDED_S):
            is_complete = ship_run(run, uri, parent_pid, through_queue="--through-queue" in argv[1:])
            return 0 if is_complete else 1
    except HpcdistError as error:
        log.error("%s", error)
        return error.exit_code
    except OSError as error:
        log.error("%s: %s; `hpcdist sync` uploads the rest", error.filename, error.strerror)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
