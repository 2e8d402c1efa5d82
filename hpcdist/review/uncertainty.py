"""The error of a figure, and whether two figures differ by more than chance; methods: docs/how-to/compare-runs.md."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence

from hpcdist.run.records import DatasetRecord

#: Quantile of the normal distribution for an interval of 95 %.
Z_95 = 1.959964
#: The same of Student's t distribution with 1, 2, 3 … degrees of freedom.
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
#: Metrics that are a number of correct samples by the number of samples.
_PROPORTION = re.compile(r"((eval|evaluation|test|val|valid|validation|dev)[/_.])?accuracy")
_TRAINING = ("train", "training")
#: Names of a split that mean the same data; `eval` may mean either.
_SPLITS = (("test",), ("val", "valid", "validation", "dev"))
MAX_SAMPLES = 10**15
#: Larger values, of diverged runs, have no useful mean.
LARGEST_VALUE = 1e75


def wilson(share: float, num: int, z: float) -> tuple[float, float]:
    """Return Wilson's interval of a proportion of `num` samples that is `z` standard errors wide on each side."""
    scale = 1 + z * z / num
    center = (share + z * z / (2 * num)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return center - half, center + half


def evaluated_on(metric: str, datasets: Iterable[DatasetRecord]) -> DatasetRecord | None:
    """Return the dataset of an evaluation: of the split that the metric names, else the only one besides training."""
    others = [one for one in datasets if one.split not in _TRAINING]
    word = re.split(r"[/_.]", metric)[0]
    names = next((group for group in _SPLITS if word in group), ())
    opposite = [name for group in _SPLITS for name in group if names and group != names]
    named = [one for one in others if one.split in (word, *names)]
    found = named or [one for one in others if one.split not in opposite]
    return found[0] if len(found) == 1 else None


def num_evaluated(metric: str, value: float, datasets: Iterable[DatasetRecord]) -> int | None:
    """Return the number of samples that a value is a proportion of; None if it is none, or the number is unknown."""
    data = evaluated_on(metric, datasets)
    is_proportion = _PROPORTION.fullmatch(metric) is not None and 0 <= value <= 1
    is_known = data is not None and is_proportion and data.num_samples in range(1, MAX_SAMPLES)
    return data.num_samples if data is not None and is_known else None


def error_of(metric: str, value: float, datasets: Iterable[DatasetRecord]) -> float | None:
    """Return the standard error of a proportion, half the width of Wilson's interval; None of any other metric."""
    if (num := num_evaluated(metric, value, datasets)) is None:
        return None
    low, high = wilson(value, num, 1.0)
    return (high - low) / 2


def difference_interval(first: float, num_first: int, second: float, num_second: int) -> tuple[float, float]:
    """Return Newcombe's interval of 95 % of `second - first`, proportions of so many independent samples."""
    low_1, high_1 = wilson(first, num_first, Z_95)
    low_2, high_2 = wilson(second, num_second, Z_95)
    delta = second - first
    return delta - math.hypot(second - low_2, high_1 - first), delta + math.hypot(high_2 - second, first - low_1)


def mean_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Return Welch's interval of 95 % of the difference of two means; None if the values do not vary."""
    if min(len(first), len(second)) < 2:
        return None
    variances = [statistics.variance(values) / len(values) for values in (first, second)]
    if not (total := sum(variances)):
        return None
    # Of shares: squares of tiny variances would be 0.
    shares = [variance / total for variance in variances]
    freedom = int(1 / (shares[0] ** 2 / (len(first) - 1) + shares[1] ** 2 / (len(second) - 1)) + 1e-9)
    quantile = _T_95[freedom - 1] if freedom <= len(_T_95) else Z_95 + 2.5 / freedom
    delta, half = statistics.fmean(second) - statistics.fmean(first), quantile * math.sqrt(total)
    return delta - half, delta + half


def is_other_data(first: DatasetRecord | None, second: DatasetRecord | None) -> bool:
    """Return whether two evaluation datasets differ: by their digests, or by name and size without them."""
    if first is None or second is None:
        return False
    if first.digest and second.digest:
        return first.digest != second.digest
    return (first.name, first.num_samples) != (second.name, second.num_samples)


def with_error(value: float, error: float | None, without: str) -> str:
    """Return `0.978 ± 0.008`, rounded to the first digit of the error; the text `without` if the error is unknown."""
    if not error:
        return without
    if error >= 1e5:
        return f"{value:.6g} ± {error:.1g}"
    digits = num_digits(error)
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def num_digits(error: float) -> int:
    """Return the number of decimals up to the first digit of an error, at most 12."""
    return max(0, -math.floor(math.log10(max(error, 1e-12))))
