"""The Slurm job of a run: its id in `slurm.json`, and a record of its starts in `job.json`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpcdist.errors import RunFolderError
from hpcdist.files.atomic import read_json, write_json
from hpcdist.files.formats import LARGEST, fill
from hpcdist.run.folder import RunDir, read_record
from hpcdist.slurm import client, job_snapshot
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.job_snapshot import JobRef

#: Slurm's controller and its accounting report the begin of a job to the second.
_SAME_S = 2.0
_JOB_ID = re.compile(r"[0-9]{1,20}([_+][0-9]{1,10})?")


@dataclass(frozen=True, kw_only=True)
class _SavedJob:
    """The content of `slurm.json` of a submitted run."""

    job_id: str
    job_name: str = ""
    cluster: str = ""


def job_of(run: RunDir) -> JobRef | None:
    """Return the job that a run was last submitted as; None for a local run."""
    saved = read_record(run.slurm)
    if not saved or not saved.get("job_id"):
        return None
    ref = fill(_SavedJob, saved | {"job_id": str(saved["job_id"])}, run.slurm)
    # The id becomes an argument of Slurm's commands, which must not take it for an option or a list of jobs.
    if _JOB_ID.fullmatch(ref.job_id) is None:
        raise RunFolderError(f"{run.slurm} is damaged: {ref.job_id[:40]!r} is not a Slurm job id")
    return JobRef(id=ref.job_id, name=ref.job_name, cluster=ref.cluster)


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """One start of a job, as `job.json` records it. Times are seconds since the epoch."""

    nodes: str = ""
    queue_s: float = 0.0  #: time in the queue before this start
    began: float | None = None  #: None in records of an older hpcdist
    ended: float | None = None  #: None while the job runs, and until accounting has reported the end
    cores: int = 0  #: number of allocated cores; 0 if accounting has not reported it
    gpus: int = 0
    energy_j: float | None = None
    state: str = ""  #: of this start in accounting, such as PREEMPTED or NODE_FAIL; empty if it is not known

    def contains(self, moment: float) -> bool:
        """Return whether the job was allocated in this start at a time in seconds since the epoch."""
        if self.began is None:
            return False
        return self.began - _SAME_S <= moment and (self.ended is None or moment <= self.ended + _SAME_S)


def record_job_start(run: RunDir, env: Mapping[str, str]) -> None:
    """Record, from inside a job, its nodes, its begin and its queue time in `job.json`.

    The file holds the job's id and, by the job's restart count, the records of `JobStart`. Accounting completes those
    of earlier starts.
    """
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    job_id = f"{array}_{task}" if array and task else env["SLURM_JOB_ID"]
    facts = job_snapshot.take_snapshot(JobRef(id=job_id)).info
    if facts is None:
        return
    starts = _starts(run, job_id)
    starts[str(facts.restarts)] = {
        "nodes": facts.nodes,
        "queue_s": facts.queue_s(time.time()) or 0.0,
        "began": facts.started,
    }
    _write_starts(run, job_id, _completed(starts, job_id))


def update_job_starts(run: RunDir) -> None:
    """Complete the records of a run's job with begin, end, cores, GPUs and energy from Slurm's accounting.

    Without accounting, or if it does not answer, the records remain as they are.
    """
    job = job_of(run)
    if job is None:
        return
    starts = _starts(run, job.id)
    if not starts or any(start.get("ended") is None or not start.get("cores") for start in starts.values()):
        completed = _completed(starts, job.id, job.name)
        if completed != starts:
            _write_starts(run, job.id, completed)


def _completed(starts: Mapping[str, dict[str, Any]], job_id: str, job_name: str = "") -> dict[str, dict[str, Any]]:
    """Return the records with the facts of accounting, which are authoritative."""
    try:
        accounted = client.accounted_starts(job_id)
    except SlurmError:
        return dict(starts)
    known = [start for start in accounted if job_name in ("", start.name)]
    if not known:
        return dict(starts)
    completed = {
        str(number): {key: value for key, value in asdict(start).items() if key != "name" and value is not None}
        for number, start in enumerate(known)
    }
    # Accounting learns of a start some seconds later.
    late = [
        start
        for start in starts.values()
        if start.get("began") and all(abs(start["began"] - one.began) > _SAME_S for one in known)
    ]
    return completed | {str(len(known) + index): start for index, start in enumerate(late)}


def _write_starts(run: RunDir, job_id: str, starts: Mapping[str, Any]) -> None:
    """Write the records of a job; those of the run's earlier jobs are kept under `earlier`."""
    noted = read_json(run.path / "job.json") or {}
    earlier = noted.get("earlier") if isinstance(noted.get("earlier"), dict) else {}
    before = noted.get("job_id")
    if isinstance(before, str) and before != job_id:
        earlier = {**(earlier or {}), before: noted.get("lives")}
    write_json(run.path / "job.json", {"job_id": job_id, "lives": starts, "earlier": earlier or {}})


def all_job_starts(run: RunDir) -> list[JobStart]:
    """Return all starts of all jobs of a run, oldest first."""
    noted = read_json(run.path / "job.json") or {}
    earlier = noted.get("earlier")
    records = [*(earlier.values() if isinstance(earlier, dict) else ()), noted.get("lives")]
    found = [
        fill(JobStart, start, run.path / "job.json")
        for lives in records
        if isinstance(lives, dict)
        for start in lives.values()
        if _is_start(start)
    ]
    return sorted(found, key=lambda start: start.began or 0.0)


def job_starts(run: RunDir) -> list[dict[str, Any]]:
    """Return the records of all starts of the run's current job, oldest first; see `record_job_start`."""
    job = job_of(run)
    starts = _starts(run, job.id) if job is not None else {}
    return [starts[number] for number in sorted(starts, key=int)]


def _starts(run: RunDir, job_id: str) -> dict[str, dict[str, Any]]:
    """Return the records in `job.json` by restart count, without damaged ones."""
    noted = read_json(run.path / "job.json") or {}
    starts = noted.get("lives") if noted.get("job_id") == job_id else None
    if not isinstance(starts, dict):
        return {}
    return {number: start for number, start in starts.items() if number.isdecimal() and _is_start(start)}


def _is_start(start: object) -> bool:
    if not isinstance(start, dict) or not all(isinstance(start.get(key, ""), str) for key in ("nodes", "state")):
        return False
    counts = [start.get(key, 0) for key in ("cores", "gpus")]
    times = [start.get("queue_s", 0.0), *(start.get(key) or 0.0 for key in ("began", "ended", "energy_j"))]
    return all(type(count) is int and 0 <= count <= LARGEST for count in counts) and all(
        type(value) in (int, float) and 0 <= value <= LARGEST for value in times
    )
