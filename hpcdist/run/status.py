"""The jobs of a run, its status by state file, lease and Slurm, and requests to stop or cancel it."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpcdist.config.slurm_notation import expand
from hpcdist.errors import HpcdistError, RunFolderError, UserMistake
from hpcdist.host import retry
from hpcdist.host.json_files import LARGEST, fill, read_json, write_json
from hpcdist.run.folder import ENDED, RunDir, State, Status, StopRequest, read_record, sentence_of
from hpcdist.run.job_record import JOB_ID, SAME_START_S, JobRecord, read_jobs
from hpcdist.run.lease import hold, holder, user_name
from hpcdist.run.resume_text import script_of
from hpcdist.slurm import client
from hpcdist.slurm.client import JobRef, JobSnapshot, job_id_of
from hpcdist.slurm.output import JobInfo, SlurmError

# The Slurm job of a run: its id in `slurm.json`, and a record of its starts in `job.json`.

#: States of a start in accounting after which Slurm may have started the job again.
_STARTED_AGAIN = ("REQUEUED", "PREEMPTED", "NODE_FAIL", "RESIZING")
#: For this time after the end of a start, nodes that are down count as its cause; later, others may be down.
_FAILED_NODES_KNOWN_S = 3600.0


def job_of(run: RunDir) -> JobRef | None:
    """Return the job that a run was last submitted as; None for a local run."""
    saved = read_record(run.slurm)
    if not saved or not saved.get("job_id"):
        return None
    facts = {"id": str(saved["job_id"]), "name": saved.get("job_name", ""), "cluster": saved.get("cluster", "")}
    job = fill(JobRef, facts, run.slurm)
    # The id becomes an argument of Slurm's commands, which must not take it for an option or a list of jobs.
    if JOB_ID.fullmatch(job.id) is None:
        raise RunFolderError(f"{run.slurm} is damaged: {job.id[:40]!r} is not a Slurm job id")
    return job


def keep_job(run: RunDir) -> None:
    """Note the job of a run in `job.json`, before `slurm.json` gets another one: accounting can complete it later."""
    job = job_of(run)
    if job is None:
        return
    record = read_jobs(run)
    if job.id not in record.jobs:
        record.jobs[job.id] = {}
        _write(run, record)


def record_job_start(run: RunDir, env: Mapping[str, str]) -> None:
    """Record, from inside a job, its nodes, begin and queue time; accounting completes earlier starts and jobs."""
    job_id = job_id_of(env)
    facts = client.take_snapshot(JobRef(id=job_id)).info
    if facts is None or facts.started is None:
        return
    record = read_jobs(run)
    start = {"nodes": facts.nodes, "queue_s": facts.queue_s(time.time()) or 0.0, "began": facts.started}
    starts = record.jobs.get(job_id, {}) | {str(facts.restarts): start}
    _write(run, replace(record, job_id=job_id, jobs={**record.jobs, job_id: _completed(starts, job_id)}))


def update_job_starts(run: RunDir) -> None:
    """Complete the records of all jobs of a run from Slurm's accounting; without an answer they remain as they are."""
    job = job_of(run)
    record = read_jobs(run)
    jobs = dict(record.jobs)
    job_id = record.job_id
    if job is not None:
        job_id = job.id
        jobs.setdefault(job_id, {})
    completed = {}
    for known_id, starts in jobs.items():
        if _is_complete(starts):
            completed[known_id] = starts
        elif job is not None and known_id == job.id:
            completed[known_id] = _completed(starts, known_id, job.name)
        else:
            completed[known_id] = _completed(starts, known_id)
    if completed != jobs:
        _write(run, JobRecord(job_id=job_id, jobs=completed))


def _is_complete(starts: Mapping[str, dict[str, Any]]) -> bool:
    """Return whether accounting has reported the end of a job and of all its starts."""
    if not starts:
        return False
    for start in starts.values():
        if start.get("ended") is None or not start.get("cores"):
            return False
    last = starts[max(starts, key=int)]
    return last.get("state") not in _STARTED_AGAIN


def _completed(starts: Mapping[str, dict[str, Any]], job_id: str, job_name: str = "") -> dict[str, dict[str, Any]]:
    """Return the records of a job with the facts of accounting, which are authoritative.

    Slurm may give the id of an old job to another one, which is recognised by its name or, if that is not known, by its
    times.
    """
    try:
        accounted = client.accounted_starts(job_id)
    except SlurmError:
        return dict(starts)
    known = [start for start in accounted if job_name in ("", start.name)]
    # Accounting learns of a start some seconds later.
    late = []
    for start in starts.values():
        if not any(_is_same_start(start, began=other.began) for other in known):
            late.append(start)
    is_other_job = not job_name and starts and len(late) == len(starts)
    if not known or is_other_job:
        return dict(starts)
    completed = {}
    for number, accounted_start in enumerate(known):
        facts = {key: value for key, value in asdict(accounted_start).items() if key != "name" and value is not None}
        completed[str(number)] = facts | _failed_nodes(facts, starts.values())
    for number, start in enumerate(late, start=len(known)):
        completed[str(number)] = start
    return completed


