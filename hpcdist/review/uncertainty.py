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
#: Larger numbers of samples are not plausible.
MAX_SAMPLES = 10**15
#: Larger values, of diverged runs, have no useful mean.
LARGEST_VALUE = 1e75
#: Decimals of a number.
MAX_DIGITS = 12
#: Errors from here on are shown with exponents, because the value would have no decimals.
_LARGE_ERROR = 1e5
#: On the page of a run, where no value is a mean over seeds.
RUN_LEGEND = "±: standard error, from the number of test samples"
LEGEND = "± alone: standard error, from the number of test samples; ± with s.d.: standard deviation over n seeds"


def evaluated_on(metric: str, datasets: Iterable[DatasetRecord]) -> DatasetRecord | None:
    """Return the dataset of a metric: of the split that its name begins with, else the only one besides training.

    None if there is no such dataset, or more than one.
    """
    split = re.split(r"[/_.]", metric)[0]
    if split in _TRAINING:
        training = [data for data in datasets if data.split in _TRAINING]
        return training[0] if len(training) == 1 else None
    others = [data for data in datasets if data.split not in _TRAINING]
    same_data = next((names for names in _SPLITS if split in names), ())
    candidates = [data for data in others if data.split == split or data.split in same_data]
    if not candidates:
        other_data: list[str] = []
        if same_data:
            other_data = [name for names in _SPLITS if names != same_data for name in names]
        candidates = [data for data in others if data.split not in other_data]
    return candidates[0] if len(candidates) == 1 else None


def num_evaluated(metric: str, value: float, datasets: Iterable[DatasetRecord]) -> int | None:
    """Return the number of samples that a value is a proportion of; None if it is none, or the number is unknown."""
    is_proportion = _PROPORTION.fullmatch(metric) is not None and 0 <= value <= 1
    data = evaluated_on(metric, datasets)
    if data is None or data.num_samples is None or not is_proportion:
        return None
    return data.num_samples if 0 < data.num_samples < MAX_SAMPLES else None


def share_error(share: float, num: int | None) -> float | None:
    """Return the standard error of a proportion of `num` samples; None if `num` is unknown, or it is no proportion.

    It is half the width of Wilson's interval at one standard error, as in `scipy.stats.binomtest`. SciPy is not used:
    its import takes longer than a second, and the process that uploads a run needs this error for each run.
    """
    if num is None or num < 1 or not 0 <= share <= 1:
        return None
    return math.sqrt(share * (1 - share) / num + 1 / (4 * num * num)) / (1 + 1 / num)


def with_error(value: float, error: float | None, without: str) -> str:
    """Return `0.978 ± 0.008`, rounded to the first digit of the error; the text `without` if the error is unknown.

    An error that begins with 1 has a second digit, `0.974 ± 0.010`: one digit could be wrong by half.
    """
    if not error:
        return without
    if error >= _LARGE_ERROR:
        return f"{value:.6g} ± {error:.1g}"
    first_digit, _, exponent = f"{error:.0e}".partition("e")
    digits = -int(exponent)
    if first_digit == "1":
        digits += 1
    digits = min(max(digits, 0), MAX_DIGITS)
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def mean_text(values: Sequence[float]) -> str:
    """Return `0.981 ± 0.004 s.d. (n=5)`: mean, standard deviation and number of values; empty without any."""
    if not values:
        return ""
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    if deviation:
        return f"{with_error(mean, deviation, '')} s.d. (n={len(values)})"
    return f"{mean:.4g} (n={len(values)})"


def signed(delta: float, interval: Sequence[float] | None) -> str:
    """Return a difference with its sign, rounded to the second digit of the width of its interval, or of its own.

    It has at least one digit that is not zero: a difference of 0.01 is often 0.00999….
    """
    if not delta:
        return "0"
    width = abs(delta)
    if interval:
        low, high = interval
        width = high - low
    first_digit = num_digits(abs(delta) * (1 + 1e-9))
    digits = max(num_digits(width) + 1, first_digit)
    return f"{delta:+.{digits}f}"


def ends(interval: Sequence[float] | None) -> str:
    """Return `-0.014 to +0.024`; empty without an interval."""
    return " to ".join(signed(end, interval) for end in interval or ())


def num_digits(error: float) -> int:
    """Return the number of decimals up to the first digit of an error, at most MAX_DIGITS."""
    return max(0, -math.floor(math.log10(max(error, 10**-MAX_DIGITS))))
