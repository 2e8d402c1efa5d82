"""Why an attempt ended, and what follows from it. Pure functions over what was seen."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

#: Most real-time signals have no name.
_NAMES = {int(number): number.name for number in signal.Signals}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first thing that went wrong in an attempt."""

    kind: Literal["error", "killed", "hung", "rejected", "unfit", "vanished", "not_started"]
    rank: int
    host: str  #: empty for a failure before any rank was started
    step: int | None
    error: str
    traceback: tuple[str, ...] = ()
    role: str = ""  #: `role:index` of the rank, in runs with roles
    only_there: bool = True  #: no rank on another host reported a failure of its own
    detail: str = ""  #: what else was found out; two failures may be the same without it

    def sentence(self) -> str:
        if not self.host:  # no rank was started
            return self.error
        where = f"rank {self.rank}{f' ({self.role})' if self.role else ''} on {self.host}"
        at = f" at step {self.step}" if self.step is not None else ""
        failed = "" if self.kind in ("killed", "hung", "vanished", "not_started") else "failed with "
        return f"{where} {failed}{self.error}{at}" + (f"; {self.detail}" if self.detail else "")

    def same_as(self, other: Failure) -> bool:
        """Whether a restart ran into the very same thing: kind, message and step."""
        return (self.kind, self.error, self.step) == (other.kind, other.error, other.step)


@dataclass(frozen=True, kw_only=True)
class Decision:
    restart: bool
    reason: str


def first_failure(
    exits: Mapping[int, int],
    outcomes: Mapping[int, Mapping[str, Any]],
    steps: Mapping[int, int | None],
    host_of: Callable[[int], str],
) -> Failure | None:
    """The failure that the others followed from, or None when every rank ended well.

    Args:
        exits: exit codes by rank, in the order in which the ranks ended (negative: killed by that signal).
        outcomes: what ranks wrote of their end.
        steps: last step that each rank was seen at.
        host_of: names the host of a rank that wrote nothing.

    A rank that lost its peer is a consequence. Of the causes, the one that came first counts; a rank that was
    killed from outside or vanished wrote no time, so the order of the exits decides.
    """
    causes: list[Failure] = []
    consequences: list[Failure] = []
    for rank, code in exits.items():
        outcome = outcomes.get(rank)
        if outcome is not None and outcome["outcome"] in ("failed", "rejected"):
            failure = Failure(
                kind="rejected" if outcome["outcome"] == "rejected" else "error",
                rank=rank,
                host=str(outcome["host"]),
                step=outcome["step"],
                error=str(outcome["error"]),
                traceback=tuple(outcome["traceback"]),
            )
            (consequences if outcome["peer_lost"] else causes).append(failure)
        elif code < 0:
            name = _NAMES.get(-code, f"signal {-code}")
            error = f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
            causes.append(Failure(kind="killed", rank=rank, host=host_of(rank), step=steps.get(rank), error=error))
        elif code != 0:
            causes.append(
                Failure(
                    kind="vanished",
                    rank=rank,
                    host=host_of(rank),
                    step=steps.get(rank),
                    error=f"ended with exit code {code} without a report",
                )
            )
    first = next(iter(causes + consequences), None)
    if first is None:
        return None
    hosts = {cause.host for cause in causes if cause.kind in ("error", "rejected")}
    return replace(first, only_there=hosts <= {first.host})


def not_started(absent: Sequence[int], num_ranks: int, why: str, host_of: Callable[[int], str]) -> Failure | None:
    """The failure of ranks that show no sign of having been started, or None where there are none.

    Args:
        absent: these ranks.
        why: how that was seen, and the cause as far as it is known.
        host_of: names the host that a rank was meant for.
    """
    if not absent:
        return None
    if len(absent) == num_ranks:
        return Failure(kind="not_started", rank=0, host="", step=None, error=f"no rank was started {why}")
    first = absent[0]
    others = f" (nor were {len(absent) - 1} others)" if len(absent) > 1 else ""
    error = f"was not started{others} {why}"
    return Failure(kind="not_started", rank=first, host=host_of(first), step=None, error=error)


def decide(failures: Sequence[Failure], max_restarts: int, *, stop_asked: bool = False) -> Decision:
    """Whether to start again after the last of `failures`, all those of this start so far, oldest first.

    Nothing is started again once someone has asked the run to stop.
    """
    last = failures[-1]
    if stop_asked:
        return Decision(restart=False, reason=f"{last.sentence()}, while it was asked to stop")
    if last.kind in ("rejected", "unfit"):
        return Decision(restart=False, reason=last.sentence())
    if len(failures) > 1 and last.same_as(failures[-2]):
        return Decision(restart=False, reason=f"{last.sentence()}, twice in a row: another restart would not help")
    if len(failures) > max_restarts:
        reason = f"{last.sentence()}; all launch.max_restarts={max_restarts} restarts are used up"
        return Decision(restart=False, reason=reason if max_restarts else last.sentence())
    return Decision(restart=True, reason=last.sentence())


def suspect(history: Sequence[Failure | None]) -> str | None:
    """The host that seems to be at fault itself, by how the run's attempts ended (None: not by a failure), or None.

    Two failures in a row on the same host, and on no other, are a sign of a broken node. The same failure seen on
    another host before is a sign of broken code: it would wander from node to node and take each out of service.
    Where a rank hangs, all wait for it, and nobody can tell from outside which of them it was; and what hpcdist
    itself raises (those have no traceback), such as for a full disk, is not the node's fault either.
    """
    if len(history) < 2 or (last := history[-1]) is None or (before := history[-2]) is None:
        return None
    if not last.host or last.host != before.host or not (_may_be_the_nodes(last) and _may_be_the_nodes(before)):
        return None
    wanders = any(failure is not None and failure.host != last.host and failure.same_as(last) for failure in history)
    return None if wanders else last.host


def _may_be_the_nodes(failure: Failure) -> bool:
    return failure.only_there and (failure.kind in ("killed", "vanished", "not_started") or bool(failure.traceback))
