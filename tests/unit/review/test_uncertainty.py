"""The error of a figure, and the verdict on a difference."""

from __future__ import annotations

import pytest

from hpcdist.review.uncertainty import error_of, with_error
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
        ("eval/accuracy", 0.5, (TRAIN, TEST, VAL), "0.5 alone"),
        ("eval/accuracy", 0.5, (TRAIN,), "0.5 alone"),
        ("train/accuracy", 0.5, (TRAIN, TEST), "0.5 alone"),
        ("eval/balanced_accuracy", 0.5, (TRAIN, TEST), "0.5 alone"),
        ("eval/loss", 0.5, (TRAIN, TEST), "0.5 alone"),
        ("eval/accuracy", 97.8, (TRAIN, TEST), "97.8 alone"),
        ("eval/accuracy", 0.5, (DatasetRecord(name="none", split="test", num_samples=0),), "0.5 alone"),
    ],
)
def test_an_accuracy_has_the_error_of_its_test_samples(
    metric: str, value: float, datasets: tuple[DatasetRecord, ...], text: str
) -> None:
    assert with_error(value, error_of(metric, value, datasets), f"{value:g} alone") == text
