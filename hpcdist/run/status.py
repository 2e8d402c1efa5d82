"""Status of runs and sweeps: the state file, checked against the lease and against Slurm's view of the job; and how
often run folders are read and written.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpcdist.errors import RunFolderError
from hpcdist.host import retry
from hpcdist.host.files import read_json
from hpcdist.run.folder import ENDED, RunDir, State, Status, sentence_of
from hpcdist.run.lease import hold, holder, last_renewal
from hpcdist.run.slurm_job import job_of
from hpcdist.slurm import client
from hpcdist.slurm.client import JobRef, JobSnapshot, SlurmError
from hpcdist.slurm.output import JobInfo

#: Status of a run whose job ended in this Slurm state before its supervisor recorded one; `failed` for all others.
_CLOSED_AS: dict[str, Status] = {"CANCELLED": "cancelled", "PREEMPTED": "stopped"}
#: Interval of Slurm queries, and the longer one while Slurm does not answer.
QUERY_EVERY_S = 5.0
QUERY_UNAVAILABLE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Status of one run at one moment."""

    name: str  #: the status in `state.json`, or `queued`, or `lost`: the supervisor died without recording an end
    state: State
    final: bool  #: the status cannot change unless a user resumes the run
    reason: str = ""
    facts: JobInfo | None = None  #: the run's Slurm job, if Slurm knows it
    slurm_error: str = ""  #: why Slurm could not be queried

    @property
    def sentence(self) -> str:
        """Status and reason."""
        return sentence_of(self.name, self.reason)

    @property
    def is_lost(self) -> bool:
        """Whether the supervisor recorded no end; the reason is then that of the job, if there is one."""
        return self.name == "lost" or self.state.lost


def query_job(run: RunDir, *, history: bool = False) -> JobSnapshot | None:
    """Query Slurm for a run's job. Returns None for a local run."""
    job = job_of(run)
    return client.take_snapshot(job, history=history) if job is not None else None


def query_jobs(runs: Iterable[RunDir], *, skip_ended: bool = False) -> dict[Path, JobSnapshot]:
    """Query Slurm for the jobs of several runs in one call. Returns snapshots by run folder, without local runs.

    Args:
        skip_ended: leave out runs whose state file records an end.
    """
    jobs: dict[Path, tuple[JobRef, bool]] = {}
    for run in runs:
        with suppress(RunFolderError, OSError):  # reported when the caller reads the run's state
            if (job := job_of(run)) and not ((ended := run.read_state().status in ENDED) and skip_ended):
                jobs[run.path] = (job, ended)
    try:
        known = client.query_jobs([job.id for job, _ in jobs.values()]) if len(jobs) > 1 else {}
    except SlurmError as error:
        return dict.fromkeys(jobs, JobSnapshot(error=str(error), installed=error.installed))
    found = {}
    for path, (job, ended) in jobs.items():
        facts = known.get(job.id)
        if facts is not None and job.name in ("", facts.name):
            found[path] = JobSnapshot(info=facts)
        elif ended and len(jobs) > 1:
            found[path] = JobSnapshot()
        else:  # squeue does not know jobs of another cluster, nor jobs that ended some minutes ago
            found[path] = client.take_snapshot(job)
    return found


def status_of(run: RunDir, *, history: bool = False) -> RunStatus:
    """Return the status of a run. Queries Slurm once for a Slurm run.

    Args:
        history: also query accounting for memory, steps and earlier starts of the job.
    """
    return status_from(run, query_job(run, history=history))


def status_from(run: RunDir, snapshot: JobSnapshot | None) -> RunStatus:
    """Return the status of a run, given a snapshot of its job (None for a local run).

    The snapshot must be taken before this call: then a job that the snapshot shows as ended has written everything.
    """
    # Opening a folder makes a network file system refresh its cached attributes.
    retry.retry(lambda: os.scandir(run.path).close(), run.path)
    facts = snapshot.info if snapshot else None
    # The lease of a killed supervisor on another host stays fresh for a while; Slurm's view takes precedence.
    held = holder(run) is not None and not (facts is not None and (facts.waiting or not facts.alive))
    state = run.read_state()

    def status(name: str, reason: str = state.reason, *, final: bool = False) -> RunStatus:
        error = snapshot.error if snapshot else ""
        if name == "queued" and reason:
            reason = f"requeued ({reason})"  # the reason is that of the end before
        return RunStatus(name=name, state=state, final=final, reason=reason, facts=facts, slurm_error=error)

    if state.status in ("finished", "cancelled") or state.rejected:
        return status(state.status, final=True)
    if state.status in ENDED:
        # A supervisor that still holds the run, or a job that is still alive, may be about to continue it.
        return status(state.status, final=not held and not (facts is not None and facts.alive))
    if held or state.status == "created":
        return status(state.status)
    if snapshot is None:
        return status("lost", final=True) if state.status == "running" else status(state.status)
    if snapshot.is_over:
        return status("lost", _end_of_job(run, facts), final=True)
    if facts is not None and facts.waiting:
        return status("queued")
    if state.status == "running" and facts is None and not snapshot.installed:
        return status("lost", final=True)
    return status(state.status)


def _end_of_job(run: RunDir, facts: JobInfo | None) -> str:
    """Return a sentence about a job that ended before its supervisor recorded a status."""
    if facts is not None:
        unrecorded = ", its supervisor exited without recording a status" if facts.state == "COMPLETED" else ""
        return facts.sentence() + unrecorded
    job = job_of(run)
    return f"Slurm no longer knows job {job.id if job else '?'}, and its supervisor did not record a status"


