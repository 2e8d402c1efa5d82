"""The last steps that an attempt and the attempts before it have done, and the steps that are done again."""

import logging

from hpcdist.errors import RunFolderError
from hpcdist.run.attempt_times import read_times
from hpcdist.run.folder import Attempt

log = logging.getLogger(__name__)


def reached_before(attempt: Attempt) -> int:
    times = read_times(attempt)
    return 0 if times is None else times.reached


def done_step(attempt: Attempt) -> int | None:
    """Return the largest step that a rank of an attempt has done; None if it is unknown.

    A killed rank has no outcome, and its heartbeat may be some seconds older than its end: other ranks know more.
    """
    times = read_times(attempt)
    steps: list[int] = []
    try:
        steps += [step for outcome in attempt.outcomes().values() if type(step := outcome.get("step")) is int]
        if times is None or times.failed or not steps:  # else rank 0 has reported its last step
            num_ranks = min(times.num_ranks if times is not None else 1, 64)  # whose heartbeats show the last step
            beats = (attempt.read_beat(rank) for rank in range(num_ranks))
            steps += [int(beat["step"]) for beat in beats if beat is not None]
    except (RunFolderError, OSError) as error:
        log.warning("the last step of attempt %d may be incomplete: %s", attempt.number, error)
    return max(steps, default=None)


def reached_step(attempt: Attempt) -> int:
    """Return the largest step that an attempt and those before it have done, or 0."""
    return max(reached_before(attempt), done_step(attempt) or 0)


def lost_steps(done: int | None, resumed_at: int) -> int | None:
    """Return how many of the steps that an attempt has done are done again from step `resumed_at`; None if unknown."""
    return None if done is None else max(0, done - resumed_at)
