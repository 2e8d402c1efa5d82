"""The verdict on a difference."""

from array import array
from collections.abc import Sequence

import numpy
import pytest

from hpcdist.review.verdict import Measured, Verdict, is_other_data, judge
from hpcdist.run.training_record import DatasetRecord

TEST = DatasetRecord(name="digits", split="test", num_samples=364, digest="1a")
VAL = DatasetRecord(name="digits", split="val", num_samples=100, digest="2b")
NUM_PAIRS = 400


def seeds(*values: float, mode: str = "max") -> Measured:
    return Measured(values=values, mode=mode)


def run(samples: Sequence[float], data: DatasetRecord = TEST, mode: str = "max") -> Measured:
    return Measured(values=(float(numpy.mean(samples)),), mode=mode, data=data, samples=samples)


def share_of(verdicts: list[Verdict], *words: str) -> float:
    return sum(one.word in words for one in verdicts) / len(verdicts)


def test_seeds_have_welchs_interval() -> None:
    # Equal variances of 4 values each: 6 degrees of freedom, t = 2.447.
    found = judge(seeds(1.0, 2.0, 3.0, 4.0), seeds(4.0, 6.0, 5.0, 7.0))
    assert found.interval == pytest.approx((3 - 2.447 * 0.912871, 3 + 2.447 * 0.912871), abs=1e-4)
    assert (found.word, found.text, found.method) == ("better", "better (+3.0)", "4 against 4 seeds")
    assert found.beside("b") == "better than b"


def test_same_samples_have_the_interval_of_the_paired_t_test() -> None:
    # Differences 1, 2, 3 and 4: standard error 0.6455, 3 degrees of freedom, t = 3.182.
    found = judge(run([0.5, 1.5, 2.5, 3.5]), run([1.5, 3.5, 5.5, 7.5]))
    assert found.interval == pytest.approx((2.5 - 3.182 * 0.6455, 2.5 + 3.182 * 0.6455), abs=1e-3)
    assert (found.word, found.method) == ("better", "paired, 4 samples")
    correct = judge(run(array("B", [1, 0] * 50)), run(array("B", [0, 0] * 50)))
    assert (correct.word, correct.delta) == ("worse", -0.5), "bytes do not wrap around"


@pytest.mark.parametrize(("mode", "word"), [("max", "better"), ("min", "worse")])
def test_mode_says_whether_a_higher_value_is_better(mode: str, word: str) -> None:
    low, high = seeds(0.1, 0.2, 0.15, mode=mode), seeds(0.9, 0.8, 0.85, mode=mode)
    assert judge(low, high).word == word
    assert judge(high, low).word == {"better": "worse", "worse": "better"}[word]


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        (seeds(0.5, 0.6, 0.7), seeds(0.6, 0.7, 0.5), "within noise"),
        (run([1, 1, 0, 0]), run([1, 0, 1, 0]), "within noise"),
        (run([1, 1, 0, 0]), run([1, 1, 0, 0]), "within noise"),
        (run([0.5, 0.5]), run([0.7, 0.7]), "too few seeds"),  # the differences do not vary
        (seeds(0.5, 0.5), seeds(0.7, 0.7), "too few seeds"),
        (seeds(0.5), seeds(0.6, 0.4, 0.5), "too few seeds"),
        (seeds(0.5), seeds(0.5), "too few seeds"),
        (run([1, 0]), run([1, 1], DatasetRecord(name="digits", split="val", digest="1a")), "too few seeds"),
        (run([1, 0]), run([1, 1, 0]), "too few seeds"),
        (run([1, 0]), run([1, 1], VAL), "not comparable (other data)"),
    ],
)
def test_words_of_differences_that_are_not_clear(first: Measured, second: Measured, word: str) -> None:
    found = judge(first, second)
    assert found.word == word
    assert (found.interval is None) == (word != "within noise")


def test_false_positive_rate_is_about_five_percent() -> None:
    random = numpy.random.default_rng(3)
    values = random.normal(0.9, 0.01, size=(2, NUM_PAIRS, 5))
    equal = [judge(seeds(*first), seeds(*second)) for first, second in zip(*values.tolist(), strict=True)]
    assert 0 < share_of(equal, "better", "worse") <= 0.07
    values[1] += 1
    higher = [judge(seeds(*first), seeds(*second)) for first, second in zip(*values.tolist(), strict=True)]
    assert share_of(higher, "better") > 0.9
    # Samples are easy or hard; two equal runs are right with the same probability.
    easy = random.beta(0.9, 0.1, size=(1, NUM_PAIRS, 364))
    is_right = (random.random((2, NUM_PAIRS, 364)) < easy).astype(int)
    equal = [judge(run(first), run(second)) for first, second in zip(*is_right.tolist(), strict=True)]
    assert 0 < share_of(equal, "better", "worse") <= 0.07
    is_right[1] = is_right[0] & (random.random((NUM_PAIRS, 364)) > 0.05)
    lower = [judge(run(first), run(second)) for first, second in zip(*is_right.tolist(), strict=True)]
    assert share_of(lower, "worse") > 0.9


def test_data_differ_by_digest_or_by_name_and_size() -> None:
    without = DatasetRecord(name="digits", split="test", num_samples=364)
    assert [is_other_data(TEST, other) for other in (TEST, VAL, without, None)] == [False, True, False, False]
    assert is_other_data(without, VAL)
