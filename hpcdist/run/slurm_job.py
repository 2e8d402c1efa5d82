"""The Slurm job of a run: its id in `slurm.json`, and a record of its starts in `job.json`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpcdist.errors import HpcdistError, RunFolderError
from hpcdist.host.files import LARGEST, fill, read_json, write_json
from hpcdist.host.nodelist import expand
from hpcdist.run.folder import RunDir, read_record
from hpcdist.slurm import client
from hpcdist.slurm.client import JobRef, SlurmError
from hpcdist.slurm.current_job import job_id_of

#: Slurm's controller and its accounting report the begin of a job to the second.
_SAME_S = 2.0
#: After the end of a start, the nodes that are down are those that ended it only for a limited time.
_RECENT_S = 3600.0
#: States of a start in accounting after which Slurm may have started the job again.
_STARTED_AGAIN = ("REQUEUED", "PREEMPTED", "NODE_FAIL", "RESIZING")
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

    began: float
    nodes: str = ""
    queue_s: float = 0.0  #: time in the queue before this start
    ended: float | None = None  #: None while the job runs, and until accounting has reported the end
    cores: int = 0  #: number of allocated cores; 0 if accounting has not reported it
    gpus: int = 0
    energy_j: float | None = None
    state: str = ""  #: of this start in accounting, such as PREEMPTED or NODE_FAIL; empty if it is not known
    failed_nodes: str = ""  #: names of the nodes whose failure ended this start, with commas; empty if unknown

    def contains(self, moment: float) -> bool:
        """Return whether the job was allocated in this start at a time in seconds since the epoch."""
        return self.began - _SAME_S <= moment and (self.ended is None or moment <= self.ended + _SAME_S)


@dataclass(kw_only=True)
class _Record:
    """The content of `job.json`: the starts of all jobs of a run, by job id and restart count, without damaged ones."""

    job_id: str = ""  #: the job that the run was last submitted as, or the one before it
    jobs: dict[str, dict[str, dict[str, Any]]]
    names: dict[str, str]  #: of the jobs, where they are known


def keep_job(run: RunDir) -> None:
    """Note the job of a run in `job.json`, before `slurm.json` gets another one: accounting can complete it later."""
    if (job := job_of(run)) is None:
        return
    record = _read(run)
    if job.id not in record.jobs or (job.name and record.names.get(job.id) != job.name):
        record.jobs.setdefault(job.id, {})
        record.names |= {job.id: job.name} if job.name else {}
        _write(run, record)


def record_job_start(run: RunDir, env: Mapping[str, str]) -> None:
    """Record, from inside a job, its nodes, its begin and its queue time in `job.json`.

    The file holds the job's id and, by the job's restart count, the records of `JobStart`. Accounting completes those
    of earlier starts and of earlier jobs.
    """
    job_id = job_id_of(env)
    facts = client.take_snapshot(JobRef(id=job_id)).info
    if facts is None or facts.started is None:
        return
    record = _read(run)
    starts = record.jobs.get(job_id, {}) | {
        str(facts.restarts): {
            "nodes": facts.nodes,
            "queue_s": facts.queue_s(time.time()) or 0.0,
            "began": facts.started,
        }
    }
    jobs = {**record.jobs, job_id: _completed(starts, job_id)}
    _write(run, replace(record, job_id=job_id, jobs=jobs))


def update_job_starts(run: RunDir) -> None:
    """Complete the records of all jobs of a run with begin, end, cores, GPUs and energy from Slurm's accounting.

    Without accounting, or if it does not answer, the records remain as they are.
    """
    job = job_of(run)
    record = _read(run)
    names = record.names | ({job.id: job.name} if job is not None and job.name else {})
    job_id = record.job_id if job is None else job.id
    jobs = record.jobs | ({job_id: record.jobs.get(job_id, {})} if job is not None else {})
    completed = {
        one: starts
        if _is_complete(starts)
        else _completed(starts, one, names.get(one, ""), is_certain=job is not None and one == job.id)
        for one, starts in jobs.items()
    }
    if completed != jobs:
        _write(run, _Record(job_id=job_id, jobs=completed, names=names))


def _is_complete(starts: Mapping[str, dict[str, Any]]) -> bool:
    """Return whether the end of a job is recorded; after some states Slurm may have started it again."""
    return (
        bool(starts)
        and all(start.get("ended") is not None and start.get("cores") for start in starts.values())
        and starts[max(starts, key=int)].get("state") not in _STARTED_AGAIN
    )


def _completed(
    starts: Mapping[str, dict[str, Any]], job_id: str, job_name: str = "", *, is_certain: bool = True
) -> dict[str, dict[str, Any]]:
    """Return the records of a job with the facts of accounting, which are authoritative.

    Args:
        job_name: empty if it is not known.
        is_certain: whether this job has the id now. Slurm may give the id of an old job to another one, whose starts
            are recognised by the name or, where it is not known, by the times.
    """
    try:
        accounted = client.accounted_starts(job_id)
    except SlurmError:
        return dict(starts)
    known = [start for start in accounted if job_name in ("", start.name)]
    began = [start["began"] for start in starts.values()]
    is_known = is_certain or job_name or any(abs(one.began - moment) <= _SAME_S for one in known for moment in began)
    if not known or not is_known:
        return dict(starts)
    completed = {
        str(number): {key: value for key, value in asdict(start).items() if key != "name" and value is not None}
        for number, start in enumerate(known)
    }
    for record in completed.values():
        record |= _failed_nodes(record, starts.values())
    # Accounting learns of a start some seconds later.
    late = [start for start in starts.values() if all(abs(start["began"] - one.began) > _SAME_S for one in known)]
    return completed | {str(len(known) + index): start for index, start in enumerate(late)}


def _failed_nodes(record: Mapping[str, Any], earlier: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the key of the nodes whose failure ended a start of a job, if they are known.

    Accounting does not name them in all versions of Slurm: they are the nodes of the start that are down or have booted
    when this is asked for the first time, soon after its end.

    Args:
        earlier: the records before; the nodes of a start are not searched twice.
    """
    if record.get("state") != "NODE_FAIL" or not record.get("nodes"):
        return {}
    for one in earlier:
        if "failed_nodes" in one and abs(one["began"] - record["began"]) <= _SAME_S:
            return {"failed_nodes": one["failed_nodes"]}
    if time.time() - (record.get("ended") or 0.0) > _RECENT_S:
        return {}
    try:
        return {"failed_nodes": ",".join(client.failed_nodes(expand(record["nodes"]), record["began"]))}
    except HpcdistError:
        return {}


