"""`hpcdist sync`: upload existing runs once, or again and again on a login node."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcdist.config.loading import load_run_config
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.host.files import lock_now, open_lock, require_trusted
from hpcdist.run.folder import RunDir, claim, own_place
from hpcdist.run.lease import holder
from hpcdist.run.lookup import list_runs
from hpcdist.run.records import kept
from hpcdist.run.status import close_if_lost, job_of, update_job_starts
from hpcdist.tracking.points import EXACT_POINTS, Counts, is_complete
from hpcdist.tracking.shipper import only_shipper
from hpcdist.tracking.uri import is_server, resolve_uri

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class SyncReport(Counts):
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

    With `close_dead` the run is closed if its supervisor or job died without recording a status. Raises RunFolderError
    if a supervisor starts the run at the same time.
    """
    with only_shipper(run) as only:
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


def sync_run(run: RunDir, env: Mapping[str, str]) -> SyncReport:
    """Upload the records of a run that MLflow does not have, unless its supervisor uploads them."""
    require_trusted(run.path, "sync")
    config = load_run_config(run.config, [], {**kept(run), **env}, require_secrets=False)
    uri = resolve_uri(config, env)
    # A Slurm job uploads to a server only; a database is filled from the host of the database.
    uploads_itself = job_of(run) is None or is_server(uri)
    if uploads_itself and (busy := holder(run)) is not None:
        return SyncReport(busy=f"its supervisor runs (process {busy['pid']} on {busy['host']}) and uploads it")
    update_job_starts(run)
    return sync(run, uri)


def watch(runs_dir: Path, env: Mapping[str, str], wanted: Callable[[RunDir], bool], interval_s: float) -> int:
    """Upload the `wanted` runs below `runs_dir` every `interval_s` until SIGTERM or SIGINT. Returns 0.

    Logs a line for each run with new records and for each new failure, which does not affect other runs. Raises
    UserMistake if another process does the same in this folder.
    """
    shown: dict[Path, str] = {}  # the last failure by run folder, the last note of the folder of runs
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with _only_watch(runs_dir):
        log.info("uploading the runs in %s every %g s", runs_dir, interval_s)
        try:
            while True:
                until = time.monotonic() + interval_s
                listing = list_runs(runs_dir)
                if listing.note != shown.get(runs_dir, ""):
                    log.info("%s", listing.note)
                shown[runs_dir] = listing.note
                for run in filter(wanted, listing.runs):
                    _upload(run, env, shown)
                time.sleep(max(0.0, until - time.monotonic()))
        except KeyboardInterrupt:
            log.info("ended by a signal; the next `hpcdist sync` uploads the rest")
    return 0


def _upload(run: RunDir, env: Mapping[str, str], failures: dict[Path, str]) -> None:
    try:
        if is_complete(run):
            return
        report = sync_run(run, env)
    except (HpcdistError, OSError) as error:
        message = " ".join(str(error).split())
        if failures.get(run.path) != message:
            log.warning("%s: %s", run.name, message)
        failures[run.path] = message
    except Exception as error:  # of one run: the others are uploaded
        log.exception("%s: internal error (%s)", run.name, type(error).__name__)
    else:
        if failures.pop(run.path, "") or report.kind == "uploaded":
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
