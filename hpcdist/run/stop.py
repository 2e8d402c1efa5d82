"""Ending a run that someone wants no more, or not now: by a request to its supervisor, or out of Slurm's queue."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Literal

from hpcdist.errors import UserMistake
from hpcdist.files.ownership import require_mine
from hpcdist.run.folder import ENDED, RunDir, Status, read_json, write_json
from hpcdist.run.lease import hold, holder, user_name
from hpcdist.run.status import job_of, look_now, stand
from hpcdist.run.sweep_folder import SweepDir
from hpcdist.slurm import client
from hpcdist.slurm.job_snapshot import JobSnapshot

#: A job that has left the queue has its supervisor at work after this time, or never.
SUPERVISOR_WITHIN_S = 30.0
LOOK_EVERY_S = 0.5


def end(run: RunDir, action: Literal["stop", "cancel"]) -> str:
    """Ask a run to save and stop, or to end at once; one that waits in the queue is taken out of it.

    Returns a sentence for whoever asked. Raises UserMistake when there is nothing to end, or nobody to ask.
    """
    look = look_now(run)
    if look is not None and (holder(run) is None or (look.info is not None and look.info.waiting)):
        if (done := _out_of_queue(run, action, look)) is not None:
            return done
        _wait_for_supervisor(run)
    by = user_name()
    state = run.read_state()
    if holder(run) is None or state.attempt == 0:
        raise UserMistake(f"run {run.name} is not running: nobody holds it, and its last state is {state.status!r}")
    run.ask(action, by=by, reason=f"`hpcdist {action}` by {by}")
    if action == "stop":
        return f"asked {run.name} to save and stop; `hpcdist status {run.name}` shows how far it is"
    return f"asked {run.name} to end at once"


def end_sweep(sweep: SweepDir, action: Literal["stop", "cancel"]) -> list[str]:
    """End all cells of a sweep, and begin no more of them; returns what became of each that had not ended.

    Raises UserMistake when there is nothing to end.
    """
    at_work = holder(sweep) is not None
    if at_work:
        # Before the cell that runs is asked: the next one would begin at its end.
        by = user_name()
        write_json(sweep.request, {"action": action, "by": by, "reason": f"`hpcdist {action}` by {by}"})
    said = []
    for cell in sweep.cells():
        if not os.path.lexists(cell.path / "state.json"):
            continue
        try:
            if cell.read_state().status in ENDED:
                continue
            if holder(cell) is None and not cell.slurm.exists():
                said += [f"{cell.name} will not be started"] * at_work
                continue
            require_mine(cell.path, action)
            said.append(end(cell, action))
        except UserMistake as mistake:
            said.append(str(mistake))
    if not said:
        raise UserMistake(f"nothing of sweep {sweep.name} runs or waits ({sweep.read_state().reason})")
    return said


def _out_of_queue(run: RunDir, action: Literal["stop", "cancel"], look: JobSnapshot) -> str | None:
    """Take a job that waits out of the queue; None where it runs, or has just begun to."""
    job = job_of(run)
    assert job is not None
    now = stand(run, look)
    if now.over:
        raise UserMistake(f"run {run.name} is not running: it is {now.sentence}")
    if look.error:
        raise UserMistake(f"nobody holds run {run.name}, and Slurm cannot be asked about job {job.id}: {look.error}")
    if now.facts is None or not now.facts.waiting:
        return None
    # One that begins to run at this moment is left to its supervisor, which saves.
    client.cancel_job(job.id, pending_only=True)
    after = look_now(run)
    if after is None or not after.is_over:
        return None
    ended: Status = "stopped" if action == "stop" else "cancelled"
    reason = f"{ended} in the queue (`hpcdist {action}` by {user_name()})"
    # What a job that was killed has left of its lease binds nobody.
    with hold(run, job_id=(read_json(run.lease) or {}).get("job_id")):
        run.write_state(replace(run.read_state(), status=ended, reason=reason, ended=time.time()))
    return f"job {job.id} of {run.name} is taken out of the queue; `hpcdist resume {run.name}` puts it back"


def _wait_for_supervisor(run: RunDir) -> None:
    """Return when the supervisor of a job that has just started is at work, or will not be."""
    deadline = time.monotonic() + SUPERVISOR_WITHIN_S
    before = run.read_state().attempt
    while time.monotonic() < deadline:
        if holder(run) is not None and run.read_state().attempt > before:
            return
        time.sleep(LOOK_EVERY_S)  # nothing tells when a process on another host begins
