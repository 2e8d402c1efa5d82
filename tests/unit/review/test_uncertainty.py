"""The error of a figure, and the verdict on a difference."""

from __future__ import annotations

import numpy
import pytest

from hpcdist.review.uncertainty import (
    difference_interval,
    error_of,
    is_other_data,
    mean_interval,
    student_t,
    with_error,
)
from hpcdist.run.records import DatasetRecord

TRAIN = DatasetRecord(name="digits", num_samples=1433)
TEST = DatasetRecord(name="digits", split="test", num_samples=364, digest="1a")
VAL = DatasetRecord(name="digits", split="val", num_samples=100, digest="2b")


@pytest.mark.parametrize(
    ("metric", "value", "datasets", "text"),
    [
        ("eval/accuracy", 356 / 364, (TRAIN, TEST), "0.978 ± 0.008"),
        ("accuracy", 1.0, (TRAIN, TEST), "1.000 ± 0.001"),
        ("eval/accuracy", 0.9, (DatasetRecord(name="big", split="test", num_samples=10**6),), "0.9000 ± 0.0003"),
        ("val/accuracy", 0.5, (TRAIN, TEST, VAL), "0.50 ± 0.05"),
        ("validation_accuracy", 0.5, (TRAIN, TEST, VAL), "0.50 ± 0.05"),
        ("val/accuracy", 0.5, (TRAIN, TEST), "0.5 alone"),  # the test data have another size
        ("eval/accuracy", 0.5, (TRAIN, TEST, VAL), "0.5 alone"),
        ("eval/accuracy", 0.5, (TRAIN,), "0.5 alone"),
        ("train/accuracy", 0.5, (TRAIN, TEST), "0.5 alone"),
        ("eval/balanced_accuracy", 0.5, (TRAIN, TEST), "0.5 alone"),
        ("eval/loss", 0.5, (TRAIN, TEST), "0.5 alone"),
        ("eval/accuracy", 97.8, (TRAIN, TEST), "97.8 alone"),
        *(
            ("eval/accuracy", 0.5, (DatasetRecord(name="odd", split="test", num_samples=num),), "0.5 alone")
            for num in (0, -3, 10**400)
        ),
    ],
)
def test_an_accuracy_has_the_error_of_its_test_samples(
    metric: str, value: float, datasets: tuple[DatasetRecord, ...], text: str
) -> None:
    assert with_error(value, error_of(metric, value, datasets), f"{value:g} alone") == text


NUM_PAIRS = 1000


@pytest.mark.parametrize("is_same_data", [True, False], ids=["same test samples", "other test samples"])
@pytest.mark.parametrize(("mean", "num"), [(0.978, 364), (0.7, 1000)])
def test_of_equal_runs_at_most_five_in_a_hundred_differ_clearly(mean: float, num: int, is_same_data: bool) -> None:
    random = numpy.random.default_rng(1)
    # Samples are easy or hard; two equal runs are right with the same probability.
    easy = random.beta(mean, 1 - mean, size=(2, NUM_PAIRS, num))
    is_right = random.random((2, NUM_PAIRS, num)) < (easy[:1] if is_same_data else easy)
    pairs = is_right.mean(axis=2).T.tolist()
    assert sum(is_clear(first, second, num) for first, second in pairs) <= 0.05 * NUM_PAIRS
    lower = (random.random((NUM_PAIRS, num)) < mean - 0.12).mean(axis=1).tolist()
    assert sum(is_clear(first, second, num) for (first, _), second in zip(pairs, lower, strict=True)) > 0.95 * NUM_PAIRS


@pytest.mark.parametrize("num_seeds", [2, 3, 5])
def test_of_equal_settings_at_most_five_in_a_hundred_differ_clearly(num_seeds: int) -> None:
    values = numpy.random.default_rng(3).normal(0.9, 0.01, size=(2, NUM_PAIRS, num_seeds))
    pairs = list(zip(*values.tolist(), strict=True))
    found = [mean_interval(first, second) for first, second in pairs]
    assert sum(not one[0] <= 0 <= one[1] for one in found if one) <= 0.05 * NUM_PAIRS
    better = [mean_interval(first, [value + 1.0 for value in second]) for first, second in pairs]
    assert sum(one is not None and one[0] > 0 for one in better) > 0.9 * NUM_PAIRS


def test_the_best_of_many_equal_settings_is_clearly_better_in_at_most_five_of_a_hundred_sweeps() -> None:
    num_clear = 0
    for sweep in numpy.random.default_rng(5).normal(0.9, 0.01, size=(400, 6, 5)).tolist():
        best, *others = sorted(sweep, key=sum, reverse=True)
        intervals = [mean_interval(best, one, 15) for one in others]
        num_clear += any(interval is not None and interval[1] < 0 for interval in intervals)
    assert num_clear <= 0.05 * 400


@pytest.mark.parametrize(
    ("freedom", "error", "quantile"),
    [(1, 0.05, 12.706), (2, 0.05, 4.303), (4, 0.05, 2.776), (4, 0.005, 5.598), (8, 0.001, 5.041), (30, 0.05, 2.042)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, error: float, quantile: float) -> None:
    assert student_t(freedom, error) == pytest.approx(quantile, abs=6e-4)


def test_interval_of_means_is_that_of_welch() -> None:
    # Equal variances of 4 values each: 6 degrees of freedom, t = 2.447.
    found = mean_interval([1.0, 2.0, 3.0, 4.0], [4.0, 6.0, 5.0, 7.0])
    assert found == pytest.approx((3 - 2.447 * 0.912871, 3 + 2.447 * 0.912871), abs=1e-4)
    tiny = mean_interval([0.5, 0.5 + 1e-16], [0.9, 0.9 + 2e-16])
    assert tiny is not None
    assert tiny[0] <= 0.4 <= tiny[1]
    assert mean_interval([1e-170, 2e-170], [3e-170, 4e-170]) is None, "the variance is 0"
    assert with_error(12345678.0, 2e6, "") == "1.23457e+07 ± 2e+06"
    assert mean_interval([1.0], [2.0, 3.0]) is mean_interval([1.0, 1.0], [2.0, 2.0]) is None


def is_clear(first: float, second: float, num: int) -> bool:
    low, high = difference_interval(first, num, second, num)
    return not low <= 0 <= high


def test_interval_of_a_difference_is_that_of_newcombe() -> None:
    # Newcombe 1998, table II, method 10: 56 of 70 and 48 of 80.
    assert difference_interval(48 / 80, 80, 56 / 70, 70) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_data_differ_by_digest_or_by_name_and_size() -> None:
    without = DatasetRecord(name="digits", split="test", num_samples=364)
    assert [is_other_data(TEST, other) for other in (TEST, VAL, without, None)] == [False, True, False, False]
    assert is_other_data(without, VAL)
