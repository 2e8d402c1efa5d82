"""`hpcdist sync`: upload existing runs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hpcdist.config.loading import load_run_config
from hpcdist.host.log_files import say
from hpcdist.host.ownership import require_trusted
from hpcdist.run.folder import ENDED, RunDir
from hpcdist.run.kept_secrets import kept
from hpcdist.run.lease import holder
from hpcdist.run.status import close_if_lost, job_of, status_of, update_job_starts
from hpcdist.tracking.journal_tail import Counts
from hpcdist.tracking.shipper import only_shipper
from hpcdist.tracking.uri import is_server, resolve_uri


@dataclass(kw_only=True)
class SyncReport(Counts):
    """The result of an upload; `str` returns it as a sentence."""

    num_artifacts: int = 0  #: uploaded
    closed: str = ""  #: reason with which a run of a dead supervisor or job was closed
    busy: str = ""  #: the process that uploads the run instead; nothing was done

    @property
    def kind(self) -> str:
        """`busy`, `unchanged` or `uploaded`."""
        if self.busy:
            return "busy"
        if self == SyncReport():
            return "unchanged"
        return "uploaded"

    def __str__(self) -> str:
        if self.busy:
            return self.busy
        text = f"{self.num_points} points and {self.num_artifacts} artifacts uploaded"
        if self.num_refused:
            text += f", {self.num_refused} points rejected by MLflow"
        if self.num_broken:
            text += f", {self.num_broken} damaged lines skipped"
        if self.closed:
            text += f"; closed: {self.closed}"
        return text


def sync(run: RunDir, uri: str, *, close_dead: bool = True, waits: bool = False) -> SyncReport:
    """Upload in this process all records that MLflow does not have.

    With `close_dead` the run is closed if its supervisor or job died without recording a status. Raises RunFolderError
    if a supervisor starts the run at the same time.

    Args:
        waits: wait for another process that uploads the run, and then upload the rest.
    """
    with only_shipper(run) as only:
        if only:
            return _upload(run, uri, close_dead=close_dead)
    if not waits:
        return SyncReport(busy="another process uploads it at the moment")
    say(f"{run.name}: waiting for another process that uploads it", error=True)
    with only_shipper(run, waits=True):
        return _upload(run, uri, close_dead=close_dead)


def _upload(run: RunDir, uri: str, *, close_dead: bool) -> SyncReport:
    from hpcdist.tracking.delivery import Delivery  # imports MLflow

    closed = close_if_lost(run) if close_dead else ""
    delivery = Delivery(run, uri)
    delivery.open_run()
    before = dict(delivery.uploads.sent_files.artifacts)
    delivery.ship_once()
    num_artifacts = len(delivery.uploads.sent_files.artifacts.items() - before.items())
    return SyncReport(**asdict(delivery.batches.counts), num_artifacts=num_artifacts, closed=closed)


def _is_over(run: RunDir) -> bool:
    """Return whether a run has ended and no job continues it, as one that Slurm has requeued does.

    A command that follows such a job uploads until the end of the job, which may come in days.
    """
    if run.read_state().status not in ENDED:
        return False
    return job_of(run) is None or status_of(run).final


def sync_run(run: RunDir, env: Mapping[str, str], *, complete: bool = False) -> SyncReport:
    """Upload the records of a run that MLflow does not have, unless another process uploads them.

    Args:
        complete: wait for the other process if the run has ended. It may have read an earlier state of the run, as the
            upload in the background of `hpcdist submit` does, and would then leave out the end.
    """
    require_trusted(run.path, "sync")
    config = load_run_config(run.config, [], {**kept(run), **env}, require_secrets=False)
    uri = resolve_uri(config, env)
    # A Slurm job uploads to a server only; a database is filled from the host of the database.
    uploads_itself = job_of(run) is None or is_server(uri)
    waits = complete and _is_over(run)
    if uploads_itself and not waits:
        supervisor = holder(run)
        if supervisor is not None:
            process = f"process {supervisor['pid']} on {supervisor['host']}"
            return SyncReport(busy=f"its supervisor runs ({process}) and uploads it")
    update_job_starts(run)
    return sync(run, uri, waits=waits)
