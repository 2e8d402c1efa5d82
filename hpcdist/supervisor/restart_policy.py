"""Failures: the first one of an attempt, and the node that several of them indicate. Pure functions."""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal[
    "error", "killed", "out_of_memory", "hung", "rejected", "unfit", "vanished", "not_started", "interrupted", "lost"
]
#: Most real-time signals have no name.
_NAMES = {int(number): number.name for number in signal.Signals}


@dataclass(frozen=True, kw_only=True)
class Failure:
    kind: Kind
    rank: int
    host: str  #: empty for a failure before any rank was started
    step: int | None
    error: str
    traceback: tuple[str, ...] = ()
    role: str = ""  #: `role:index` of the rank, in runs with roles
    only_there: bool = True  #: no rank on another host reported its own failure
    detail: str = ""  #: further findings, which do not count when failures are compared

    def sentence(self) -> str:
        if not self.host:  # no rank was started
            return self.error
        where = f"rank {self.rank}{f' ({self.role})' if self.role else ''} on {self.host}"
        # A rank that could not report its end may have done more steps: a heartbeat is due once a second.
        is_reported = self.kind not in ("killed", "out_of_memory", "vanished", "lost")
        at = (f" after step {self.step}" if is_reported else f", last heartbeat at step {self.step}") * bool(self.step)
        failed = "failed with " if self.kind in ("error", "rejected", "unfit", "interrupted") else ""
        # To errors of CUDA, torch adds lines of advice.
        error = self.error.partition("\n")[0] if self.kind == "error" else self.error
        return f"{where} {failed}{error}{at}" + (f"; {self.detail}" if self.detail else "")

    def same_as(self, other: "Failure") -> bool:
        return (self.kind, self.error, self.step) == (other.kind, other.error, other.step)


def first_failure(
    exits: Mapping[int, int],
    outcomes: Mapping[int, Mapping[str, Any]],
    last_step: Callable[[int], int | None],
    host_of: Callable[[int], str],
    *,
    sent_sigterm: bool = False,
    num_ranks: int = 0,
    memory_limits: Mapping[int, int] | None = None,
    unstarted: Mapping[int, str] | None = None,
) -> Failure | None:
    """Return the failure that caused the others, or None if all ranks succeeded.

    A rank that lost its peer is a consequence. Among causes, the first in the order of exits counts, because killed
    ranks record no time. Without another cause, a rank that ended first with exit status 0 has left the others.

    Args:
        exits: exit codes by rank, in the order in which the ranks ended (negative: killed by that signal).
        outcomes: outcome files of the ranks. A rank that has reported a failure may still be ending.
        last_step: the last known step of a rank without an outcome.
        sent_sigterm: whether all ranks got SIGTERM, which ends a plain script; other ranks may lose their peers by it.
        num_ranks: number of all ranks, for the number of those that raised the same error.
        memory_limits: limits in bytes for which the kernel has killed ranks.
        unstarted: why ranks did not start, for those that did not: the exit code is that of what should start them.
    """
    unstarted = unstarted or {}
    if sent_sigterm:
        lost = {rank for rank, outcome in outcomes.items() if outcome.get("peer_lost")}
        exits = {rank: code for rank, code in exits.items() if code != -signal.SIGTERM and rank not in lost}
        outcomes = {rank: outcome for rank, outcome in outcomes.items() if rank not in lost}
    causes: list[Failure] = []
    consequences: list[Failure] = []
    for rank in [*exits, *sorted(outcomes.keys() - exits.keys())]:
        code, outcome = exits.get(rank, 0), outcomes.get(rank)
        if outcome is not None and outcome["outcome"] in ("failed", "rejected"):
            (consequences if outcome["peer_lost"] else causes).append(_reported_failure(rank, outcome))
        elif code != 0 and rank in unstarted:
            error = f"was not started: {unstarted[rank]}"
            causes.append(Failure(kind="not_started", rank=rank, host=host_of(rank), step=None, error=error))
        elif code != 0:
            kind, error = _unreported_end(code, (memory_limits or {}).get(rank))
            causes.append(Failure(kind=kind, rank=rank, host=host_of(rank), step=last_step(rank), error=error))
    left = next(iter(exits), None)
    if left is not None and exits[left] == 0 and consequences and not causes:
        error = "ended with exit status 0 before the other ranks"
        step = outcomes[left]["step"] if left in outcomes else last_step(left)
        causes.append(Failure(kind="vanished", rank=left, host=host_of(left), step=step, error=error))
    first = next(iter(causes + consequences), None)
    if first is None:
        return None
    hosts = {cause.host for cause in causes if cause.kind in ("error", "rejected")}
    same = sum((cause.kind, cause.error) == ("error", first.error) for cause in causes)
    number = "both" if same == num_ranks == 2 else f"all {same}" if same == num_ranks else str(same)
    return replace(first, only_there=hosts <= {first.host}, detail=f"{number} ranks raised it" if same > 1 else "")


def _reported_failure(rank: int, outcome: Mapping[str, Any]) -> Failure:
    # Slurm's signal ahead of the time limit ended the start of the rank's container.
    failed: Kind = "interrupted" if outcome.get("interrupted") else "error"
    return Failure(
        kind="rejected" if outcome["outcome"] == "rejected" else failed,
        rank=rank,
        host=str(outcome["host"]),
        step=outcome["step"],
        error=str(outcome["error"]),
        traceback=tuple(outcome["traceback"]),
    )


def _unreported_end(code: int, memory_limit: int | None) -> tuple[Kind, str]:
    """Return kind and error of a rank that has ended without an outcome; see `first_failure`."""
    if code > 0:
        return "vanished", f"exited with code {code} without a report"
    if memory_limit is not None:
        return (
            "out_of_memory",
            f"was killed by the kernel: out of memory, with a limit of {memory_limit / 2**20:,.0f} MiB",
        )
    return "killed", f"was killed by {_NAMES.get(-code, f'signal {-code}')}"


def not_started(absent: Sequence[int], num_ranks: int, why: str, host_of: Callable[[int], str]) -> Failure | None:
    """Return the failure of ranks that were not started, if any; `why` is time limit and cause."""
    if not absent:
        return None
    if len(absent) == num_ranks:
        return Failure(kind="not_started", rank=0, host="", step=None, error=f"no rank was started {why}")
    first = absent[0]
    others = f" (nor were {len(absent) - 1} others)" if len(absent) > 1 else ""
    error = f"was not started{others} {why}"
    return Failure(kind="not_started", rank=first, host=host_of(first), step=None, error=error)


def suspect(history: Sequence[Failure | None]) -> str | None:
    """Return the host that is probably broken, or None; the history has None for an attempt that did not fail.

    Two failures in a row on the same host, and on no other, indicate a broken node. If the same failure has occurred on
    another host, the code is probably broken, and excluding nodes would take one after the other out of service. Hangs
    do not count, because the culprit is uncertain. Neither do errors that hpcdist itself raises (without traceback),
    such as for a full disk.
    """
    if len(history) < 2 or (last := history[-1]) is None or (before := history[-2]) is None:
        return None
    for one in (last, before):
        may_be_the_node = one.kind in ("killed", "vanished", "not_started") or one.traceback
        if not one.host or one.host != last.host or not one.only_there or not may_be_the_node:
            return None
    wanders = any(failure is not None and failure.host != last.host and failure.same_as(last) for failure in history)
    return None if wanders else last.host
