"""The ledger of a run: the cause of every second of every allocated GPU, or CPU core where a run uses no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcdist.review.allocation_times import AllocationTimes, allocations_of
from hpcdist.review.causes import CAUSES, Cause
from hpcdist.review.rank_times import Phase, TimedAttempt, attempt_seconds, measured_energy, read_account, read_phases
from hpcdist.run.folder import RunDir

__all__ = ["CAUSES", "Cause", "Entry", "Interval", "Ledger", "percent", "read_ledger"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Time of the resources of one node in one attempt that has one cause."""

    cause: Cause
    attempt: int  #: 0 for time of an allocation outside of all attempts
    node: str
    seconds: float  #: resource-seconds: wall time × number of GPUs or cores


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A phase of a run on the time axis, in seconds since the epoch."""

    phase: Literal["queue"] | Phase
    attempt: int
    began: float
    ended: float


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """All entries of a run. Their sum is the allocated time: wall time × resources."""

    unit: Literal["GPU", "core"] = "core"
    entries: tuple[Entry, ...] = ()
    intervals: tuple[Interval, ...] = ()
    queue_s: float = 0.0  #: wall time in the queue; no resources are allocated meanwhile
    energy_kwh: float | None = None  #: None where no sensor measures it
    energy_of: str = ""  #: what was measured: nodes, GPUs or CPUs
    ended: float = 0.0  #: end of the last allocation, or now while it lasts; seconds since the epoch
    running_s: float = 0.0  #: wall time of all allocations, without the queue and pauses between them
    is_measured: bool = True  #: False with attempts of a plain script that reports no steps

    @property
    def allocated_s(self) -> float:
        """Resource-seconds that were allocated to the run."""
        return sum(entry.seconds for entry in self.entries)

    @property
    def goodput(self) -> float | None:
        """Useful compute as a part of the allocated time, between 0 and 1; None if it is not measured."""
        if not self.is_measured:
            return None
        return self.by(lambda entry: entry.cause).get("compute", 0.0) / self.allocated_s if self.allocated_s else 0.0

    def by(self, key: Callable[[Entry], str]) -> dict[str, float]:
        """Return resource-seconds by cause, node or attempt."""
        sums: dict[str, float] = {}
        for entry in self.entries:
            sums[key(entry)] = sums.get(key(entry), 0.0) + entry.seconds
        return sums


def read_ledger(run: RunDir) -> Ledger:
    """Return the ledger of a run until now; without entries for a run of an older hpcdist."""
    allocations = allocations_of(run)
    attempts = [attempt for allocation in allocations for attempt in allocation.attempts]
    energy = _energy(allocations)
    return Ledger(
        unit="GPU" if any(attempt.times.unit == "GPU" for attempt in attempts) else "core",
        entries=tuple(entry for allocation in allocations for entry in _entries(allocation)),
        intervals=tuple(interval for allocation in allocations for interval in _intervals(allocation)),
        queue_s=sum(allocation.queue_s for allocation in allocations),
        energy_kwh=sum(energy.values()) / 3.6e6 if energy else None,
        energy_of=" and ".join(energy),
        ended=max((allocation.ended for allocation in allocations), default=0.0),
        running_s=sum(allocation.ended - allocation.began for allocation in allocations),
        is_measured=all(attempt.is_measured for attempt in attempts),
    )


def percent(share: float | None, digits: int = 0) -> str:
    """Return a share such as the goodput as text: `63 %`, or `not measured`."""
    return "not measured" if share is None else f"{100 * share:.{digits}f} %"


def _energy(allocations: Sequence[AllocationTimes]) -> dict[str, float]:
    """Return joules by what was measured; the ranks' own values count where Slurm's accounting has none."""
    found: dict[str, float] = {}
    for allocation in allocations:
        if allocation.energy_j is not None:
            found["nodes"] = found.get("nodes", 0.0) + allocation.energy_j
            continue
        for timed in allocation.attempts:
            for share in timed.times.shares.values():
                for sensor, joules in measured_energy(timed.attempt, share.ranks).items():
                    kind = "GPUs" if sensor.startswith("GPU-") else "CPUs"
                    found[kind] = found.get(kind, 0.0) + joules
    return dict(sorted(found.items(), reverse=True))


def _entries(allocation: AllocationTimes) -> Iterator[Entry]:
    """Yield the entries of an allocation, which add up to its duration × resources."""
    for cause, began, ended in _gaps(allocation):
        # Nodes that were lost do not belong to the later gaps.
        held = [timed.nodes for timed in allocation.attempts if timed.began <= began and timed.nodes]
        for node, count in (held[-1] if held else allocation.nodes).items():
            yield Entry(cause=cause, attempt=0, node=node, seconds=(ended - began) * count)
    for timed in allocation.attempts:
        for (node, cause), seconds in sorted(attempt_seconds(timed).items()):
            if seconds > 0:
                yield Entry(cause=cause, attempt=timed.number, node=node, seconds=seconds)


def _gaps(allocation: AllocationTimes) -> Iterator[tuple[Cause, float, float]]:
    """Yield the times of an allocation outside of attempts, with their cause.

    They are `start` before the first attempt, `down` after an attempt that failed, and `idle` after the last one.
    """
    cause: Cause = "start"
    at = allocation.began
    for timed in allocation.attempts:
        if timed.began > at:
            yield cause, at, timed.began
        at = max(at, timed.ended)
        cause = "down" if timed.has_failed else "idle"
    if allocation.ended > at:
        yield cause, at, allocation.ended


def _intervals(allocation: AllocationTimes) -> Iterator[Interval]:
    """Yield the phases of an allocation on the time axis, those of attempts as rank 0 has recorded them."""
    first = allocation.attempts[0].number if allocation.attempts else 0
    if allocation.queue_s > 0:
        began = allocation.began - allocation.queue_s
        yield Interval(phase="queue", attempt=first, began=began, ended=allocation.began)
    for cause, began, ended in _gaps(allocation):
        if cause in ("start", "down"):
            yield Interval(phase="start" if cause == "start" else "down", attempt=0, began=began, ended=ended)
    for timed in allocation.attempts:
        yield from _attempt_intervals(timed)


def _attempt_intervals(timed: TimedAttempt) -> Iterator[Interval]:
    account = read_account(timed.attempt, 0)
    last = timed.began if account is None else min(max(account.until, timed.began), timed.ended)
    at = timed.began
    has_trained = False
    phases: list[tuple[Phase, float, float]] = []
    for phase, began, ended in read_phases(timed.attempt):
        began, ended = max(at, min(began, last)), min(ended, last)
        if ended <= at:
            continue
        if began > at:
            phases.append(("train" if has_trained else "start", at, began))
        phases.append((phase, began, ended))
        has_trained = has_trained or phase != "start"
        at = ended
    if last > at:
        phases.append(("train" if has_trained else "start", at, last))
    if timed.ended > last:
        is_down = not timed.is_live and not (account is not None and account.closed)
        phases.append(("start" if account is None else "down" if is_down else "train", last, timed.ended))
    for phase, began, ended in _joined(phases):
        yield Interval(phase=phase, attempt=timed.number, began=began, ended=ended)


def _joined(phases: list[tuple[Phase, float, float]]) -> list[tuple[Phase, float, float]]:
    """Join neighbouring phases of the same name."""
    found: list[tuple[Phase, float, float]] = []
    for phase, began, ended in phases:
        if found and found[-1][0] == phase:
            found[-1] = phase, found[-1][1], ended
        else:
            found.append((phase, began, ended))
    return found
