"""The Slurm job of a run: its id in `slurm.json`, and a record of its starts in `job.json`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcdist.errors import RunFolderError
from hpcdist.files.atomic import read_json, write_json
from hpcdist.files.formats import LARGEST, fill
from hpcdist.run.folder import RunDir, read_record
from hpcdist.slurm import job_snapshot
from hpcdist.slurm.job_snapshot import JobRef

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


def record_job_start(run: RunDir, env: Mapping[str, str]) -> None:
    """Record, from inside a job, its nodes and its queue time in `job.json`.

    The file holds the job's id and, by the job's restart count, `nodes` and `queue_s`.
    """
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    job_id = f"{array}_{task}" if array and task else env["SLURM_JOB_ID"]
    facts = job_snapshot.take_snapshot(JobRef(id=job_id)).info
    if facts is None:
        return
    starts = _starts(run, job_id)
    starts[str(facts.restarts)] = {"nodes": facts.nodes, "queue_s": facts.queue_s(time.time()) or 0.0}
    write_json(run.path / "job.json", {"job_id": job_id, "lives": starts})


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
    if not isinstance(start, dict) or not isinstance(start.get("nodes", ""), str):
        return False
    queue_s = start.get("queue_s", 0.0)
    return type(queue_s) in (int, float) and 0 <= queue_s <= LARGEST
