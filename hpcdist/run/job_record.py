"""The starts of the Slurm jobs of a run, in `job.json`.

A job records its own start, and accounting completes the record (`status.py`).
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcdist.config.slurm_notation import expand
from hpcdist.errors import RunFolderError, TopologyError
from hpcdist.host.json_files import fill, read_json
from hpcdist.run.folder import RunDir, read_record

#: Slurm's controller and its accounting report the begin of a job to the second.
SAME_START_S = 2.0
JOB_ID = re.compile(r"[0-9]{1,20}([_+][0-9]{1,10})?")


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """One start of a job, as `job.json` records it. Times are seconds since the epoch."""

    began: float
    nodes: str = ""
    queue_s: float = 0.0  #: time in the queue before this start
    ended: float | None = None  #: None while the job runs, and until accounting has reported the end
    cores: int = 0  #: number of allocated cores; 0 if accounting has not reported it
    gpus: int = 0
    energy_j: float | None = None
    state: str = ""  #: of this start in accounting, such as PREEMPTED or NODE_FAIL; empty if it is not known
    resized: float | None = None  #: time since which it has had `last_nodes`, if it has lost nodes or given some back
    last_nodes: str = ""
    failed_nodes: str = ""  #: names of the failed nodes that ended this start, with commas; empty if unknown

    def contains(self, moment: float) -> bool:
        """Return whether a time, in seconds since the epoch, is between begin and end of this start."""
        if moment < self.began - SAME_START_S:
            return False
        return self.ended is None or moment <= self.ended + SAME_START_S


@dataclass(kw_only=True)
class JobRecord:
    """The content of `job.json`: the starts of all jobs of a run, by job id and restart count, without damaged ones."""

    job_id: str = ""  #: the job of the last submission, or that of the submission before it
    jobs: dict[str, dict[str, dict[str, Any]]]


def all_job_starts(run: RunDir) -> list[JobStart]:
    """Return the starts of all jobs of a run, oldest first."""
    starts = []
    for records in read_jobs(run).jobs.values():
        for record in records.values():
            starts.append(fill(JobStart, record, run.path / "job.json"))
    return sorted(starts, key=lambda start: start.began)


def start_at(starts: Sequence[JobStart], moment: float) -> JobStart | None:
    """Return the newest start that contains a time: it may begin in the second in which the one before ends."""
    return next((start for start in reversed(starts) if start.contains(moment)), None)


def job_starts(run: RunDir) -> list[dict[str, Any]]:
    """Return the records of all starts of the run's current job, oldest first."""
    submitted = read_record(run.slurm) or {}
    job_id = str(submitted.get("job_id"))
    starts = read_jobs(run).jobs.get(job_id, {})
    return [starts[number] for number in sorted(starts, key=int)]


def read_jobs(run: RunDir) -> JobRecord:
    """Return the content of `job.json`, without damaged entries; an empty record if there is no such file."""
    saved = read_json(run.path / "job.json") or {}
    jobs: dict[str, Any] = {}
    earlier = saved.get("earlier")
    if isinstance(earlier, dict):
        jobs |= earlier
    job_id = saved.get("job_id")
    if not isinstance(job_id, str):
        job_id = ""
    if job_id:
        jobs[job_id] = saved.get("starts")
    record = JobRecord(job_id=job_id, jobs={})
    for known_id, starts in jobs.items():
        # The id becomes an argument of Slurm's commands.
        if isinstance(starts, dict) and JOB_ID.fullmatch(known_id):
            record.jobs[known_id] = {
                number: start for number, start in starts.items() if number.isdecimal() and _is_start(start)
            }
    return record


def _is_start(start: object) -> bool:
    try:
        if not isinstance(start, dict):
            return False
        parsed = fill(JobStart, start, Path())
        if parsed.resized is not None:
            expand(parsed.last_nodes)
    except (RunFolderError, TopologyError):
        return False
    return all(value >= 0 for value in asdict(parsed).values() if isinstance(value, int | float))
