"""The error of a figure, and the verdict on a difference."""

import io
from dataclasses import replace

import numpy
import pytest

from hpcdist.review.uncertainty import (
    Measured,
    difference_interval,
    is_other_data,
    judge,
    mean_interval,
    npy,
    num_evaluated,
    paired_interval,
    parse_npy,
    prediction_interval,
    share_error,
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
    assert with_error(value, share_error(value, num_evaluated(metric, value, datasets)), f"{value:g} alone") == text


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
    if is_same_data:  # the results of a pair correlate by 0.5
        found = [paired_interval(*pair) or (0.0, 1.0) for pair in is_right.astype(int).transpose(1, 0, 2).tolist()]
        assert sum(not low <= 0 <= high for low, high in found) <= 0.05 * NUM_PAIRS
        unpaired = [difference_interval(first, num, second, num) for first, second in pairs]
        assert sum(high - low for low, high in found) < 0.85 * sum(high - low for low, high in unpaired)
        is_right[1] = is_right[0] & (random.random((NUM_PAIRS, num)) > 0.03)
        worse = [paired_interval(*pair) or (0.0, 1.0) for pair in is_right.astype(int).transpose(1, 0, 2).tolist()]
        assert sum(high < 0 for _, high in worse) > 0.85 * NUM_PAIRS
        num_unpaired = sum(is_clear(first, second, num) for first, second in is_right.mean(axis=2).T.tolist())
        assert num_unpaired < 0.7 * NUM_PAIRS


def test_paired_losses_that_are_equal_rarely_differ_clearly() -> None:
    random = numpy.random.default_rng(8)
    num_pairs = 4 * NUM_PAIRS  # the t interval is nearly exact, so that 1,000 pairs would often have more than 50
    losses = random.exponential(size=(num_pairs, 1, 100)) * random.lognormal(0, 0.3, size=(num_pairs, 2, 100))
    for factor, low, high in ((1.0, 0.0, 0.05), (0.8, 0.9, 1.0)):
        found = [paired_interval(first, [factor * one for one in second]) for first, second in losses.tolist()]
        assert low * num_pairs <= sum(not one[0] <= 0 <= one[1] for one in found if one) <= high * num_pairs


def test_paired_interval_is_that_of_newcombe_or_of_the_t_test() -> None:
    # Fagerland et al. 2014, airway hyper-responsiveness: both 1, only before 1, only after 7, neither 12.
    before, after = [1] * 2 + [0] * 19, [1, 0] + [1] * 7 + [0] * 12
    assert paired_interval(before, after) == pytest.approx((0.026, 0.507), abs=5e-4)
    # Differences 1, 2, 3 and 4: standard error 0.6455, 3 degrees of freedom, t = 3.182.
    expected = (2.5 - 3.182 * 0.6455, 2.5 + 3.182 * 0.6455)
    assert paired_interval([0.5, 1.5, 2.5, 3.5], [1.5, 3.5, 5.5, 7.5]) == pytest.approx(expected, abs=1e-3)
    assert paired_interval([0.5, 2.0], [1.5, 3.0]) is paired_interval([0.5], [1.5]) is None


def test_files_of_per_sample_results_are_numpy_files_that_must_have_the_mean() -> None:
    for values, kind, mean, other in (([1, 0, 1, 1], "uint8", 0.75, 0.5), ([0.5, 2.0], "float32", 1.25, 1.2501)):
        raw = npy(values)
        loaded = numpy.load(io.BytesIO(raw))
        assert (loaded.dtype.name, loaded.tolist()) == (kind, values)
        assert list(parse_npy(raw, mean * (1 + 1e-7)) or ()) == values
        assert parse_npy(raw, other) is parse_npy(raw[:-1], mean) is parse_npy(raw[:100], mean) is None
    assert parse_npy(npy([]), 0.0) is None


@pytest.mark.parametrize("num_seeds", [2, 3, 5])
def test_of_equal_settings_at_most_five_in_a_hundred_differ_clearly(num_seeds: int) -> None:
    values = numpy.random.default_rng(3).normal(0.9, 0.01, size=(2, NUM_PAIRS, num_seeds))
    pairs = list(zip(*values.tolist(), strict=True))
    found = [mean_interval(first, second) for first, second in pairs]
    assert sum(not one[0] <= 0 <= one[1] for one in found if one) <= 0.05 * NUM_PAIRS
    more = numpy.random.default_rng(4).normal(0.9, 0.01, size=(20 * NUM_PAIRS, num_seeds + 1)).tolist()
    alone = [prediction_interval([one], seeds) or (0.0, 0.0) for one, *seeds in more]
    assert sum(not low <= 0 <= high for low, high in alone) / len(alone) == pytest.approx(0.05, abs=0.004), "exact"
    better = [mean_interval(first, [value + 1.0 for value in second]) for first, second in pairs]
    assert sum(one is not None and one[0] > 0 for one in better) > 0.9 * NUM_PAIRS


def test_the_best_of_many_equal_settings_is_clearly_better_in_at_most_five_of_a_hundred_sweeps() -> None:
    num_clear = 0
    for sweep in numpy.random.default_rng(5).normal(0.9, 0.01, size=(400, 6, 5)).tolist():
        best, *others = sorted(sweep, key=sum, reverse=True)
        verdicts = [judge(Measured(values=best), Measured(values=one), 15).word for one in others]
        num_clear += "clear" in verdicts
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


def test_few_seeds_are_called_so_and_proportions_differ_by_at_most_one() -> None:
    low = Measured(values=(0.5, 0.6), metric="eval/accuracy")
    high = Measured(values=(0.8, 0.95), metric="eval/accuracy")
    found = judge(low, high)
    assert found.word == "too few seeds"
    assert found.interval is not None
    assert found.interval[1] == 1.0
    assert found.beside("b") == "too few seeds to tell from b"
    loss = replace(high, metric="eval/loss")
    assert max(judge(replace(low, metric="eval/loss"), loss).interval or ()) > 1
    assert judge(Measured(values=(0.5, 0.6, 0.7)), Measured(values=(0.6, 0.7, 0.5))).word == "within noise"
    assert judge(Measured(values=(0.5,)), Measured(values=(0.6, 0.4))).word == "too few seeds"


def test_equal_values_are_within_noise_unless_all_samples_are_equal() -> None:
    data = DatasetRecord(name="d", split="test", num_samples=4, digest="1")
    one, other = (
        Measured(values=(0.5,), data=data, num_samples=4, samples=samples) for samples in ((1, 1, 0, 0), (1, 0, 1, 0))
    )
    assert [judge(one, one).word, judge(one, other).word] == ["equal", "within noise"]
    assert judge(Measured(values=(0.5,)), Measured(values=(0.5,))).word == "equal", "the error is unknown"


def test_interval_of_a_difference_is_that_of_newcombe() -> None:
    # Newcombe 1998, table II, method 10: 56 of 70 and 48 of 80.
    assert difference_interval(48 / 80, 80, 56 / 70, 70) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_data_differ_by_digest_or_by_name_and_size() -> None:
    without = DatasetRecord(name="digits", split="test", num_samples=364)
    assert [is_other_data(TEST, other) for other in (TEST, VAL, without, None)] == [False, True, False, False]
    assert is_other_data(without, VAL)
