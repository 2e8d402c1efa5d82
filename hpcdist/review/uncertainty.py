"""The error of a figure, and whether two figures differ by more than chance; methods: docs/how-to/compare-runs.md."""

import math
import re
import statistics
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcdist.run.records import DatasetRecord

#: Metrics that are a number of correct samples by the number of samples.
_PROPORTION = re.compile(r"((eval|evaluation|test|val|valid|validation|dev)[/_.])?accuracy")
_TRAINING = ("train", "training")
#: Names of a split that mean the same data; `eval` may mean either.
_SPLITS = (("test",), ("val", "valid", "validation", "dev"))
MAX_SAMPLES = 10**15
#: Limit of per-sample results.
MAX_RESULTS = 1_000_000
#: Larger values, of diverged runs, have no useful mean.
LARGEST_VALUE = 1e75
LEGEND = "± alone: standard error, from the number of test samples; ± with s.d.: standard deviation over n seeds"

CLEAR, NOISE, EQUAL, FEW = "clear", "within noise", "equal", "too few seeds"
OTHER_DATA, NO_ERROR = "not comparable (other data)", "error unknown"
_BESIDE = {
    CLEAR: "clear of",
    EQUAL: "equal to",
    FEW: "too few seeds to tell from",
    OTHER_DATA: "not comparable with",
    NO_ERROR: "error unknown against",
}
#: With fewer seeds on a side, a difference that is not clear says little: so does a standard deviation of two values.
MIN_SEEDS = 3
UNPAIRED = "unpaired; without per-sample results, a small difference on the same data counts as noise"
_MISSING = "error unknown without per-sample results, the number of test samples, or several seeds that differ"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The best value of a run, or those of the seeds of a setting, and what is known about their errors."""

    values: Sequence[float]
    metric: str = ""  #: the name of the metric
    data: DatasetRecord | None = None  #: of the evaluation
    num_samples: int | None = None  #: of which the value of a run is a proportion
    samples: Sequence[float] = ()  #: per-sample results of a run

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def is_share(self) -> bool:
        """Whether the values are proportions."""
        return _PROPORTION.fullmatch(self.metric) is not None and all(0 <= value <= 1 for value in self.values)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The difference between two means, and whether it is more than chance."""

    delta: float
    word: str
    interval: tuple[float, float] | None = None  #: of 95 % of delta; None if the error is unknown
    method: str = ""  #: of the interval, or what is missing for one
    num_pairs: int = 1  #: see `judge`

    def beside(self, other: str) -> str:
        """Return `within noise of B`."""
        return f"{_BESIDE.get(self.word, f'{self.word} of')} {other}"

    @property
    def between(self) -> str:
        """Return `95 %: -0.014 to +0.024 (paired, 364 samples)`, or why there is no interval."""
        return f"95 %: {ends(self.interval)} ({self.method}{among(self.num_pairs)})" if self.interval else self.method

    @property
    def text(self) -> str:
        """Return `+0.003`."""
        return signed(self.delta, self.interval)

    @property
    def difference(self) -> str:
        """Return `+0.003 (paired)`."""
        return self.text + (f" ({short(self.method)})" if self.interval and self.method else "")


def judge(first: Measured, second: Measured, num_pairs: int = 1) -> Verdict:
    """Compare the second with the first; all verdicts are made here.

    95 % is the probability that the intervals of all `num_pairs` pairs are right (Bonferroni).
    """
    # A mean of seeds and the value of a run may differ by the rounding of floats alone.
    delta = 0.0 if math.isclose(first.mean, second.mean, rel_tol=1e-12) else second.mean - first.mean
    one, other = len(first.values), len(second.values)
    if is_other_data(first.data, second.data):
        return Verdict(delta=delta, word=OTHER_DATA)
    interval, method = None, f"{one} against {other} seeds"
    if one > 1 and other > 1:
        interval = mean_interval(first.values, second.values, num_pairs)
    elif one > 1 or other > 1:
        interval, method = (
            prediction_interval(first.values, second.values, num_pairs),
            f"1 run against {one + other - 1} seeds",
        )
    elif first.samples and second.samples and _same_samples(first.data, second.data):
        method = f"paired, {len(first.samples):,} samples"
        if first.samples == second.samples:
            return Verdict(delta=0.0, word=EQUAL, method=method)
        interval = paired_interval(first.samples, second.samples, num_pairs)
    elif first.num_samples and second.num_samples:
        sizes, method = (first.num_samples, second.num_samples), UNPAIRED
        interval = difference_interval(first.mean, sizes[0], second.mean, sizes[1], num_pairs)
    if interval is not None and first.is_share and second.is_share:
        interval = max(-1.0, interval[0]), min(1.0, interval[1])
    if interval is None:
        word = NO_ERROR if delta else EQUAL
    elif not interval[0] <= 0 <= interval[1]:
        word = CLEAR
    else:
        word = NOISE if max(one, other) == 1 or min({one, other} - {1}) >= MIN_SEEDS else FEW
    return Verdict(
        delta=delta,
        word=word,
        interval=interval,
        method=_MISSING if interval is None else method,
        num_pairs=num_pairs,
    )


def among(num_pairs: int) -> str:
    """Return `, for 9 comparisons`: an interval is wider if several are to be right at once."""
    return f", for {num_pairs} comparisons" if num_pairs > 1 else ""


def short(method: str) -> str:
    """Return `paired` of `paired, 364 samples`."""
    return re.split("[,;]", method)[0]


