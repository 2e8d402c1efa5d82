"""What becomes of a run after an attempt: each row has the facts of the attempt, and the ending."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hpcdist.run.folder import StopCause
from hpcdist.supervisor.ending import MAX_REQUEUES, EndedAttempt, NodeFindings, Outcome, decide
from hpcdist.supervisor.restart_policy import Failure, Kind


def failure(kind: Kind = "error", error: str = "ValueError: nan", step: int | None = 7) -> Failure:
    return Failure(kind=kind, rank=1, host="n1", step=step, error=error)


FAILED = "rank 1 on n1 failed with ValueError: nan after step 7"
OTHER = failure(error="OSError: disk", step=3)
UNFIT = Failure(kind="unfit", rank=0, host="", step=None, error="preflight: n3: disk: full")
REJECTED = failure("rejected", "no GPU", None)
LOST_CHILD = failure("child_killed", "ended with exit status 0, but the kernel killed a child process of rank 1 on n1")
INTERRUPTED = failure("interrupted", "pyxis could not start the container")
SAVED = "everything saved"
#: An exception of the user's code.
RAISED = replace(failure(), traceback=("Traceback", "nan"))
FAULT = replace(RAISED, is_fault=True)
NONE_SAVED: dict[str, Any] = {"nothing_saved": "there is no checkpoint", "may_be_node": False}

#: Restarts of a job, by Slurm or by its supervisor.
FIRST, LAST = 0, MAX_REQUEUES
LIMIT = "; the job has been restarted 50 times: hpcdist does not requeue it again"
ASKED = ", while it was asked to stop"
FIT, LOST, OTHERS = NodeFindings(), NodeFindings(broken="lost n2"), NodeFindings(moved="n3 replaces n2")
FULL: dict[str, Any] = {"full_disk": "/runs/first"}


def is_not_asked(*_: object) -> Any:
    raise AssertionError("the answer does not matter")


def facts(
    outcome: Outcome,
    cause: StopCause | None = None,
    *,
    causes: Callable[[], StopCause | None] | None = None,
    job: int | None = None,
    requeued: bool | None = None,
    nodes: NodeFindings | None = None,
    earlier: tuple[Failure, ...] = (),
    moved: bool = False,
    failed_before: str = "",
    max_restarts: int = 9,
    nothing_saved: str | None = None,
    may_be_node: bool | None = None,
    full_disk: str = "",
    refit: str = "",
) -> EndedAttempt:
    """Return facts; an answer that the test does not give must not be asked for."""
    return EndedAttempt(
        outcome=outcome,
        reason=outcome.sentence() if isinstance(outcome, Failure) else SAVED,
        stop_cause=causes or (lambda: cause),
        earlier_failures=earlier,
        failure_before=earlier[-1] if earlier and not moved else None,
        failed_before=failed_before,
        max_restarts=max_restarts,
        check_nodes=is_not_asked if nodes is None else lambda _: nodes,
        nothing_saved=is_not_asked if nothing_saved is None else lambda: nothing_saved,
        may_be_node=is_not_asked if may_be_node is None else lambda: may_be_node,
        refit=lambda _: refit,
        full_disk=full_disk,
        job_restarts=job,
        is_requeued=is_not_asked if requeued is None else lambda: requeued,
    )


@pytest.mark.parametrize(
    ("found", "kind", "more"),
    [
        # A finished or cancelled run has ended, also if its job ends or is to stop.
        (facts("finished"), "finished", ""),
        (facts("finished", "preemption", job=FIRST), "finished", ""),
        (facts("finished", "user"), "finished", ""),
        (facts("finished", "growth", job=FIRST), "finished", ""),
        (facts("cancelled", "user", job=FIRST), "cancelled", ""),
        # Stopped on this machine, by a request or by a signal to the ranks.
        (facts("stopped", "user"), "stopped", ""),
        (facts("stopped", "signal"), "stopped", ""),
        (facts("stopped"), "stopped", ""),
        # Stopped in a job by a user.
        (facts("stopped", "user", job=FIRST), "stopped", ""),
        (facts("stopped", "signal", job=FIRST), "stopped", ""),
        # Stopped because it did nothing: another start of the job would do so, too.
        (facts("stopped", "idle", job=FIRST), "stopped", ""),
        # Stopped because Slurm ends the job: it requeues it, or has cancelled it.
        (facts("stopped", "preemption", job=FIRST, requeued=True), "requeued", ""),
        (facts("stopped", "preemption", job=LAST, requeued=True), "requeued", ""),
        (facts("stopped", "preemption", job=FIRST, requeued=False), "stopped", ""),
        # Stopped ahead of the time limit, or in the grace time of a preemption, when Slurm shows the job as running.
        (facts("stopped", "time_limit", job=FIRST), "requeue", ""),
        (facts("stopped", job=FIRST), "requeue", ""),
        (facts("stopped", "time_limit", job=LAST - 1), "requeue", ""),
        (facts("stopped", "time_limit", job=LAST), "failed", LIMIT),
        # Stopped to use more nodes.
        (facts("stopped", "growth", job=LAST), "grow", ""),
    ],
)
def test_ending_after_an_attempt_without_a_failure(found: EndedAttempt, kind: str, more: str) -> None:
    ending = decide(found)
    assert (ending.kind, ending.reason) == (kind, SAVED + more)


@pytest.mark.parametrize(
    ("found", "kind", "reason"),
    [
        (facts(failure(), nodes=FIT, max_restarts=1), "restart", FAILED),
        (facts(failure(), "growth", nodes=FIT, job=FIRST), "restart", FAILED),
        # launch.max_restarts
        (facts(failure(), nodes=FIT, max_restarts=0), "failed", FAILED),
        (facts(failure(), nodes=FIT, earlier=(OTHER,), max_restarts=1), "failed",
         f"{FAILED}; all launch.max_restarts=1 restarts are used up"),
        # The same failure at the same step, twice in a row.
        (facts(failure(), nodes=FIT, earlier=(failure(),)), "failed",
         f"{FAILED}, twice in a row: another restart would not help"),
        (facts(failure(), nodes=FIT, earlier=(failure(step=6),)), "restart", FAILED),
        (facts(failure(), nodes=FIT, earlier=(failure(), OTHER)), "restart", FAILED),
        (facts(failure(), nodes=FIT, earlier=(failure(),), moved=True), "restart", FAILED),
        # An exception of the code: a restart continues from what is saved, and does not repeat everything.
        (facts(RAISED, nodes=FIT, nothing_saved=""), "restart", FAILED),
        (facts(RAISED, nodes=FIT, **NONE_SAVED), "failed",
         f"{FAILED}; no restart from the beginning, since there is no checkpoint"),
        (facts(RAISED, nodes=FIT, job=FIRST, **NONE_SAVED, earlier=(OTHER,)), "failed",
         f"{FAILED}; no restart from the beginning, since there is no checkpoint"),
        (facts(RAISED, nodes=FIT, job=FIRST, nothing_saved="no", may_be_node=True), "restart", FAILED),
        (facts(RAISED, nodes=LOST, job=FIRST), "requeue", f"{FAILED}; lost n2"),
        (facts(FAULT, nodes=FIT), "restart", FAILED),
        (facts(failure("killed"), nodes=FIT), "restart", failure("killed").sentence()),
        (facts(failure("hung"), nodes=FIT), "restart", failure("hung").sentence()),
        # A user error.
        (facts(REJECTED, job=FIRST), "failed", "rank 1 on n1 failed with no GPU"),
        # Nodes that failed the preflight check.
        (facts(UNFIT, nodes=FIT, job=FIRST), "failed", UNFIT.error),
        (facts(UNFIT, nodes=NodeFindings(broken="n3 avoided from now on"), job=FIRST), "requeue",
         f"{UNFIT.error}; n3 avoided from now on"),
        # A lack of GPU memory, which no number of restarts with the same micro-batches mends.
        (facts(failure(), nodes=FIT, earlier=(failure(),), max_restarts=0, refit="8 micro-batches"), "refit",
         f"{FAILED}; 8 micro-batches"),
        (facts(failure(), "user", refit="8 micro-batches"), "failed", FAILED + ASKED),
        # A child process that the kernel has killed, while the ranks succeeded.
        (facts(LOST_CHILD, nodes=FIT, job=FIRST), "failed", LOST_CHILD.sentence()),
        # Lost or broken nodes.
        (facts(failure(), nodes=OTHERS, job=FIRST, earlier=(failure(),), max_restarts=0), "move", OTHERS.moved),
        (facts(failure(), nodes=LOST, job=FIRST, earlier=(failure(),), max_restarts=0), "requeue",
         f"{FAILED}; lost n2"),
        (facts(failure(), nodes=LOST, job=LAST), "failed", f"{FAILED}; lost n2{LIMIT}"),
        # The same nodes at the same step, before and after a requeue.
        (facts(failure(), nodes=LOST, job=FIRST, failed_before=f"{FAILED}; lost n2"), "failed",
         f"{FAILED}; lost n2, twice in a row: another start would not help"),
        (facts(failure(), nodes=LOST, job=FIRST, failed_before=f"{FAILED}; lost n3"), "requeue", f"{FAILED}; lost n2"),
        # A full disk.
        (facts(failure(), job=FIRST, **FULL), "failed", f"{FAILED}; no restart, since the disk of /runs/first is full"),
        (facts(failure(), earlier=(failure(),), **FULL), "failed",
         f"{FAILED}, twice in a row: another restart would not help"),
        (facts(failure(), max_restarts=0, **FULL), "failed", FAILED),
        (facts(UNFIT, **FULL), "failed", UNFIT.error),
        # While the ranks were to stop.
        (facts(failure(), "user"), "failed", FAILED + ASKED),
        (facts(failure(), "signal", job=FIRST, **FULL), "failed", FAILED + ASKED),
        (facts(failure(), "time_limit", job=FIRST), "failed", FAILED + ASKED),
        (facts(failure("hung"), "idle", job=FIRST), "failed", failure("hung").sentence() + ASKED),
        (facts(REJECTED, "user"), "failed", REJECTED.sentence() + ASKED),
        (facts(INTERRUPTED, "time_limit", job=FIRST), "failed", INTERRUPTED.sentence() + ASKED),
        # Slurm ends the job; ranks without time to save continue from the checkpoint before.
        (facts(failure(), "preemption", job=LAST, requeued=True), "requeued", FAILED + ASKED),
        (facts(failure(), "preemption", job=FIRST, requeued=False), "failed", FAILED + ASKED),
        # Slurm's signal ahead of the time limit has ended the start of a container.
        (facts(INTERRUPTED, job=FIRST, max_restarts=0, **FULL), "requeue",
         f"{INTERRUPTED.sentence()}; Slurm signals the time limit, so no restart here"),
        (facts(INTERRUPTED, job=LAST), "failed",
         f"{INTERRUPTED.sentence()}; Slurm signals the time limit, so no restart here{LIMIT}"),
    ],
)  # fmt: skip
def test_ending_after_a_failure(found: EndedAttempt, kind: str, reason: str) -> None:
    ending = decide(found)
    assert (ending.kind, ending.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("late", "nodes", "kind"),
    [
        ("user", LOST, "stopped"),
        ("preemption", LOST, "stopped"),
        ("time_limit", LOST, "requeue"),
        # The next attempt receives the request.
        ("user", FIT, "restart"),
        ("user", OTHERS, "move"),
    ],
)
def test_job_of_a_run_stopped_while_nodes_are_checked(late: StopCause, nodes: NodeFindings, kind: str) -> None:
    """It is not requeued."""
    requests: list[StopCause] = []

    def check_nodes(_: Failure) -> NodeFindings:
        requests.append(late)
        return nodes

    found = facts(failure(), causes=lambda: requests[-1] if requests else None, job=FIRST)
    assert decide(replace(found, check_nodes=check_nodes)).kind == kind
