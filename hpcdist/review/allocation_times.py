"""The allocations of a run: each supervision of a local run, and each start of a Slurm job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hpcdist.review.rank_times import TimedAttempt
from hpcdist.run.attempt_times import end_of, read_times
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import holder
from hpcdist.run.slurm_job import JobStart, all_job_starts


@dataclass(frozen=True, kw_only=True)
class AllocationTimes:
    """A time in which resources were allocated to a run. Times are seconds since the epoch."""

    began: float
    ended: float
    attempts: Sequence[TimedAttempt]
    nodes: dict[str, float] = field(default_factory=dict)  #: allocated GPUs or cores of each node
    queue_s: float = 0.0
    energy_j: float | None = None


def timed_attempts(run: RunDir, now: float) -> list[TimedAttempt]:
    """Return the attempts of a run whose times are known, oldest first."""
    known = [(attempt, times) for attempt in run.attempts() if (times := read_times(attempt)) is not None]
    is_held = run.read_state().status == "running" and holder(run) is not None
    found = []
    for index, (attempt, times) in enumerate(known):
        is_live = times.ended is None and is_held and index == len(known) - 1
        ended = now if is_live else end_of(attempt, times)
        if index + 1 < len(known):
            ended = min(ended, known[index + 1][1].began)
        ended = max(ended, times.began)
        found.append(TimedAttempt(attempt=attempt, times=times, began=times.began, ended=ended, is_live=is_live))
    return found


def allocations_of(run: RunDir, now: float | None = None) -> list[AllocationTimes]:
    """Return the allocations of a run until now, oldest first; none for a run of an older hpcdist."""
    now = time.time() if now is None else now
    attempts = timed_attempts(run, now)
    starts = all_job_starts(run)
    # A supervisor that was killed is restarted in the same start of its job.
    groups: dict[JobStart | float, list[TimedAttempt]] = {}
    for attempt in attempts:
        supervised = attempt.times.supervised
        own = next((start for start in reversed(starts) if start.contains(supervised)), supervised)
        groups.setdefault(own, []).append(attempt)
    is_gpu = any(attempt.times.unit == "GPU" for attempt in attempts)
    found = [_without_attempts(start, is_gpu) for start in starts if start not in groups and start.ended is not None]
    for key, group in groups.items():
        began = group[0].times.supervised
        own_time = AllocationTimes(began=began, ended=group[-1].ended, attempts=group, nodes=group[0].nodes)
        found.append(_with_start(own_time, key) if isinstance(key, JobStart) else own_time)
    return sorted(found, key=lambda one: one.began)


def _with_start(own: AllocationTimes, start: JobStart) -> AllocationTimes:
    # Between the recorded end and Slurm's, Slurm ends the job.
    ended = max(start.began, own.ended if start.ended is None else start.ended)
    return replace(
        own,
        began=start.began,
        ended=ended,
        attempts=[_clipped(attempt, start.began, ended) for attempt in own.attempts],
        queue_s=start.queue_s,
        energy_j=start.energy_j,
    )


def _clipped(timed: TimedAttempt, began: float, ended: float) -> TimedAttempt:
    first = min(max(timed.began, began), ended)
    return replace(timed, began=first, ended=min(max(timed.ended, first), ended))


def _without_attempts(start: JobStart, is_gpu: bool) -> AllocationTimes:
    """Return a start of a job that ended before its first attempt."""
    assert start.ended is not None
    allocated = start.gpus if is_gpu else start.cores
    return AllocationTimes(
        began=start.began,
        ended=start.ended,
        attempts=(),
        nodes={start.nodes: allocated} if allocated else {},
        queue_s=start.queue_s,
        energy_j=start.energy_j,
    )