def _is_same_start(start: Mapping[str, Any], *, began: float) -> bool:
    return bool(abs(start["began"] - began) <= SAME_START_S)


def _failed_nodes(record: Mapping[str, Any], earlier: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the key `failed_nodes` of a start that the failure of nodes has ended; empty if they are unknown.

    Accounting does not name them in all versions of Slurm: they are the nodes of the start that are down or have booted
    soon after its end.

    Args:
        earlier: records of the same starts, which may contain the key from an earlier call.
    """
    if record.get("state") != "NODE_FAIL" or not record.get("nodes"):
        return {}
    for start in earlier:
        if "failed_nodes" in start and _is_same_start(start, began=record["began"]):
            return {"failed_nodes": start["failed_nodes"]}
    ended = record.get("ended") or 0.0
    if time.time() - ended > _FAILED_NODES_KNOWN_S:
        return {}
    try:
        return {"failed_nodes": ",".join(client.failed_nodes(expand(record["nodes"]), record["began"]))}
    except HpcdistError:
        return {}


def _write(run: RunDir, record: JobRecord) -> None:
    earlier = {job_id: starts for job_id, starts in record.jobs.items() if job_id != record.job_id}
    starts = record.jobs.get(record.job_id, {})
    write_json(run.path / "job.json", {"job_id": record.job_id, "starts": starts, "earlier": earlier})


# The status of a run, derived from its state file, its lease and its job.

#: Status of a run by the final Slurm state of its job, if the supervisor recorded none; `failed` for all others.
_CLOSED_AS: dict[str, Status] = {"CANCELLED": "cancelled", "PREEMPTED": "stopped"}
#: Interval of Slurm queries, and the longer one while Slurm does not answer.
QUERY_EVERY_S = 5.0
QUERY_UNAVAILABLE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run at one moment."""

    name: str  #: the status in `state.json`, or `queued`, or `lost`: the supervisor died without recording an end
    state: State
    final: bool  #: the status cannot change unless a user resumes the run
    reason: str = ""
    facts: JobInfo | None = None  #: the run's Slurm job, if Slurm knows it
    slurm_error: str = ""  #: why Slurm could not be queried

    @property
    def sentence(self) -> str:
        """The status and its reason."""
        return sentence_of(self.name, self.reason)

    @property
    def is_lost(self) -> bool:
        """Whether the supervisor has died without recording an end; `reason` is then Slurm's, if there is a job."""
        return self.name == "lost" or self.state.lost


def query_job(run: RunDir, *, history: bool = False) -> JobSnapshot | None:
    """Query Slurm for the job of a run; None for a local run. `history`: see `status_of`."""
    job = job_of(run)
    if job is None:
        return None
    return client.take_snapshot(job, history=history)


def query_jobs(runs: Iterable[RunDir], *, skip_ended: bool = False) -> dict[Path, JobSnapshot]:
    """Query Slurm for the jobs of several runs in one call. Returns snapshots by run folder, without local runs."""
    jobs: dict[Path, tuple[JobRef, bool]] = {}
    for run in runs:
        with suppress(RunFolderError, OSError):  # reported when the caller reads the run's state
            job = job_of(run)
            if job is None:
                continue
            has_ended = run.read_state().status in ENDED
            if not (has_ended and skip_ended):
                jobs[run.path] = (job, has_ended)
    known: Mapping[str, JobInfo] = {}
    if len(jobs) > 1:
        try:
            known = client.query_jobs([job.id for job, _ in jobs.values()])
        except SlurmError as error:
            return dict.fromkeys(jobs, JobSnapshot(error=str(error), installed=error.installed))
    snapshots = {}
    for path, (job, has_ended) in jobs.items():
        facts = known.get(job.id)
        if facts is not None and job.name in ("", facts.name):
            snapshots[path] = JobSnapshot(info=facts)
        elif has_ended and len(jobs) > 1:
            snapshots[path] = JobSnapshot()
        else:  # squeue does not know jobs of another cluster, nor jobs that ended some minutes ago
            snapshots[path] = client.take_snapshot(job)
    return snapshots


def status_of(run: RunDir, *, history: bool = False) -> RunStatus:
    """Return the status of a run; with `history`, also memory, steps and earlier starts of its job."""
    return status_from(run, query_job(run, history=history))


def status_from(run: RunDir, snapshot: JobSnapshot | None) -> RunStatus:
    """Return the status of a run.

    Args:
        snapshot: the run's job; None for a local run. Take it before this call: the files of a job that it shows as
            ended are then complete.
    """
    # Opening a folder makes a network file system refresh its cached attributes.
    retry.retry(lambda: os.scandir(run.path).close(), run.path)
    facts: JobInfo | None = None
    slurm_error = ""
    if snapshot is not None:
        facts = snapshot.info
        slurm_error = snapshot.error
    job_is_alive = facts is not None and facts.alive
    # The lease of a killed supervisor on another host stays fresh for a while; Slurm's view takes precedence.
    is_held = holder(run) is not None
    if facts is not None and (facts.waiting or not facts.alive):
        is_held = False
    state = run.read_state()

    def status(name: str, reason: str = state.reason, *, final: bool = False) -> RunStatus:
        if name == "queued" and reason:
            reason = f"requeued ({reason})"  # the reason why the previous start ended
        return RunStatus(name=name, state=state, final=final, reason=reason, facts=facts, slurm_error=slurm_error)

    if state.status in ("finished", "cancelled") or state.rejected:
        return status(state.status, final=True)
    if state.status in ENDED:
        # A supervisor that still holds the run, or a job that is still alive, may be about to continue it.
        return status(state.status, final=not is_held and not job_is_alive)
    if is_held or state.status == "created":
        return status(state.status)
    if snapshot is None:
        if state.status == "running":
            return status("lost", final=True)
        return status(state.status)
    if snapshot.is_over and facts is not None:
        reason = facts.sentence()
        if facts.state == "COMPLETED":
            reason += ", its supervisor exited without recording a status"
        return status("lost", reason, final=True)
    if snapshot.is_over:
        job = job_of(run)
        job_id = "?" if job is None else job.id
        reason = f"Slurm no longer knows job {job_id}, and its supervisor did not record a status"
        if state.attempt == 0:
            reason = f"Slurm no longer knows job {job_id}: it was cancelled in the queue, or failed before an attempt"
        return status("lost", reason, final=True)
    if facts is not None and facts.waiting:
        return status("queued")
    if state.status == "running" and facts is None and not snapshot.installed:
        return status("lost", final=True)
    return status(state.status)


class StatusWatch:
    """Polls the statuses of runs; Slurm is queried every few seconds.

    A Slurm run counts as lost only after two snapshots of its job: a job leaves the queue before a slow file system
    shows the last state that its supervisor wrote.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_query = float("-inf")
        self._jobs: dict[Path, JobRef | None] = {}
        self._snapshots: dict[Path, JobSnapshot] = {}
        self._first_lost: dict[Path, JobSnapshot] = {}

    def poll(self, runs: Sequence[RunDir]) -> list[RunStatus]:
        """Return the current status of each run."""
        jobs = {run.path: job_of(run) for run in runs}
        is_new = any(self._jobs.get(path) != job for path, job in jobs.items())  # also after a resubmission
        self._jobs |= jobs
        if is_new or self._clock() >= self._next_query:
            self._snapshots = query_jobs(runs)
            interval_s = QUERY_EVERY_S
            if any(snapshot.error for snapshot in self._snapshots.values()):
                interval_s = QUERY_UNAVAILABLE_S
            self._next_query = self._clock() + interval_s
        statuses = []
        for run in runs:
            snapshot = self._snapshots.get(run.path)
            status = status_from(run, snapshot)
            if status.name != "lost" or snapshot is None:
                self._first_lost.pop(run.path, None)
            elif self._first_lost.setdefault(run.path, snapshot) is snapshot:
                status = replace(status, name=status.state.status, final=False, slurm_error="")
            statuses.append(status)
        return statuses


def close_if_lost(run: RunDir) -> str:
    """Record the end of a run if its supervisor or job died without a record. Returns the reason; "" for others."""
    if run.read_state().status in ENDED:
        return ""  # without a query to Slurm: there may be many old runs
    snapshot = query_job(run)
    current = status_from(run, snapshot)
    lease = read_json(run.lease) or {}
    status: Status = "failed"
    reason = current.reason
    ended: float | None = None
    job_id = None
    if snapshot is None:
        # A created run that was never held still waits for its start.
        has_died_early = current.name == "created" and lease and holder(run) is None
        if current.name != "lost" and not has_died_early:
            return ""
        reason = "its supervisor died"
    else:
        if current.name != "lost" or not snapshot.is_over:
            return ""
        job_id = lease.get("job_id")  # so that `hold` takes over the lease of the dead job at once
        if current.facts is not None:
            status = _CLOSED_AS.get(current.facts.state, "failed")
            ended = current.facts.ended
    if not ended:
        renewed = lease.get("renewed")
        is_time = isinstance(renewed, int | float) and 0 < renewed <= LARGEST
        ended = renewed if is_time else time.time()
    with hold(run, job_id=job_id):
        run.write_state(replace(current.state, status=status, reason=reason, ended=ended, lost=True))
    return reason


# Requests to stop or cancel a run.

POLL_S = 0.5
#: Limit of the wait for the supervisor of a job that has just started.
_START_TIMEOUT_S = 30.0


def end(run: RunDir, action: Literal["stop", "cancel"], *, by: str = "") -> str:
    """Request that a run saves and stops, or ends at once; take a waiting job out of the queue.

    Returns a message for the user. Raises UserMistake if the run is not running, or neither its supervisor nor Slurm
    can be reached. `by` is the author of the request; by default the command of this user.
    """
    request = StopRequest(action=action, cause="user", by=by or author_of(action))
    snapshot = query_job(run)
    if snapshot is not None and (holder(run) is None or (snapshot.info is not None and snapshot.info.waiting)):
        message = _dequeue(run, request, snapshot)
        if message is not None:
            return message
        _wait_for_attempt(run, after=run.read_state().attempt, holds_soon=True)
    elif run.read_state().attempt == 0:
        _wait_for_attempt(run, after=0, holds_soon=False)
    state = run.read_state()
    if holder(run) is None:
        raise UserMistake(
            f"run {run.name} is not running: it has no supervisor, and its last state is {state.status!r}"
        )
    if state.attempt == 0:
        raise UserMistake(
            f"run {run.name} is being prepared and has no attempt yet: repeat the command when `hpcdist status"
            f" {run.name}` shows one"
        )
    run.send_request(request)
    if action == "cancel":
        return f"{run.name} will end at once"
    script = script_of(run)
    if script:
        limit = "and SIGKILL unless it ends within launch.stop_grace_s"
        return (
            f"{run.name}: {script} gets SIGTERM, {limit}; `hpcdist status {run.name}` shows the files that it has saved"
        )
    return f"{run.name} will save and stop; `hpcdist status {run.name}` shows its progress"


def _wait_for_attempt(run: RunDir, *, after: int, holds_soon: bool) -> None:
    """Wait until a supervisor holds the run and has begun an attempt, for at most _START_TIMEOUT_S.

    No event shows that on another host.

    Args:
        after: the number of the last attempt before.
        holds_soon: whether a supervisor is expected although none holds the run; otherwise the wait ends without one.
    """
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        is_held = holder(run) is not None
        if is_held and run.read_state().attempt > after:
            return
        if not is_held and not holds_soon:
            return
        time.sleep(POLL_S)


def author_of(action: str) -> str:
    """Return the author of a request that the command `hpcdist ACTION` of this user sends."""
    return f"`hpcdist {action}` by {user_name()}"


def _dequeue(run: RunDir, request: StopRequest, snapshot: JobSnapshot) -> str | None:
    """Take the job of a run out of the queue, and return a message; None if the job does not wait any more.

    Raises UserMistake if the run is not running, or Slurm does not answer.
    """
    job = job_of(run)
    assert job is not None
    status = status_from(run, snapshot)
    if status.final:
        raise UserMistake(f"run {run.name} is not running: it is {status.sentence}")
    if snapshot.error:
        raise UserMistake(
            f"run {run.name} has no supervisor, and Slurm does not answer about job {job.id}: {snapshot.error}"
        )
    if status.facts is None or not status.facts.waiting:
        return None
    # A job that starts at this moment is left to its supervisor, which saves.
    client.cancel_job(job.id, pending_only=True)
    after = query_job(run)
    if after is None or not after.is_over:
        return None
    ended: Status = "cancelled"
    if request.action == "stop":
        ended = "stopped"
    reason = f"taken out of the queue ({request.sentence})"
    lease = read_json(run.lease) or {}
    with hold(run, job_id=lease.get("job_id")):  # takes over the lease of the dead job at once
        run.write_state(replace(run.read_state(), status=ended, reason=reason, ended=time.time()))
    return f"job {job.id} of {run.name} was taken out of the queue; `{run.resume_command}` submits it again"
