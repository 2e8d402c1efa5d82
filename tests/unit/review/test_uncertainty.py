"""The error of a result, and how results are rounded."""

import pytest
from scipy.stats import binomtest

from hpcdist.review.uncertainty import mean_text, num_evaluated, share_error, signed, with_error
from hpcdist.run.training_record import DatasetRecord

TRAIN = DatasetRecord(name="digits", num_samples=1433)
TEST = DatasetRecord(name="digits", split="test", num_samples=364, digest="1a")
VAL = DatasetRecord(name="digits", split="val", num_samples=100, digest="2b")


@pytest.mark.parametrize(
    ("metric", "value", "datasets", "text"),
    [
        ("eval/accuracy", 356 / 364, (TRAIN, TEST), "0.978 ± 0.008"),
        ("accuracy", 1.0, (TRAIN, TEST), "1.0000 ± 0.0014"),
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


@pytest.mark.parametrize(("num_correct", "num"), [(356, 364), (364, 364), (0, 5), (7, 10)])
def test_error_of_a_proportion_is_half_of_wilsons_interval(num_correct: int, num: int) -> None:
    one_standard_error = 0.6826894921370859
    interval = binomtest(num_correct, num).proportion_ci(one_standard_error, method="wilson")
    assert share_error(num_correct / num, num) == pytest.approx((interval.high - interval.low) / 2)
    assert share_error(0.5, None) is None
    assert share_error(0.5, 0) is None
    assert share_error(3.0, 10) is None


def test_values_are_rounded_by_their_errors() -> None:
    assert with_error(12345678.0, 2e6, "") == "1.23457e+07 ± 2e+06"
    assert mean_text([0.967, 0.9863, 0.9698]) == "0.974 ± 0.010 s.d. (n=3)", "0.0104"
    assert mean_text([0.978, 0.9725, 0.9588]) == "0.970 ± 0.010 s.d. (n=3)", "0.0099 has as many digits"
    assert (with_error(97.5, 1.6, ""), with_error(97.5, 1.2, ""), with_error(97.5, 14.0, "")) == (
        "98 ± 2", "97.5 ± 1.2", "98 ± 14"
    )  # fmt: skip
    assert with_error(0.5, 1e-20, "") == "0.500000000000 ± 0.000000000000"
    assert (mean_text([0.5]), mean_text([0.5, 0.5]), mean_text([])) == ("0.5 (n=1)", "0.5 (n=2)", "")
    assert (signed(0.00999, None), signed(-0.0123, (-0.5, 0.5)), signed(0.0, None)) == ("+0.0100", "-0.01", "0")
