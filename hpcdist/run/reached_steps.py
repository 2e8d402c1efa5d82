"""The last step of an attempt and of the attempts before it, and the number of steps that a resume repeats."""

import logging

from hpcdist.errors import RunFolderError
from hpcdist.run.attempt_times import read_times
from hpcdist.run.folder import Attempt

log = logging.getLogger(__name__)
#: Limit of the heartbeats that `done_step` reads: ranks differ by a few steps at most.
_MAX_BEATS = 64


def reached_before(attempt: Attempt) -> int:
    """Return the last step of the attempts before an attempt, or 0."""
    times = read_times(attempt)
    if times is None:
        return 0
    return times.reached


def done_step(attempt: Attempt) -> int | None:
    """Return the largest step that a rank of an attempt has done; None if it is unknown.

    A killed rank has no outcome, and its heartbeat may be some seconds older than its end. The files of other ranks may
    therefore show a later step.
    """
    times = read_times(attempt)
    steps: list[int] = []
    try:
        for outcome in attempt.outcomes().values():
            step = outcome.get("step")
            if type(step) is int:
                steps.append(step)
        if times is None or times.failed or not steps:  # else rank 0 has reported its last step
            num_ranks = 1
            if times is not None:
                num_ranks = min(times.num_ranks, _MAX_BEATS)
            for rank in range(num_ranks):
                beat = attempt.read_beat(rank)
                if beat is not None:
                    steps.append(int(beat["step"]))
    except (RunFolderError, OSError) as error:
        log.warning("the last step of attempt %d may be incomplete: %s", attempt.number, error)
    return max(steps, default=None)


def reached_step(attempt: Attempt) -> int:
    """Return the largest step that an attempt and those before it have done, or 0."""
    return max(reached_before(attempt), done_step(attempt) or 0)


def lost_steps(done: int | None, resumed_at: int) -> int | None:
    """Return the number of steps that are repeated after a resume at step `resumed_at`; None if it is unknown.

    Args:
        done: the last step of the attempt before, as `done_step` returns it.
    """
    if done is None:
        return None
    return max(0, done - resumed_at)