class StatusWatch:
    """Statuses of runs, polled again and again; Slurm is queried only every few seconds.

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
            is_away = any(snapshot.error for snapshot in self._snapshots.values())
            self._next_query = self._clock() + (QUERY_UNAVAILABLE_S if is_away else QUERY_EVERY_S)
        return [self._poll(run) for run in runs]

    def _poll(self, run: RunDir) -> RunStatus:
        snapshot = self._snapshots.get(run.path)
        found = status_from(run, snapshot)
        if found.name != "lost" or snapshot is None:
            self._first_lost.pop(run.path, None)
            return found
        if self._first_lost.setdefault(run.path, snapshot) is not snapshot:
            return found
        return replace(found, name=found.state.status, final=False, slurm_error="")


def sweep_state(cells: Sequence[RunDir], *, active: bool, created: float) -> State:
    """Return the state of a sweep, derived from the folders of its cells. Does not query Slurm.

    Args:
        cells: folders of all cells; some may not exist yet.
        active: whether a process holds the sweep and starts its cells one after the other.
        created: seconds since the epoch.
    """
    states: list[State] = []
    num_live, num_unreadable = 0, 0
    existing = [run for run in cells if os.path.lexists(run.path / "state.json")]
    for run in existing:
        try:
            on_slurm = run.slurm.exists()
            found = status_from(run, JobSnapshot(error="not queried") if on_slurm else None)
        except RunFolderError:
            num_unreadable += 1
            continue
        states.append(found.state)
        # A created cell is live if it waits for its turn in an active sweep, or in Slurm's queue.
        waits = found.state.status == "running" or active or on_slurm
        num_live += found.state.status not in ENDED and not found.final and waits
    odd = ["missing"] * (len(cells) - len(existing)) + ["unreadable"] * num_unreadable
    counts = Counter([state.status for state in states] + odd)
    status: Status
    if num_live:
        status = "running" if any(state.attempt for state in states) else "queued"
    else:
        # A cell that is neither live nor ended has lost its supervisor.
        status = _combined(["failed" if state.status == "running" else state.status for state in states] + odd)
    return State(
        status=status,
        reason=f"{len(cells)} cells: {', '.join(f'{number} {name}' for name, number in sorted(counts.items()))}",
        created=created,
        ended=None if num_live else max((state.ended or state.created for state in states), default=time.time()),
        attempt=sum(state.attempt for state in states),
    )


def _combined(statuses: Sequence[str]) -> Status:
    if "failed" in statuses:
        return "failed"
    if set(statuses) == {"finished"}:
        return "finished"
    return "cancelled" if "cancelled" in statuses else "stopped"


def close_if_lost(run: RunDir) -> str:
    """Record the end of a run whose supervisor or job died without recording one.

    Returns:
        The recorded reason; empty if the run is alive, waits, or has ended by itself.

    Raises:
        RunFolderError: a supervisor takes the run at this moment.
    """
    if run.read_state().status in ENDED:
        return ""  # without a query to Slurm: there may be many old runs
    snapshot = query_job(run)
    found = status_from(run, snapshot)
    lease = read_json(run.lease) or {}
    status: Status = "failed"
    reason, ended = found.reason, None
    if snapshot is None:
        # A created run that was never held still waits for its start.
        if found.name != "lost" and not (found.name == "created" and lease and holder(run) is None):
            return ""
        reason = "its supervisor died"
    elif found.name != "lost" or not snapshot.is_over:
        return ""
    elif found.facts is not None:
        status = _CLOSED_AS.get(found.facts.state, "failed")
        ended = found.facts.ended
    last_sign = last_renewal(run) or time.time()
    # The lease of a dead job is void.
    with hold(run, job_id=lease.get("job_id") if snapshot is not None else None):
        run.write_state(replace(found.state, status=status, reason=reason, ended=ended or last_sign, lost=True))
    return reason


# Intervals of reads and writes in a run folder, which limit the load of the shared file system at any scale.
#
# Small runs read and write about once a second; with more than WRITES_PER_S ranks, each rank does so less often. The
# limits are exceeded only if hangs could not be detected otherwise: with more ranks than a quarter of
# `launch.hang_timeout_s` × WRITES_PER_S, 28,800 by default. `benchmarks/scale.py` measures the resulting load.

#: Heartbeats of all ranks together; also system metrics of all nodes together.
WRITES_PER_S = 64.0
#: Step-time points of all nodes together.
TIMES_PER_S = 8.0
#: Files that the supervisor, or the shipper, checks.
CHECKS_PER_S = 64.0
BEAT_EVERY_S = 1.0
#: Limit of the heartbeat interval, as a share of the hang timeout.
_SHARE_OF_HANG = 0.25


def beat_interval_s(rank: int, num_ranks: int, hang_timeout_s: float) -> float:
    """Return the seconds between heartbeats of a rank. Rank 0, which shows the progress, keeps the short interval."""
    interval_s = BEAT_EVERY_S if rank == 0 else max(BEAT_EVERY_S, num_ranks / WRITES_PER_S)
    return min(interval_s, _SHARE_OF_HANG * hang_timeout_s)


def num_due_ranks(num_ranks: int, since_last_s: float, hang_timeout_s: float) -> int:
    """Return the number of ranks to check, `since_last_s` seconds after the last check."""
    per_s = max(CHECKS_PER_S, num_ranks / (_SHARE_OF_HANG * hang_timeout_s))
    return min(num_ranks, max(1, round(per_s * since_last_s)))


def system_interval_s(configured_s: float, num_nodes: int) -> float:
    """Return the seconds between system metrics of a node; 0 means none."""
    return max(configured_s, num_nodes / WRITES_PER_S) if configured_s > 0 else 0.0


def times_interval_s(num_nodes: int) -> float:
    """Return the minimum seconds between step times of a node; 0 for few nodes, which log at each interval."""
    return num_nodes / TIMES_PER_S if num_nodes > TIMES_PER_S else 0.0
