"""How a run stands: what its folder says, weighed against who holds it and what Slurm says of its job."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpcdist.errors import RunFolderError
from hpcdist.files import retry
from hpcdist.files.formats import LARGEST, fill
from hpcdist.run.folder import ENDED, RunDir, State, Status, read_json, read_record, write_json
from hpcdist.run.lease import hold, holder, last_renewal
from hpcdist.slurm import job_snapshot
from hpcdist.slurm.job_info import JobInfo
from hpcdist.slurm.job_snapshot import JobRef, JobSnapshot

#: How a run is counted whose job came to this end without a word of its supervisor; others are failures.
_JOB_ID = re.compile(r"[0-9]{1,20}([_+][0-9]{1,10})?")
_CLOSED_AS: dict[str, Status] = {"CANCELLED": "cancelled", "PREEMPTED": "stopped"}


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One run at one moment."""

    name: str  #: the status as people should read it: `state.json`'s, or `lost`
    state: State
    over: bool  #: nothing more will happen unless someone resumes the run
    reason: str = ""  #: why the run stands so
    facts: JobInfo | None = None  #: of its job, where it has one that Slurm knows
    away: str = ""  #: why Slurm could not be asked

    @property
    def sentence(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


@dataclass(frozen=True, kw_only=True)
class _SavedJob:
    """The content of `slurm.json` once the run was submitted."""

    job_id: str
    job_name: str = ""
    cluster: str = ""


def job_of(run: RunDir) -> JobRef | None:
    """The job that a run was last submitted as; None for a run of this machine."""
    saved = read_record(run.slurm)
    if not saved or not saved.get("job_id"):
        return None
    ref = fill(_SavedJob, saved | {"job_id": str(saved["job_id"])}, run.slurm)
    # Slurm's commands are given this: a name of theirs must not be taken for an option or another job.
    if _JOB_ID.fullmatch(ref.job_id) is None:
        raise RunFolderError(f"{run.slurm} is damaged: {ref.job_id[:40]!r} is no id of a Slurm job")
    return JobRef(id=ref.job_id, name=ref.job_name, cluster=ref.cluster)


def look_now(run: RunDir, *, history: bool = False) -> JobSnapshot | None:
    """One look at a run's job; None for a run of this machine."""
    job = job_of(run)
    return job_snapshot.take_snapshot(job, history=history) if job is not None else None


def stand(run: RunDir, look: JobSnapshot | None) -> Standing:
    """How a run stands, by its folder and a look at its job (None for a run without one).

    The look has to be the older one of the two: a job that ended before its folder was read has written all it had
    to say.
    """
    # Opening a folder makes a network file system ask its server what has changed in it.
    retry.retry(lambda: os.scandir(run.path).close(), run.path)
    facts = look.info if look else None
    # The lease of a supervisor that was killed elsewhere looks alive for a while; Slurm knows better.
    held = holder(run) is not None and not (facts is not None and (facts.waiting or not facts.alive))
    state = run.read_state()
    away = look.error if look else ""

    def so(name: str, reason: str = state.reason, *, over: bool = False) -> Standing:
        return Standing(name=name, state=state, over=over, reason=reason, facts=facts, away=away)

    if state.status in ("finished", "cancelled") or state.rejected:
        return so(state.status, over=True)
    if state.status in ENDED:
        # A supervisor that still holds the run, or a job that still lives, may be about to go on.
        return so(state.status, over=not held and not (facts is not None and facts.alive))
    if held or state.status == "created":
        return so(state.status)
    if look is None:
        return so("lost", over=True) if state.status == "running" else so(state.status)
    if look.is_over:
        return so("lost", dead_reason(run, facts), over=True)
    if facts is not None and facts.waiting:
        return so("queued")
    if state.status == "running" and facts is None and not look.installed:
        return so("lost", over=True)
    return so(state.status)


def note_life(run: RunDir, env: Mapping[str, str]) -> None:
    """Note in the folder, from inside its job, where the job runs now and how long it has waited for it.

    `job.json`: the job's id, and by the number of its restarts `nodes` and `queue_s`.
    """
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    job_id = f"{array}_{task}" if array and task else env["SLURM_JOB_ID"]
    facts = job_snapshot.take_snapshot(JobRef(id=job_id)).info
    if facts is None:
        return
    lives = _lives(run, job_id)
    lives[str(facts.restarts)] = {"nodes": facts.nodes, "queue_s": facts.queue_s(time.time()) or 0.0}
    write_json(run.path / "job.json", {"job_id": job_id, "lives": lives})


def job_lives(run: RunDir) -> list[dict[str, Any]]:
    """What the supervisor noted at each start of the run's present job, oldest first; see `note_life`."""
    job = job_of(run)
    lives = _lives(run, job.id) if job is not None else {}
    return [lives[number] for number in sorted(lives, key=int)]


def _lives(run: RunDir, job_id: str) -> dict[str, dict[str, Any]]:
    """What `job.json` holds of a job, by the number of its restarts; entries that are damaged are left out."""
    noted = read_json(run.path / "job.json") or {}
    lives = noted.get("lives") if noted.get("job_id") == job_id else None
    if not isinstance(lives, dict):
        return {}
    return {number: life for number, life in lives.items() if number.isdecimal() and _is_life(life)}


def _is_life(life: object) -> bool:
    if not isinstance(life, dict) or not isinstance(life.get("nodes", ""), str):
        return False
    waited = life.get("queue_s", 0.0)
    return type(waited) in (int, float) and 0 <= waited <= LARGEST


def dead_reason(run: RunDir, facts: JobInfo | None) -> str:
    """Why a run whose job is over has ended without a word: what Slurm says."""
    if facts is not None:
        return facts.sentence() + (", its supervisor left no word" if facts.state == "COMPLETED" else "")
    job = job_of(run)
    return f"Slurm does not know job {job.id if job else '?'} any more, and its supervisor left no word"


def close_if_dead(run: RunDir) -> str:
    """Write the end of a run into its folder whose supervisor or job died without a word.

    Returns the reason that was written, nothing where the run lives, waits, or has ended by itself. Raises
    RunFolderError when a supervisor takes the run at this moment.
    """
    if run.read_state().status in ENDED:
        return ""  # without asking Slurm: of old runs there are many
    look = look_now(run)
    found = stand(run, look)
    left = read_json(run.lease) or {}
    status: Status = "failed"
    reason, ended = found.reason, None
    if look is None:
        # A run that is created and was never held waits for its start: nobody has died.
        if found.name != "lost" and not (found.name == "created" and left and holder(run) is None):
            return ""
        reason = "its supervisor died"
    elif found.name != "lost" or not look.is_over:
        return ""
    elif found.facts is not None:
        status = _CLOSED_AS.get(found.facts.state, "failed")
        ended = found.facts.ended
    last_sign = last_renewal(run) or time.time()
    # What a dead job has left of its lease binds nobody.
    with hold(run, job_id=left.get("job_id") if look is not None else None):
        run.write_state(replace(found.state, status=status, reason=reason, ended=ended or last_sign))
    return reason
