"""The cost of runs, by user, month, experiment or run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from hpcdist.errors import RunFolderError
from hpcdist.files.atomic import read_json
from hpcdist.review.ledger import CAUSES, Ledger, read_ledger
from hpcdist.run.folder import RunDir

Group = Literal["user", "month", "experiment", "run"]
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(kw_only=True)
class Cost:
    """The sum of the ledgers of some runs, in hours."""

    unit: str  #: GPU or core
    num_runs: int = 0
    hours: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))  #: GPU- or core-hours by cause
    queue_hours: float = 0.0  #: wall time
    energy_kwh: float | None = None  #: of the runs whose energy is known
    is_measured: bool = True  #: False with a plain script that reports no steps

    @property
    def allocated(self) -> float:
        """GPU-hours or core-hours that were allocated."""
        return sum(self.hours.values())

    @property
    def goodput(self) -> float | None:
        """Share of the allocated GPU-hours or core-hours in which steps were computed; None if it is not measured."""
        if not self.is_measured:
            return None
        return self.hours["compute"] / self.allocated if self.allocated else 0.0

    def add(self, ledger: Ledger) -> None:
        """Add the hours and the energy of a run."""
        self.num_runs += 1
        self.is_measured = self.is_measured and ledger.is_measured
        self.queue_hours += ledger.queue_s / 3600
        for entry in ledger.entries:
            self.hours[entry.cause] += entry.seconds / 3600
        if ledger.energy_kwh is not None:
            self.energy_kwh = (self.energy_kwh or 0.0) + ledger.energy_kwh


def costs(runs: Iterable[RunDir], by: Sequence[Group]) -> tuple[dict[tuple[str, ...], Cost], list[RunDir], list[str]]:
    """Return the costs of runs by group and unit, in order, the runs without a ledger, and notes on unreadable runs.

    The keys are the values of `by` and the unit, because GPU-hours and core-hours cannot be added. A run belongs to the
    month in which it was created.
    """
    found: dict[tuple[str, ...], Cost] = {}
    without: list[RunDir] = []
    problems: list[str] = []
    for run in runs:
        try:
            ledger = read_ledger(run)
            key = (*(_value(run, group) for group in by), ledger.unit)
        except (RunFolderError, OSError) as error:
            problems.append(f"run {run.name} is left out: {error}")
            continue
        if not ledger.entries:
            without.append(run)
            continue
        found.setdefault(key, Cost(unit=ledger.unit)).add(ledger)
    return dict(sorted(found.items())), without, problems


def _value(run: RunDir, group: Group) -> str:
    if group == "user":
        return str((read_json(run.environment) or {}).get("user") or "unknown")
    if group == "month":
        return time.strftime("%Y-%m", time.localtime(run.read_state().created))
    return run.experiment if group == "experiment" else f"{run.experiment}/{run.name}"
