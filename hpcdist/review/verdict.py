"""The rule by which every page compares two results, described in docs/how-to/compare-runs.md."""

import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from hpcdist.review.uncertainty import signed
from hpcdist.run.training_record import DatasetRecord

BETTER, WORSE = "better", "worse"
NOISE = "within noise"
FEW = "too few seeds"
#: Instead of a verdict, for results on different data.
OTHER_DATA = "not comparable (other data)"
#: Between the names of the two results.
_BESIDE = {
    BETTER: "better than",
    WORSE: "worse than",
    NOISE: "within noise of",
    FEW: "too few seeds to tell from",
    OTHER_DATA: "not comparable with",
}
#: Share of intervals that contain the true difference, each one by itself.
CONFIDENCE = 0.95
LEGEND = (
    "Each verdict is about one difference, at 95 %, without a correction for the number of comparisons: of 20 equal"
    " results, about one is called better or worse"
)
#: With one value there is no variance.
MIN_SEEDS = 2
_MISSING = "a verdict needs per-sample results of both runs on the same data, or two seeds of each setting that differ"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The best value of a run, or those of the seeds of a setting."""

    values: Sequence[float]
    mode: str  #: `max` or `min`: whether higher or lower values are better
    data: DatasetRecord | None = None  #: of the evaluation
    samples: Sequence[float] = ()  #: per-sample results of a run

    @property
    def mean(self) -> float:
        """The mean of the values."""
        return statistics.fmean(self.values)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The difference between two results, and whether it is more than chance."""

    delta: float
    word: str
    interval: tuple[float, float] | None = None  #: the 95 % confidence interval of delta; None if it is unknown
    method: str = ""  #: how the interval was computed, or the missing data for one

    def beside(self, other: str) -> str:
        """Return the word before the name of the other result: `within noise of B`."""
        return f"{_BESIDE[self.word]} {other}"

    @property
    def text(self) -> str:
        """The word with the difference, as `worse (-0.012)`; only the word for equal results."""
        return self._with_difference(self.word)

    def sentence(self, metric: str, other: str) -> str:
        """Return the verdict on a metric against the other result: `loss: worse than B (+0.012)`."""
        return self._with_difference(f"{metric}: {self.beside(other)}")

    def _with_difference(self, words: str) -> str:
        if not self.delta:
            return words
        return f"{words} ({signed(self.delta, self.interval)})"


def judge(base: Measured, other: Measured) -> Verdict:
    """Return the verdict on another result against `base`, of the same metric.

    This is the only function that decides. Per-sample results of the same data are paired; otherwise the seeds of
    two settings are compared.
    """
    # Means of equal values may differ by the rounding of floats.
    is_same = math.isclose(base.mean, other.mean, rel_tol=1e-12)
    delta = 0.0 if is_same else other.mean - base.mean
    if is_other_data(base.data, other.data):
        return Verdict(delta=delta, word=OTHER_DATA)
    interval = None
    method = ""
    if _have_same_samples(base, other):
        interval = _paired_interval(base.samples, other.samples)
        method = f"paired, {len(base.samples):,} samples"
    elif min(len(base.values), len(other.values)) >= MIN_SEEDS:
        interval = _interval_of_means(base.values, other.values)
        method = f"{len(other.values)} against {len(base.values)} seeds"
    if interval is None:
        return Verdict(delta=delta, word=FEW, method=_MISSING)
    return Verdict(delta=delta, word=_word(interval, other.mode), interval=interval, method=method)


def _word(interval: tuple[float, float], mode: str) -> str:
    """Return whether a difference in this interval is better, worse or within noise."""
    low, high = interval
    if low <= 0 <= high:
        return NOISE
    is_better = low > 0
    if mode == "min":
        is_better = high < 0
    return BETTER if is_better else WORSE


def _have_same_samples(first: Measured, second: Measured) -> bool:
    """Return whether both results have per-sample results of the same split of the same data."""
    if first.data is None or second.data is None or not first.data.digest:
        return False
    if (first.data.digest, first.data.split) != (second.data.digest, second.data.split):
        return False
    num_samples = len(first.samples)
    return num_samples > 0 and len(second.samples) == num_samples


def _paired_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Return the interval of the mean of `second - first`; None if the differences are equal, but not 0."""
    if list(first) == list(second):
        return 0.0, 0.0
    from scipy import stats  # its import takes longer than a second, and most pages compare nothing

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of differences without variance
        test = stats.ttest_rel(_floats(second), _floats(first))
    return _known(test.confidence_interval(CONFIDENCE))


def _interval_of_means(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Return Welch's interval of the difference of two means; None if the values do not vary."""
    from scipy import stats  # as above

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of values without variance
        test = stats.ttest_ind(_floats(second), _floats(first), equal_var=False)
    return _known(test.confidence_interval(CONFIDENCE))


def _floats(values: Sequence[float]) -> list[float]:
    """Return the values as floats: per-sample results may be bytes, and their difference 0 - 1 would be 255."""
    return [float(value) for value in values]


def _known(interval: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval; None if it is unknown: without variance, its ends are equal or not finite."""
    low, high = map(float, interval)
    if not (math.isfinite(low) and math.isfinite(high)) or low == high:
        return None
    return low, high


def is_other_data(first: DatasetRecord | None, second: DatasetRecord | None) -> bool:
    """Return whether two evaluation datasets differ: by their digests, or by name and size without them."""
    if first is None or second is None:
        return False
    if first.digest and second.digest:
        return first.digest != second.digest
    return (first.name, first.num_samples) != (second.name, second.num_samples)
