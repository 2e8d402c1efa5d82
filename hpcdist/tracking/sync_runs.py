"""`hpcdist sync`: upload existing runs once, or again and again on a login node."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hpcdist.config.loading import load_run_config
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.host.files import require_trusted
from hpcdist.host.lock import lock_now, open_lock
from hpcdist.run.folder import RunDir, claim, own_place
from hpcdist.run.lease import holder
from hpcdist.run.lookup import list_runs
from hpcdist.run.records import kept
from hpcdist.run.slurm_job import job_of, update_job_starts
from hpcdist.tracking.points import is_complete
from hpcdist.tracking.shipper import SyncReport, sync
from hpcdist.tracking.uri import is_server, resolve_uri

log = logging.getLogger(__name__)


def sync_run(run: RunDir, env: Mapping[str, str]) -> SyncReport:
    """Upload the records of a run that MLflow does not have, unless its supervisor uploads them.

    Raises HpcdistError or OSError if the run cannot be read or uploaded.
    """

    require_trusted(run.path, "sync")
    config = load_run_config(run.config, [], {**kept(run), **env}, require_secrets=False)
    uri = resolve_uri(config, env)
    # A Slurm job uploads to a server only; a database is filled from the host of the database.
    uploads_itself = job_of(run) is None or is_server(uri)
    if uploads_itself and (busy := holder(run)) is not None:
        return SyncReport(busy=f"its supervisor runs (process {busy['pid']} on {busy['host']}) and uploads it")
    update_job_starts(run)
    return sync(run, uri)


def exit_code(error: HpcdistError | OSError) -> int:
    """Return the exit code of a command that this error ended."""
    return error.exit_code if isinstance(error, HpcdistError) else 2


class _Ended(BaseException):
    """A signal has asked this process to end; an upload that it interrupts continues with the next one."""


class Watch:
    """Uploads all runs below `runs_dir` in passes.

    A pass logs a line for each run with new records and for each new failure. A failure does not affect other runs.

    Args:
        wanted: returns whether a run is uploaded.
    """

    def __init__(self, runs_dir: Path, env: Mapping[str, str], wanted: Callable[[RunDir], bool]) -> None:
        self._runs_dir = runs_dir
        self._env = env
        self._wanted = wanted
        self._failures: dict[Path, str] = {}  #: last message by run folder
        self._note = ""

    def forever(self, interval_s: float) -> int:
        """Make a pass every `interval_s` until SIGTERM or SIGINT. Returns 0.

        Raises UserMistake if another process does the same in this folder.
        """
        with _only_watch(self._runs_dir), _ended_by_signals():
            log.info("uploading the runs in %s every %g s", self._runs_dir, interval_s)
            try:
                while True:
                    until = time.monotonic() + interval_s
                    self.once()
                    time.sleep(max(0.0, until - time.monotonic()))
            except _Ended:
                log.info("ended by a signal; the next `hpcdist sync` uploads the rest")
        return 0

    def once(self) -> None:
        """Make one pass."""
        listing = list_runs(self._runs_dir)
        if listing.note != self._note:
            self._note = listing.note
            log.info("%s", listing.note)
        for run in listing.runs:
            if self._wanted(run):
                self._upload(run)

    def _upload(self, run: RunDir) -> None:
        try:
            if is_complete(run):
                return
            report = sync_run(run, self._env)
        except (HpcdistError, OSError) as error:
            message = " ".join(str(error).split())
            if self._failures.get(run.path) != message:
                log.warning("%s: %s", run.name, message)
            self._failures[run.path] = message
            return
        except Exception as error:  # of one run: the others are uploaded
            log.exception("%s: internal error (%s)", run.name, type(error).__name__)
            return
        if self._failures.pop(run.path, "") or report.kind == "uploaded":
            log.info("%s: %s", run.name, report)


@contextmanager
def _only_watch(runs_dir: Path) -> Iterator[None]:
    """Hold the lock of the folder's watching process, so that a cron line may start it again and again."""
    if runs_dir.is_dir():
        claim(runs_dir)
    path = own_place(runs_dir) / ".sync.lock"
    try:
        file = open_lock(path, 0o600)
    except OSError as error:
        raise UserMistake(
            f"{runs_dir} is no folder of runs that you can write ({path.name}: {error.strerror})"
        ) from error
    with file:
        if not lock_now(file):
            file.seek(0)
            raise UserMistake(f"another `hpcdist sync --watch` uploads the runs in {runs_dir}: {file.read().strip()}")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raise _Ended in the block on SIGTERM, SIGINT and SIGHUP."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise _Ended

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
