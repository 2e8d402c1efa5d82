"""Steps that hpcdist has started in this job and that have not ended: they are ended before ranks are started.

Slurm 22.05 loses track of a step when a node reboots before it is missed, or when a slurmstepd is killed: the step
keeps its processors, and neither `scancel` nor time ends it, only the end of the job's life (seen on the dev cluster).
A step that needs the same processors then waits for ever. Ranks that lose their slurmstepd go on, even beyond the end
of the job: Slurm has nobody left to signal them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpcdist.errors import HpcdistError
from hpcdist.slurm.current_job import signal_steps, steps

#: A step whose tasks are killed ends within this time.
END_S = 10.0
#: Processes that wait for a device or a file system take longer; Slurm gives them 60 s as well (UnkillableStepTimeout).
UNKILLABLE_S = 60.0
#: How long Slurm's controller may be away before the job gives up on it.
CONTROLLER_S = 300.0
_LOOK_EVERY_S = 0.2
_KILL_EVERY_S = 2.0


class Left(NamedTuple):
    """Steps that do not end."""

    text: str  #: which ones, and what is known of them
    nodes: tuple[str, ...] = ()  #: where ranks may survive SIGKILL


def steps_now() -> dict[str, str]:
    """The job's steps that have not ended, names by id, as soon as Slurm's controller answers.

    Raises HpcdistError when it is away for too long.
    """
    until = time.monotonic() + CONTROLLER_S
    while (found := steps()) is None:
        if time.monotonic() > until:
            raise HpcdistError(f"Slurm does not answer `squeue --steps` for {CONTROLLER_S:g} s")
        time.sleep(_LOOK_EVERY_S)
    return found


def end_left_steps(names: tuple[str, ...], kill_ranks: Callable[[], Sequence[str]]) -> Left | None:
    """End the job's steps whose names begin with one of `names`; returns those that do not end, or None.

    Args:
        kill_ranks: kills ranks of the run on every node, whoever their parent is, and names the nodes on which some
            may live on. Called when steps have not ended in time.

    Raises HpcdistError when Slurm's controller is away for too long.
    """
    old = _end(names, END_S)
    if not old:
        return None
    nodes = tuple(kill_ranks())
    if nodes:
        old = _end(names, UNKILLABLE_S)
        nodes = tuple(kill_ranks()) if old else ()
    if not old:
        return None
    first = next(f"step {step} ({name}) does not end" for step, name in old.items())
    why = f": ranks on {', '.join(nodes)} may survive SIGKILL" if nodes else ", although none of its ranks is left"
    return Left(first + why, nodes)


def _end(names: tuple[str, ...], limit_s: float) -> dict[str, str]:
    """Kill steps until none is left or the time is over; returns those that are left, names by id."""
    until = time.monotonic() + limit_s
    again_at = 0.0
    while old := {step: name for step, name in steps_now().items() if name.startswith(names)}:
        now = time.monotonic()
        if now > until:
            break
        if now >= again_at:
            signal_steps(sorted(old), "KILL")
            again_at = now + _KILL_EVERY_S
        time.sleep(_LOOK_EVERY_S)  # Slurm tells nobody when a step has ended
    return old
