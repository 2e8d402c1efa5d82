"""Comparison of the values that two runs have logged, step by step."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

#: Values of one run: metric → step → value.
Values = Mapping[str, Mapping[int, float]]
#: Metrics that measure the machine or the time, which no run repeats exactly.
_MEASURED = ("attempt", "system/*", "time/*", "usage/*", "comm/*", "pipeline/bubble", "pipeline/busy_s/*")
_MEASURED_END = re.compile(r"(^|_|/)(s|ms|us|ns|seconds?|sec|hours|time|runtime|latency|per_s|per_sec|per_second)$")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first step at which a metric differs; a value is None if that run has none at this step."""

    step: int
    key: str
    before: float | None
    after: float | None

    def __str__(self) -> str:
        texts = ["not logged" if value is None else repr(value) for value in (self.before, self.after)]
        return f"step {self.step}: {self.key} was {texts[0]}, is {texts[1]}"


@dataclass(frozen=True, kw_only=True)
class ValueComparison:
    """Result of a comparison."""

    num_values: int  #: compared pairs of values
    num_steps: int  #: different steps with compared values
    num_differing: int
    differences: tuple[Difference, ...]  #: the first one of each differing metric, by step
    keys: tuple[str, ...]  #: compared metrics
    measured: tuple[str, ...]  #: metrics that were not compared
    only_before: tuple[str, ...] = ()  #: metrics that only the first run has logged
    only_after: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether both runs have logged the same metrics with the same values."""
        return not (self.num_differing or self.only_before or self.only_after)


def is_measured(key: str, ignore: Collection[str] = ()) -> bool:
    """Return whether a metric measures time, speed or the machine by its name, or fits a pattern of `ignore`."""
    return any(fnmatchcase(key, pattern) for pattern in (*_MEASURED, *ignore)) or bool(_MEASURED_END.search(key))


def compare_values(
    before: Values,
    after: Values,
    *,
    until: int | None = None,
    exact: bool = True,
    tolerance: float = 0.0,
    ignore: Collection[str] = (),
) -> ValueComparison:
    """Compare the values of a run with those of an earlier run of the same training.

    Args:
        until: the last step of the second run if it was paused there; None if it has ended by itself. At that step the
            second run may have logged less, since an evaluation follows a pause.
        exact: whether `before` has every value of its run. Otherwise values of the second run alone do not count.
        tolerance: largest accepted relative difference; 0 compares exactly.
        ignore: patterns of further metrics that are not compared.
    """
    measured = sorted(key for key in {*before, *after} if is_measured(key, ignore))
    first = {key: points for key, points in before.items() if key not in measured}
    second = {key: points for key, points in after.items() if key not in measured}
    if until is not None:
        first = {key: kept for key, points in first.items() if (kept := _up_to(points, until))}
        only_at_end = {key for key in first.keys() - second.keys() if min(first[key]) >= until}
        first = {key: points for key, points in first.items() if key not in only_at_end}
    last = max((step for points in first.values() for step in points), default=-1)
    num_values, num_differing, steps, found = 0, 0, set(), []
    common = sorted(first.keys() & second.keys())
    for key in common:
        one, other = first[key], second[key]
        shared = one.keys() & other.keys()
        missing = {step for step in one.keys() - shared if until is None or step < until}
        added = {step for step in other.keys() - shared if exact and step < last}
        differing = {step for step in shared if not _equal(one[step], other[step], tolerance)} | missing | added
        num_values += len(shared)
        num_differing += len(differing)
        steps |= shared
        if differing:
            step = min(differing)
            found.append(Difference(step=step, key=key, before=one.get(step), after=other.get(step)))
    return ValueComparison(
        num_values=num_values,
        num_steps=len(steps),
        num_differing=num_differing,
        differences=tuple(sorted(found, key=lambda one: (one.step, one.key))),
        keys=tuple(common),
        measured=tuple(measured),
        only_before=tuple(sorted(first.keys() - second.keys())),
        only_after=tuple(sorted(key for key in second.keys() - first.keys() if exact and min(second[key]) < last)),
    )


def _up_to(points: Mapping[int, float], until: int) -> dict[int, float]:
    return {step: value for step, value in points.items() if step <= until}


def _equal(one: float, other: float, tolerance: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    # MLflow's database stores infinities as the largest number.
    one, other = (min(max(value, -sys.float_info.max), sys.float_info.max) for value in (one, other))
    return one == other or math.isclose(one, other, rel_tol=tolerance, abs_tol=0.0)
