"""Failures: the first one of an attempt, and the node that several of them indicate. Pure functions."""

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hpcdist.host.cgroups import MemoryKill
from hpcdist.review.known_failures import first_match
from hpcdist.run.exit_error import without_last_line

#: `child_killed`: the ranks have ended with success, but without one of their child processes. `out_of_memory`: the
#: kernel killed the rank; a full GPU is an `error`. `interrupted`: Slurm's signal ended the start of its container.
Kind = Literal[
    "error", "killed", "out_of_memory", "child_killed", "hung", "rejected", "unfit", "vanished", "not_started",
    "interrupted", "lost",
]  # fmt: skip
#: Names of signals by number. Most real-time signals have no name.
_NAMES = {int(number): number.name for number in signal.Signals}
#: Kinds of failures in which the rank does not report its step. The known step is that of its last heartbeat, which is
#: due once a second, so the rank may have done more steps.
_UNREPORTED: tuple[Kind, ...] = ("killed", "out_of_memory", "vanished", "lost")
#: Kinds with the text of an exception as `error`.
_RAISED: tuple[Kind, ...] = ("error", "rejected", "unfit", "interrupted")
#: Number of ranks with which "all 2 ranks" is "both ranks".
_PAIR = 2


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of an attempt, as one rank shows it."""

    kind: Kind
    rank: int
    host: str  #: empty for a failure before any rank was started
    step: int | None
    error: str
    traceback: tuple[str, ...] = ()
    role: str = ""  #: `role:index` of the rank, in runs with roles
    only_there: bool = True  #: no rank on another host reported its own failure
    detail: str = ""  #: further findings, which do not count when failures are compared
    num_micro_batches: int | None = None  #: of an elastic run in which a GPU's memory was exhausted
    memory: str = ""  #: which processes beside the ranks the kernel has killed for lack of memory, and why
    is_fault: bool = False  #: whether an exception comes from a node, device or connection

    @property
    def is_of_code(self) -> bool:
        """Whether the user's code raised an exception by itself. Errors of hpcdist have no traceback."""
        return self.kind == "error" and bool(self.traceback) and not self.is_fault

    def sentence(self) -> str:
        """Return such as `rank 3 on n2 failed with ValueError: … after step 40`."""
        if not self.host:  # no rank was started
            return self.error
        text = f"rank {self.rank}"
        if self.role:
            text += f" ({self.role})"
        text += f" on {self.host} "
        if self.kind in _RAISED:
            text += "failed with "
        error = self.error
        if self.kind == "error":
            error = _headline(error)
        text += error
        if self.step and self.kind in _UNREPORTED:
            text += f", last heartbeat at step {self.step}"
        elif self.step:
            text += f" after step {self.step}"
        if self.detail:
            text += f"; {self.detail}"
        if self.memory:
            text += f"; {self.memory}"
        return text

    def same_as(self, other: "Failure") -> bool:
        """Return whether the failures agree in kind, error and step."""
        mine, others = without_last_line(self.error), without_last_line(other.error)
        return (self.kind, mine, self.step) == (other.kind, others, other.step)


def _headline(error: str) -> str:
    """Return the first line of an error; to errors of CUDA, torch adds lines of advice.

    A first line that ends after the type is followed by the last one: the message of `mp.spawn` is the traceback of a
    child process.
    """
    first, _, rest = error.partition("\n")
    if first.rstrip().endswith(":") and rest.strip():
        return f"{first.rstrip()} {rest.strip().splitlines()[-1].strip()}"
    return first


