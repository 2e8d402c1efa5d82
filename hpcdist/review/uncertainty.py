"""The error of a result, and numbers rounded by their errors; methods: docs/how-to/compare-runs.md."""

import math
import re
import statistics
from collections.abc import Iterable, Sequence

from hpcdist.run.training_record import DatasetRecord

#: Metrics that are a number of correct samples by the number of samples.
_PROPORTION = re.compile(r"((eval|evaluation|test|val|valid|validation|dev)[/_.])?accuracy")
_TRAINING = ("train", "training")
#: Names of a split that mean the same data; `eval` may mean either.
_SPLITS = (("test",), ("val", "valid", "validation", "dev"))
MAX_SAMPLES = 10**15
#: Larger values, of diverged runs, have no useful mean.
LARGEST_VALUE = 1e75
LEGEND = "± alone: standard error, from the number of test samples; ± with s.d.: standard deviation over n seeds"


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
    num = data.num_samples if data is not None and is_proportion else None
    return num if num is not None and 0 < num < MAX_SAMPLES else None


def share_error(share: float, num: int | None) -> float | None:
    """Return the standard error of a proportion of `num` samples; None if `num` is unknown, or it is no proportion.

    It is half the width of Wilson's interval at one standard error, as in `scipy.stats.binomtest`. SciPy is not used:
    its import takes longer than a second, and the process that uploads a run needs this error for each run.
    """
    if num is None or num < 1 or not 0 <= share <= 1:
        return None
    return math.sqrt(share * (1 - share) / num + 1 / (4 * num * num)) / (1 + 1 / num)


def with_error(value: float, error: float | None, without: str) -> str:
    """Return `0.978 ± 0.008`, rounded to the first digit of the error; the text `without` if the error is unknown."""
    if not error:
        return without
    if error >= 1e5:
        return f"{value:.6g} ± {error:.1g}"
    digits = num_digits(error)
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def mean_text(values: Sequence[float]) -> str:
    """Return `0.981 ± 0.004 s.d. (n=5)`: mean, standard deviation and number of values; empty without any."""
    if not values:
        return ""
    mean = statistics.fmean(values)
    if len(values) > 1 and (deviation := statistics.stdev(values)):
        return f"{with_error(mean, deviation, '')} s.d. (n={len(values)})"
    return f"{mean:.4g} (n={len(values)})"


def signed(delta: float, interval: Sequence[float] | None) -> str:
    """Return a difference with its sign, rounded to the second digit of the width of its interval, or of its own.

    It has at least one digit that is not zero: a difference of 0.01 is often 0.00999….
    """
    width = interval[1] - interval[0] if interval else abs(delta)
    return f"{delta:+.{max(num_digits(width) + 1, num_digits(abs(delta) * (1 + 1e-9)))}f}" if delta else "0"


def ends(interval: Sequence[float] | None) -> str:
    """Return `-0.014 to +0.024`; empty without an interval."""
    return " to ".join(signed(end, interval) for end in interval or ())


def num_digits(error: float) -> int:
    """Return the number of decimals up to the first digit of an error, at most 12."""
    return max(0, -math.floor(math.log10(max(error, 1e-12))))