def _same_samples(first: DatasetRecord | None, second: DatasetRecord | None) -> bool:
    if first is None or second is None or not first.digest:
        return False
    return (first.digest, first.split) == (second.digest, second.split)


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
    num = data.num_samples if data is not None and is_proportion else None
    return num if num is not None and 0 < num < MAX_SAMPLES else None


def share_error(value: float, num: int | None) -> float | None:
    """Return the standard error of a proportion, half the width of Wilson's interval; None if `num` is unknown."""
    if num is None:
        return None
    low, high = wilson(value, num, 1.0)
    return (high - low) / 2


def difference_interval(
    first: float, num_first: int, second: float, num_second: int, num_pairs: int = 1, *, correlation: float = 0.0
) -> tuple[float, float]:
    """Return Newcombe's interval of `second - first`, proportions of so many samples, which may correlate."""
    z = statistics.NormalDist().inv_cdf(1 - 0.025 / num_pairs)
    low_1, high_1 = wilson(first, num_first, z)
    low_2, high_2 = wilson(second, num_second, z)
    delta, rest = second - first, math.sqrt(max(0.0, 1 - correlation**2))
    below, above = (second - low_2, high_1 - first), (high_2 - second, first - low_1)
    down, up = (math.hypot(one - correlation * other, rest * other) for one, other in (below, above))
    return delta - down, delta + up


def _npy_head(kind: str, num: int) -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({num},), }}"
    return b"\x93NUMPY\x01\x00\x76\x00" + f"{text:<117}\n".encode()


def npy(values: Sequence[float]) -> bytes:
    """Return an .npy file of per-sample results: uint8 if all are 0 or 1, else float32 [n]."""
    if {*values} <= {0, 1}:
        return _npy_head("|u1", len(values)) + bytes(map(int, values))
    return _npy_head("<f4", len(values)) + array("f", values).tobytes()


def parse_npy(raw: bytes, mean: float) -> Sequence[float] | None:
    """Return the results in a file of `npy`; None if it is another file, or their mean is not `mean`."""
    for kind, code in ("|u1", "B"), ("<f4", "f"):
        num, rest = divmod(len(raw) - 128, array(code).itemsize)
        if num > 0 and not rest and raw[:128] == _npy_head(kind, num):
            values: Sequence[float] = array(code, raw[128:])
            # The trainer may have rounded the mean otherwise, but by less than one correct sample.
            tolerance = 0.5 / num if code == "B" else 1e-5 * abs(mean)
            return values if abs(statistics.fmean(values) - mean) < tolerance else None
    return None


def paired_interval(first: Sequence[float], second: Sequence[float], num_pairs: int = 1) -> tuple[float, float] | None:
    """Return the interval of 95 % of the mean of `second - first`, results of the same samples in the same order.

    Of results 0 and 1 it is Newcombe's for paired proportions, of others that of the paired t test; None if the
    differences do not vary. `num_pairs` is that of `judge`.
    """
    num = len(first)
    if not {*first, *second} <= {0, 1}:
        differences = [after - before for before, after in zip(first, second, strict=True)]
        mean, freedom = statistics.fmean(differences), max(1, num - 1)
        variance = math.fsum((one - mean) ** 2 for one in differences) / freedom
        half = student_t(freedom, 0.05 / num_pairs) * math.sqrt(variance / num)
        return (mean - half, mean + half) if half else None
    ones, others = sum(first), sum(second)
    both = sum(before * after for before, after in zip(first, second, strict=True))
    covariance = both * (num - ones - others + both) - (ones - both) * (others - both)
    if covariance > 0:  # Newcombe's correction for continuity
        covariance = max(0, covariance - num / 2)
    product = ones * (num - ones) * others * (num - others)
    correlation = covariance / math.sqrt(product) if product else 0.0
    return difference_interval(ones / num, num, others / num, num, num_pairs, correlation=correlation)


def student_t(freedom: int, error: float) -> float:
    """Return the quantile of Student's t distribution that `error` of all values exceed on both sides."""
    from scipy.special import stdtrit  # slow to import; MLflow requires SciPy

    return float(stdtrit(freedom, 1 - error / 2))


def mean_interval(first: Sequence[float], second: Sequence[float], num_pairs: int = 1) -> tuple[float, float] | None:
    """Return Welch's interval of the difference of two means; None if the values do not vary."""
    if min(len(first), len(second)) < 2:
        return None
    variances = [statistics.variance(values) / len(values) for values in (first, second)]
    if not (total := sum(variances)):
        return None
    # Of shares: squares of tiny variances would be 0.
    shares = [variance / total for variance in variances]
    freedom = int(1 / (shares[0] ** 2 / (len(first) - 1) + shares[1] ** 2 / (len(second) - 1)) + 1e-9)
    half = student_t(freedom, 0.05 / num_pairs) * math.sqrt(total)
    delta = statistics.fmean(second) - statistics.fmean(first)
    return delta - half, delta + half


def prediction_interval(
    first: Sequence[float], second: Sequence[float], num_pairs: int = 1
) -> tuple[float, float] | None:
    """Return the interval of the difference of a single value and a mean of others; None if these do not vary.

    A further value of a normal distribution lies so far from the mean of n values that were drawn from it:
    t · s · √(1 + 1/n).
    """
    seeds = max(first, second, key=len)
    delta, num = statistics.fmean(second) - statistics.fmean(first), len(seeds)
    half = student_t(num - 1, 0.05 / num_pairs) * statistics.stdev(seeds) * math.sqrt(1 + 1 / num)
    return (delta - half, delta + half) if half else None


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
