"""Stop or cancel runs and sweeps: send a request to the supervisor, or take a waiting job out of Slurm's queue."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace
from typing import Literal

from hpcdist.errors import UserMistake
from hpcdist.host.files import read_json, require_mine, write_json
from hpcdist.run.folder import ENDED, RunDir, Status, StopRequest
from hpcdist.run.lease import hold, holder, user_name
from hpcdist.run.records import script_of
from hpcdist.run.status import job_of, query_job, status_from
from hpcdist.run.sweeps import SweepDir
from hpcdist.slurm import client
from hpcdist.slurm.client import JobSnapshot

#: A job that has left the queue has a supervisor after this time, or never.
SUPERVISOR_WITHIN_S = 30.0
POLL_S = 0.5


def end(run: RunDir, action: Literal["stop", "cancel"], *, by: str = "") -> str:
    """Request that a run saves and stops, or ends at once; take a waiting job out of the queue.

    Returns a message for the user. Raises UserMistake if the run is not running, or neither its supervisor nor Slurm
    can be reached.

    Args:
        by: the author of the request, for messages; by default the command of this user.
    """
    request = StopRequest(action=action, cause="user", by=by or _author(action))
    snapshot = query_job(run)
    if snapshot is not None and (holder(run) is None or (snapshot.info is not None and snapshot.info.waiting)):
        if (done := _dequeue(run, request, snapshot)) is not None:
            return done
        # The job has just started, and its supervisor holds the run soon; no event shows that on another host.
        deadline, before = time.monotonic() + SUPERVISOR_WITHIN_S, run.read_state().attempt
        while time.monotonic() < deadline and (holder(run) is None or run.read_state().attempt <= before):
            time.sleep(POLL_S)
    state = run.read_state()
    if holder(run) is None or state.attempt == 0:
        raise UserMistake(
            f"run {run.name} is not running: it has no supervisor, and its last state is {state.status!r}"
        )
    run.send_request(request)
    if action == "cancel":
        return f"{run.name} will end at once"
    if script := script_of(run):
        limit = "and SIGKILL unless it ends within launch.stop_grace_s"
        return f"{run.name}: {script} gets SIGTERM, {limit}; `hpcdist status {run.name}` shows what it has saved"
    return f"{run.name} will save and stop; `hpcdist status {run.name}` shows its progress"


def end_sweep(sweep: SweepDir, action: Literal["stop", "cancel"]) -> list[str]:
    """Stop or cancel all cells of a sweep, and start no more. Returns a message for each cell that had not ended."""
    active = holder(sweep) is not None
    if active:
        # Before the request to the running cell: its end would start the next one.
        write_json(sweep.request, asdict(StopRequest(action=action, cause="user", by=_author(action))))
    messages = []
    for cell in sweep.cells():
        if not os.path.lexists(cell.path / "state.json"):
            continue
        try:
            if cell.read_state().status in ENDED:
                continue
            if holder(cell) is None and not cell.slurm.exists():
                messages += [f"{cell.name} will not be started"] * active
                continue
            require_mine(cell.path, action)
            messages.append(end(cell, action))
        except UserMistake as mistake:
            messages.append(str(mistake))
    if not messages:
        raise UserMistake(f"no cell of sweep {sweep.name} runs or waits ({sweep.read_state().reason})")
    return messages


def _author(action: str) -> str:
    return f"`hpcdist {action}` by {user_name()}"


def _dequeue(run: RunDir, request: StopRequest, snapshot: JobSnapshot) -> str | None:
    """Take a waiting job out of the queue; None if the job runs, or starts during this call."""
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
    ended: Status = "stopped" if request.action == "stop" else "cancelled"
    reason = f"taken out of the queue ({request.sentence})"
    # The lease of a dead job is void.
    with hold(run, job_id=(read_json(run.lease) or {}).get("job_id")):
        run.write_state(replace(run.read_state(), status=ended, reason=reason, ended=time.time()))
    return f"job {job.id} of {run.name} was taken out of the queue; `hpcdist resume {run.name}` submits it again"
