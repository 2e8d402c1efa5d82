"""Ending steps of this job that an earlier supervisor or attempt has left running.

Slurm 22.05 loses track of a step when a node reboots before Slurm notices its failure, or when a slurmstepd is killed:
the step keeps its processors, and neither `scancel` nor a time limit ends it, only the end of the job or its requeue
(seen on the dev cluster). A new step that needs the same processors then waits forever. Ranks continue after the end of
their slurmstepd, even after the end of the job, because Slurm cannot signal them any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from hpcdist.slurm import client
from hpcdist.slurm.current_job import running_steps, signal_steps

#: A step ends within this time after its tasks are killed.
END_S = 10.0
#: Processes that wait for a device or a file system take longer. Slurm's UnkillableStepTimeout is 60 s as well.
UNKILLABLE_S = 60.0
_POLL_EVERY_S = 0.2
_KILL_EVERY_S = 2.0


class UnkillableSteps(NamedTuple):
    """Steps that do not end."""

    reason: str  #: the first of them, and why it does not end
    nodes: tuple[str, ...] = ()  #: nodes on which ranks may have survived SIGKILL


def end_orphaned_steps(
    names: tuple[str, ...], kill_ranks: Callable[[], Sequence[str]], abandoned: Collection[str] = ()
) -> UnkillableSteps | None:
    """End the job's steps with names that begin with one of `names`; return the steps that do not end, or None.

    Args:
        kill_ranks: kills the run's ranks on every node without Slurm, and returns the nodes on which ranks may have
            survived. It is called if steps do not end in time.
        abandoned: names of steps that cannot end and do not matter.

    Raises SlurmError if the controller does not answer for JOB_RETRY_S seconds.
    """
    steps = _end(names, END_S, abandoned)
    if not steps:
        return None
    nodes = tuple(kill_ranks())
    if nodes:
        steps = _end(names, UNKILLABLE_S, abandoned)
        nodes = tuple(kill_ranks()) if steps else ()
    if not steps:
        return None
    step_id, name = next(iter(steps.items()))
    why = f"ranks on {', '.join(nodes)} may survive SIGKILL" if nodes else "although none of its ranks is left"
    return UnkillableSteps(f"step {step_id} ({name}) does not end{':' if nodes else ','} {why}", nodes)


def _end(names: tuple[str, ...], limit_s: float, abandoned: Collection[str]) -> dict[str, str]:
    """Kill steps until none is left or the time is over; returns the steps that are left, names by id."""
    until = time.monotonic() + limit_s
    kill_at = 0.0
    while True:
        running = running_steps(retry_s=client.JOB_RETRY_S)
        steps = {step: name for step, name in running.items() if name.startswith(names) and name not in abandoned}
        now = time.monotonic()
        if not steps or now > until:
            return steps
        if now >= kill_at:
            signal_steps(sorted(steps), "KILL")
            kill_at = now + _KILL_EVERY_S
        time.sleep(_POLL_EVERY_S)  # Slurm has no notification for the end of a step