def first_failure(
    exits: Mapping[int, int],
    outcomes: Mapping[int, Mapping[str, Any]],
    last_step: Callable[[int], int | None],
    host_of: Callable[[int], str],
    *,
    sent_sigterm: bool = False,
    num_ranks: int = 0,
    memory_kills: Mapping[int, MemoryKill] | None = None,
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
        memory_kills: by rank, the kills for lack of memory in its control group until the rank ended.
        unstarted: reasons of the ranks that did not start. Their exit codes are those of the program that should have
            started them.
    """
    unstarted = unstarted or {}
    memory_kills = memory_kills or {}
    if sent_sigterm:
        lost = {rank for rank, outcome in outcomes.items() if outcome.get("peer_lost")}
        exits = {rank: code for rank, code in exits.items() if code != -signal.SIGTERM and rank not in lost}
        outcomes = {rank: outcome for rank, outcome in outcomes.items() if rank not in lost}
    causes: list[Failure] = []
    consequences: list[Failure] = []
    for rank in [*exits, *sorted(outcomes.keys() - exits.keys())]:
        code = exits.get(rank, 0)
        outcome = outcomes.get(rank)
        if outcome is not None and outcome["outcome"] in ("failed", "rejected"):
            failure = _reported_failure(rank, outcome)
            if outcome["peer_lost"]:
                consequences.append(failure)
            else:
                causes.append(failure)
        elif code != 0 and rank in unstarted:
            error = f"was not started: {unstarted[rank]}"
            causes.append(Failure(kind="not_started", rank=rank, host=host_of(rank), step=None, error=error))
        elif code != 0:
            kind, error = _unreported_end(code, memory_kills.get(rank))
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
    num_same = _num_with_same_error(first, causes)
    return replace(first, only_there=hosts <= {first.host}, detail=_shared_by(num_same, num_ranks))


def _num_with_same_error(first: Failure, causes: Iterable[Failure]) -> int:
    """Return the number of failures with the error of the first one; the last lines of scripts may differ."""
    error = without_last_line(first.error)
    return sum(cause.kind == "error" and without_last_line(cause.error) == error for cause in causes)


def _shared_by(count: int, num_ranks: int) -> str:
    """Return how many of the ranks raised the same error; "" if only one did."""
    if count <= 1:
        return ""
    if count != num_ranks:
        return f"{count} ranks raised it"
    if num_ranks == _PAIR:
        return "both ranks raised it"
    return f"all {count} ranks raised it"


def _reported_failure(rank: int, outcome: Mapping[str, Any]) -> Failure:
    kind: Kind = "error"
    if outcome["outcome"] == "rejected":
        kind = "rejected"
    elif outcome.get("interrupted"):
        # Slurm's signal ahead of the time limit ended the start of the rank's container.
        kind = "interrupted"
    error = str(outcome["error"])
    return Failure(
        kind=kind,
        rank=rank,
        host=str(outcome["host"]),
        step=outcome["step"],
        error=error,
        traceback=tuple(outcome["traceback"]),
        is_fault=bool(outcome["peer_lost"]) or _is_known_fault(error),
        num_micro_batches=outcome.get("num_micro_batches"),
    )


def _is_known_fault(error: str) -> bool:
    """Return whether the text of an error is that of a fault of a node, device or connection."""
    match = first_match(error.splitlines())
    if match is None:
        return False
    pattern, _ = match
    return pattern.is_fault


def _unreported_end(code: int, memory_kill: MemoryKill | None) -> tuple[Kind, str]:
    """Return kind and error of a rank that has ended without an outcome; see `first_failure`."""
    if code > 0:
        return "vanished", f"exited with code {code} without a report"
    if memory_kill is not None and code == -signal.SIGKILL:
        return "out_of_memory", f"was killed by the kernel: {memory_kill.reason}"
    name = _NAMES.get(-code, f"signal {-code}")
    return "killed", f"was killed by {name}"


@dataclass(frozen=True, kw_only=True)
class LateEnd:
    """The end of ranks after their code has ended, but not their process."""

    since: float  #: when the code of the last rank ended, in seconds since the epoch
    is_busy: bool  #: whether the process has computed since then
    sentence: str


def late_end(exits: Mapping[int, int], outcomes: Mapping[int, Mapping[str, Any]]) -> LateEnd | None:
    """Return what has kept the rank that ended last; None if nothing has, or its outcome file is damaged.

    Args:
        exits: exit codes by rank, in the order in which the ranks ended.
        outcomes: outcome files of the ranks.
    """
    last = next(reversed(exits), None)
    if last is None:
        return None
    outcome = outcomes.get(last, {})
    late = outcome.get("late")
    if not isinstance(late, dict):
        return None
    since, until, what = late.get("since"), outcome.get("time"), late.get("what")
    if not isinstance(since, float) or not isinstance(until, float) or not isinstance(what, str):
        return None
    is_busy = late.get("busy") is True
    sentence = f"the process of rank {last} did not end for {until - since:.0f} s: {what}"
    if is_busy:
        sentence += ", cut off at work: launch.stop_grace_s gives it more time"
    return LateEnd(since=since, is_busy=is_busy, sentence=sentence)


def killed_beside(
    exits: Mapping[int, int],
    memory_kills: Mapping[int, MemoryKill],
    host_of: Callable[[int], str],
    *,
    in_job: bool,
) -> str:
    """Return the clause about processes beside the ranks that the kernel has killed for lack of memory; "" without any.

    The kernel counts kills, and does not name the processes: if it has killed a rank, no other process is assumed.

    Args:
        exits: exit codes by rank.
        memory_kills: see `first_failure`.
        host_of: returns the host of a rank.
        in_job: whether the control groups of the ranks contain no process that the ranks have not started.
    """
    if any(exits.get(rank) == -signal.SIGKILL for rank in memory_kills):
        return ""
    first = next(iter(memory_kills), None)
    if first is None:
        return ""
    host = host_of(first)
    beside = [rank for rank in exits if host_of(rank) == host]
    kill = memory_kills[first]
    ranks = "the ranks"
    if beside == [first]:
        ranks = f"rank {first}"
    number = "a"
    noun = "process"
    if kill.count > 1:
        number = f"{kill.count:,}"
        noun = "processes"
    killed = f"{number} {noun} beside {ranks}"
    if in_job:
        killed = f"{number} child {noun} of {ranks}"
    return f"the kernel killed {killed} on {host}: {kill.reason}"


def not_started(absent: Sequence[int], num_ranks: int, why: str, host_of: Callable[[int], str]) -> Failure | None:
    """Return the failure of ranks that were not started; None if there are none.

    Args:
        absent: the ranks that were not started, in order.
        why: end of the sentence: time limit and cause.
    """
    if not absent:
        return None
    if len(absent) == num_ranks:
        return Failure(kind="not_started", rank=0, host="", step=None, error=f"no rank was started {why}")
    first = absent[0]
    error = f"was not started {why}"
    if len(absent) > 1:
        error = f"was not started (nor were {len(absent) - 1} others) {why}"
    return Failure(kind="not_started", rank=first, host=host_of(first), step=None, error=error)


#: Failures in a row after which a node counts as broken: a single one may have any cause.
_ENOUGH_FAILURES = 2


def suspect(history: Sequence[Failure | None]) -> str | None:
    """Return the host that is probably broken, or None; the history has None for an attempt that did not fail.

    Two failures in a row on the same host, and on no other, indicate a broken node. If the same failure has occurred on
    another host, the code is probably broken, and excluding nodes would take one after the other out of service. Hangs
    do not count, because the culprit is uncertain. Neither do errors that hpcdist itself raises (without traceback),
    such as for a full disk.
    """
    last_two = history[-_ENOUGH_FAILURES:]
    if len(last_two) < _ENOUGH_FAILURES:
        return None
    last = last_two[-1]
    if last is None or not last.host:
        return None
    for failure in last_two:
        if failure is None or failure.host != last.host or not _may_be_the_node(failure):
            return None
    for failure in history:
        if failure is not None and failure.host != last.host and failure.same_as(last):
            return None
    return last.host


def _may_be_the_node(failure: Failure) -> bool:
    return failure.only_there and (failure.kind in ("killed", "vanished", "not_started") or bool(failure.traceback))