def _write(run: RunDir, record: _Record) -> None:
    earlier = {job_id: starts for job_id, starts in record.jobs.items() if job_id != record.job_id}
    value = {"job_id": record.job_id, "starts": record.jobs.get(record.job_id, {}), "earlier": earlier}
    write_json(run.path / "job.json", value | ({"names": record.names} if record.names else {}))


def all_job_starts(run: RunDir) -> list[JobStart]:
    """Return all starts of all jobs of a run, oldest first."""
    found = [
        fill(JobStart, start, run.path / "job.json") for starts in _read(run).jobs.values() for start in starts.values()
    ]
    return sorted(found, key=lambda start: start.began)


def job_starts(run: RunDir) -> list[dict[str, Any]]:
    """Return the records of all starts of the run's current job, oldest first; see `record_job_start`."""
    job = job_of(run)
    starts = _read(run).jobs.get(job.id, {}) if job is not None else {}
    return [starts[number] for number in sorted(starts, key=int)]


def _read(run: RunDir) -> _Record:
    noted = read_json(run.path / "job.json") or {}
    earlier, names, job_id = (noted.get(key) for key in ("earlier", "names", "job_id"))
    jobs = dict(earlier) if isinstance(earlier, dict) else {}
    if isinstance(job_id, str) and job_id:
        jobs[job_id] = noted.get("starts")
    return _Record(
        job_id=job_id if isinstance(job_id, str) else "",
        jobs={
            one: {number: start for number, start in starts.items() if number.isdecimal() and _is_start(start)}
            for one, starts in jobs.items()
            # The id becomes an argument of Slurm's commands.
            if isinstance(starts, dict) and _JOB_ID.fullmatch(one)
        },
        names={one: name for one, name in names.items() if isinstance(name, str)} if isinstance(names, dict) else {},
    )


def _is_start(start: object) -> bool:
    texts = ("nodes", "state", "failed_nodes")
    if not isinstance(start, dict) or not all(isinstance(start.get(key, ""), str) for key in texts):
        return False
    counts = [start.get(key, 0) for key in ("cores", "gpus")]
    times = [start.get("began"), start.get("queue_s", 0.0), *(start.get(key) or 0.0 for key in ("ended", "energy_j"))]
    return all(type(count) is int and 0 <= count <= LARGEST for count in counts) and all(
        type(value) in (int, float) and 0 <= value <= LARGEST for value in times
    )
