"""The attempts of a run as its reviewers see them: start, end, nodes, cause of the end, and lost steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpcdist.errors import RunFolderError
from hpcdist.files.atomic import read_json
from hpcdist.review.checkpoints import CheckpointFacts
from hpcdist.run.attempt import Attempt, Request
from hpcdist.run.attempt_times import AttemptTimes, end_of, read_times
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.slurm_job import JobStart, all_job_starts
from hpcdist.run.training_record import read_training

#: Cause of an attempt whose end nobody recorded.
UNRECORDED = "the supervisor was killed, or its node failed: no end was recorded"
#: States of Slurm's accounting that explain the end of the last attempt of a start of the job.
_CAUSES = {
    "PREEMPTED": "preempted by a job of higher priority",
    "TIMEOUT": "the job reached its time limit (Slurm: TIMEOUT)",
    "OUT_OF_MEMORY": "the job used more memory than it requested (Slurm: OUT_OF_MEMORY)",
}


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """One start of all ranks. Times are seconds since the epoch."""

    number: int
    started: float
    ended: float | None  #: None while the attempt is live; the last sign of life if no end was recorded
    status: str  #: `running`, `finished`, `stopped`, `cancelled` or `failed`
    cause: str  #: one sentence: why the attempt ended; empty while it is live
    nodes: tuple[str, ...] = ()
    num_ranks: int = 0
    time_limit: float | None = None  #: end of the allocation; None without a time limit
    training_began: float | None = None
    first_step: int | None = None  #: steps done when the attempt began; None if it did not begin to train
    last_step: int | None = None  #: None if it did not begin to train, or is a script that reports no steps
    steps_lost: int | None = None  #: steps of this attempt that were, or have to be, done again; None if unknown

    @property
    def logs(self) -> str:
        """Path of the logs among the artifacts of the MLflow run."""
        return f"logs/attempt-{self.number:03d}"


def read_attempts(run: RunDir, state: State, checkpoints: Sequence[CheckpointFacts]) -> tuple[AttemptFacts, ...]:
    """Return the attempts of a run, the first one first."""
    found: list[AttemptFacts] = []
    resumed: int | None = checkpoints[-1].step if checkpoints else 0
    ends = ends_by_slurm(run)
    for attempt in reversed(run.attempts()):
        facts = _read(attempt, state, resumed_at=resumed, by_slurm=_cause(ends.get(attempt.number)))
        if facts.first_step is not None:
            resumed = facts.first_step
        elif facts.last_step:  # of an older version, which did not record the first step
            resumed = None
        found.append(facts)
    return tuple(reversed(found))


def _cause(start: JobStart | None) -> str:
    """Return why Slurm ended a start of the job; empty if it did not, or for a reason that the attempt records."""
    if start is None or start.state != "NODE_FAIL":
        return _CAUSES.get(start.state, "") if start is not None else ""
    nodes = start.failed_nodes.split(",") if start.failed_nodes else []
    return f"{_failed(nodes)} (Slurm: NODE_FAIL)"


def _failed(nodes: Sequence[str]) -> str:
    """Return `node n2 failed` for the names of some nodes."""
    return f"node{'s' * (len(nodes) > 1)} {', '.join(nodes)} failed" if nodes else "a node failed"


def interruptions(attempts: Sequence[AttemptFacts], max_chars: int) -> str:
    """Return the causes of the attempts that did not finish, such as `1: rank 3 on n2 was killed; 2: preempted`.

    Attempts in the middle are left out of a text of more than `max_chars` characters.
    """
    texts = [f"{one.number}: {one.cause}" for one in attempts if one.cause and one.status != "finished"]
    num_chars, num_left_out = sum(len(text) + 2 for text in texts), 0
    while num_chars > max_chars - 20 and len(texts) > 2:
        num_chars -= len(texts.pop(len(texts) // 2)) + 2
        num_left_out += 1
    if num_left_out:
        texts.insert((len(texts) + 1) // 2, f"{num_left_out} more")
    return "; ".join(texts)[:max_chars]


def ends_by_slurm(run: RunDir) -> dict[int, JobStart]:
    """Return the starts of the job that Slurm has ended, by the number of the last attempt of each.

    An attempt that finished has none.
    """
    try:
        starts = all_job_starts(run)
    except (RunFolderError, OSError):
        return {}
    known = [(attempt.number, times) for attempt in run.attempts() if (times := _times(attempt)) is not None]
    last = {}
    for number, times in known:
        # The newest one: a start may begin in the second in which the one before ends.
        start = next((start for start in reversed(starts) if start.contains(times.supervised)), None)
        if start is not None:
            last[start] = number
    finished = {number for number, times in known if times.status == "finished"}
    return {number: start for start, number in last.items() if start.state and number not in finished}


def _read(attempt: Attempt, state: State, *, resumed_at: int | None, by_slurm: str) -> AttemptFacts:
    beat, training, times = newest_beat(attempt), read_training(attempt), _times(attempt)
    started = times.began if times is not None else _started(attempt, beat)
    status, cause, ended = (times.status, times.reason, times.ended) if times is not None else ("", "", None)
    request = _request(attempt) if status in ("stopped", "cancelled") else None
    # The state in Slurm's accounting says more than that Slurm ended the job.
    if request is not None and request.ends_run and not (by_slurm and request.cause == "preemption"):
        cause = request.after(cause)
    is_last = attempt.number >= state.attempt
    if not status and is_last and state.status in ENDED:
        status, cause, ended = state.status, state.reason, ended or state.ended
    elif not status and is_last and state.status == "running":
        status = "running"
    elif not status:
        status, cause, ended = "failed", "", _last_sign(attempt, times, beat, started)
    if by_slurm and status not in ("running", "finished"):
        cause = f"{by_slurm}: {cause}" if cause else by_slurm
    last_step = _last_step(attempt, beat)
    is_script = times is not None and not times.measured
    if is_script and training is None:
        last_step = None  # it has only logged values without a step
    if is_script and is_last:
        resumed_at = None  # only its next start shows where it continues
    steps_lost = None
    if status == "finished" and last_step is not None:
        steps_lost = 0
    elif status != "running" and last_step is not None and resumed_at is not None:
        steps_lost = max(0, last_step - resumed_at)
    return AttemptFacts(
        number=attempt.number,
        started=started,
        ended=ended,
        status=status,
        cause=cause or UNRECORDED * (status == "failed"),
        nodes=tuple(node for node in times.nodes if node not in times.idle)
        if times is not None
        else _hosts(attempt, beat),
        num_ranks=(times.num_ranks if times is not None else 0) or state.world_size,
        time_limit=times.time_limit if times is not None else None,
        training_began=training.began if training else None,
        first_step=training.first_step if training and training.began else None,
        last_step=last_step,
        steps_lost=steps_lost,
    )


def _times(attempt: Attempt) -> AttemptTimes | None:
    try:
        return read_times(attempt)
    except (RunFolderError, OSError):
        return None


def _request(attempt: Attempt) -> Request | None:
    try:
        return attempt.read_request()
    except (RunFolderError, OSError):
        return None


def _started(attempt: Attempt, beat: Mapping[str, Any] | None) -> float:
    """Return about when an attempt started whose times are not recorded."""
    changed = (attempt.key if attempt.key.is_file() else attempt.path).stat().st_mtime
    return min(changed, float(beat["time"])) if beat is not None else changed


def _hosts(attempt: Attempt, beat: Mapping[str, Any] | None) -> tuple[str, ...]:
    found = [one.get("host") for one in (beat or {}, *_outcomes(attempt))]
    return tuple(dict.fromkeys(host for host in found if isinstance(host, str)))


def _last_sign(attempt: Attempt, times: AttemptTimes | None, beat: Mapping[str, Any] | None, started: float) -> float:
    """Return about when an attempt ended; from the heartbeat of rank 0 alone if those of all ranks are unknown."""
    ended = float(beat["time"]) if beat is not None else started
    with suppress(RunFolderError, OSError):
        ended = end_of(attempt, times) if times is not None else ended
    return max(started, ended)


def _last_step(attempt: Attempt, beat: Mapping[str, Any] | None) -> int | None:
    steps = [one.get("step") for one in (beat or {}, *_outcomes(attempt))]
    return max((step for step in steps if type(step) is int), default=None)


def newest_beat(attempt: Attempt) -> dict[str, Any] | None:
    """Return the last heartbeat of rank 0; None if there is none or it cannot be read."""
    try:
        return attempt.read_beat(0)
    except (RunFolderError, OSError):
        return None


def last_beat(run: RunDir) -> dict[str, Any]:
    """Return rank 0's last heartbeat in the last attempt; empty if there is none or it cannot be read."""
    try:
        attempts = run.attempts()
    except (RunFolderError, OSError):
        return {}
    return (newest_beat(attempts[-1]) or {}) if attempts else {}


def _outcomes(attempt: Attempt) -> list[dict[str, Any]]:
    """Return the outcome file of rank 0; other ranks may stop before the last step."""
    try:
        found = read_json(attempt.outcome(0))
    except (RunFolderError, OSError):
        return []
    return [found] if found is not None else []
