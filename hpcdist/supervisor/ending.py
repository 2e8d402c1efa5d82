"""The decision about a run when an attempt has ended: one value, returned by one function.

`Supervisor` collects the facts, asks `decide`, and carries out the ending.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hpcdist.run.folder import Status, StopCause
from hpcdist.supervisor.restart_policy import Failure

#: Restarts of a job, preemptions included, after which it is not requeued any more: a run that makes no progress would
#: otherwise use the cluster forever.
MAX_REQUEUES = 50
#: Causes of a stop request after which a run continues in its job. None means that there is no request: Slurm's signal
#: ahead of the time limit reached the ranks before the supervisor's request, a node failed, or Slurm preempts the job
#: (in the grace time of a preemption it shows the job as running).
_CONTINUED: tuple[StopCause | None, ...] = (None, "growth", "time_limit")

#: How the ranks of an attempt ended.
Outcome = Literal["finished", "stopped", "cancelled"] | Failure
#: The decision about a run; see `Ending`.
EndingKind = Literal[
    "finished", "stopped", "failed", "cancelled", "requeue", "requeued", "restart", "move", "grow", "refit"
]
#: Status of the run after an ending without a restart by this supervisor.
STATUS_AFTER: dict[EndingKind, Status] = {
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
    "cancelled": "cancelled",
    "requeue": "queued",
    "requeued": "queued",
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The decision about a run after an attempt.

    finished, stopped, failed, cancelled: the run ends with this status.
    requeue: the supervisor requeues the job, and its next start continues the run.
    requeued: Slurm has requeued the job already.
    restart: the ranks are restarted on the same nodes.
    move: the ranks are restarted on other nodes, which have been chosen.
    grow: the ranks are restarted on more nodes.
    refit: the ranks are restarted with smaller micro-batches.
    """

    kind: EndingKind
    reason: str  #: one sentence


class NodeFindings(NamedTuple):
    """The nodes after a failure. If both texts are empty, the ranks can be restarted on the same nodes."""

    moved: str = ""  #: which nodes the next attempt uses instead
    broken: str = ""  #: why no attempt can be started on the nodes of this job


@dataclass(frozen=True, kw_only=True)
class EndedAttempt:
    """The facts about an ended attempt on which the decision depends.

    Some facts are functions, because they query Slurm or the nodes, or read a file that may change meanwhile. `decide`
    calls only those that it needs.
    """

    outcome: Outcome
    reason: str  #: one sentence: how and why the attempt ended
    stop_cause: Callable[[], StopCause | None]  #: of the request to stop the ranks, if any
    earlier_failures: Sequence[Failure]  #: those after which the ranks were restarted on the same nodes
    failure_before: Failure | None  #: of the attempt directly before, if the ranks were restarted on the same nodes
    failed_before: str  #: the reason with which the attempt before failed, perhaps in an earlier start of the job
    max_restarts: int
    check_nodes: Callable[[Failure], NodeFindings]
    nothing_saved: Callable[[], str]  #: why a restart would begin at zero; empty if something is saved
    may_be_node: Callable[[], bool]  #: whether the node of the failure may be its cause, and a restart costs little
    refit: Callable[[Failure], str]  #: chooses smaller micro-batches; which ones, or "" if that is not the remedy
    full_disk: str  #: path of the run folder, if its disk has no space for a restart
    job_restarts: int | None  #: how often Slurm has restarted the job; None without a job
    is_requeued: Callable[[], bool]  #: whether Slurm has requeued the job since this start of it


def decide(facts: EndedAttempt) -> Ending:
    """Return the decision about the run."""
    outcome = facts.outcome
    reason = facts.reason
    cause = facts.stop_cause()
    if outcome == "finished" or outcome == "cancelled":
        return Ending(kind=outcome, reason=reason)

    is_asked = cause is not None and cause != "growth"
    if is_asked and outcome != "stopped":
        reason = f"{reason}, while it was asked to stop"
    if cause == "preemption" and facts.is_requeued():
        # Ranks without time to save continue from the newest checkpoint.
        return Ending(kind="requeued", reason=reason)

    if outcome == "stopped":
        if cause == "growth":
            return Ending(kind="grow", reason=reason)
        return _continue_in_job(facts, reason)

    if is_asked or outcome.kind == "rejected":
        return Ending(kind="failed", reason=reason)
    if outcome.kind == "interrupted":
        return _continue_in_job(facts, f"{reason}; Slurm signals the time limit, so no restart here")

    if not facts.full_disk:
        nodes = facts.check_nodes(outcome)
        if nodes.moved:
            return Ending(kind="move", reason=nodes.moved)
        if nodes.broken:
            reason = f"{reason}; {nodes.broken}"
            # The same nodes at the same step: a requeue has not helped, and would be repeated MAX_REQUEUES times.
            if reason == facts.failed_before:
                return Ending(kind="failed", reason=f"{reason}, twice in a row: another start would not help")
            return _continue_in_job(facts, reason)

    # After `child_killed`, the ranks have done all that they do: with the same memory, another start would do the same.
    if outcome.kind in ("unfit", "child_killed"):
        return Ending(kind="failed", reason=reason)
    if not facts.full_disk:
        refit = facts.refit(outcome)
        if refit:
            return Ending(kind="refit", reason=f"{reason}; {refit}")
    if facts.failure_before is not None and outcome.same_as(facts.failure_before):
        return Ending(kind="failed", reason=f"{reason}, twice in a row: another restart would not help")
    if len(facts.earlier_failures) >= facts.max_restarts:
        if facts.max_restarts > 0:
            reason = f"{reason}; all launch.max_restarts={facts.max_restarts} restarts are used up"
        return Ending(kind="failed", reason=reason)
    if outcome.is_of_code:
        nothing_saved = facts.nothing_saved()
        if nothing_saved and not facts.may_be_node():
            # The code would probably fail again, after as many hours.
            return Ending(kind="failed", reason=f"{reason}; no restart from the beginning, since {nothing_saved}")
    if facts.full_disk:
        return Ending(kind="failed", reason=f"{reason}; no restart, since the disk of {facts.full_disk} is full")
    return Ending(kind="restart", reason=reason)


def _continue_in_job(facts: EndedAttempt, reason: str) -> Ending:
    """Return the ending of a run that can continue only in a new start of its job."""
    # The cause is asked again: a request to stop the run may have arrived while the nodes were checked.
    if facts.job_restarts is None or facts.stop_cause() not in _CONTINUED:
        return Ending(kind="stopped", reason=reason)
    if facts.job_restarts >= MAX_REQUEUES:
        limit = f"the job has been restarted {MAX_REQUEUES} times: hpcdist does not requeue it again"
        return Ending(kind="failed", reason=f"{reason}; {limit}")
    return Ending(kind="requeue", reason=reason)


def continues_after_requeue(status: Status, cause: StopCause | None) -> bool:
    """Return whether a restarted job continues a run with a recorded end.

    Slurm may have restarted the job although `decide` got no answer from Slurm, or after the supervisor was killed
    between the record of the end and the end of the job. So an end is final only if the run finished, was cancelled, or
    was stopped by a user's request.

    Args:
        status: the recorded status of the run.
        cause: of the request in the folder of its last attempt, if any.
    """
    return status in ("stopped", "failed") and (cause in _CONTINUED or cause == "preemption")
