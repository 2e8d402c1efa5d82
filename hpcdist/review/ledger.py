"""The ledger of a run: the cause of every second of every allocated GPU, or CPU core where a run uses no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from hpcdist.run.folder import RunDir

Cause = Literal[
    "start",
    "compile",
    "data",
    "compute",
    "communication",
    "checkpoint",
    "evaluation",
    "redone",
    "idle",
    "down",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)


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

    phase: Literal["queue", "start", "compile", "train", "evaluate", "save", "down"]
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

    @property
    def allocated_s(self) -> float:
        """Resource-seconds that were allocated to the run."""
        return sum(entry.seconds for entry in self.entries)

    @property
    def goodput(self) -> float:
        """Useful compute as a part of the allocated time, between 0 and 1."""
        return self.by(lambda entry: entry.cause).get("compute", 0.0) / self.allocated_s if self.allocated_s else 0.0

    def by(self, key: Callable[[Entry], str]) -> dict[str, float]:
        """Return resource-seconds by cause, node or attempt."""
        sums: dict[str, float] = {}
        for entry in self.entries:
            sums[key(entry)] = sums.get(key(entry), 0.0) + entry.seconds
        return sums


def read_ledger(run: RunDir) -> Ledger:
    """Return the ledger of a run until now."""
    return Ledger()
