"""A loss that has become NaN or infinite: reported once, or the end of the run."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hpcdist.errors import TrainerError
from hpcdist.rank.telemetry import LossWatch


def test_loss_that_stays_nan_is_reported_once_with_its_first_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hpcdist")
    watch = LossWatch()
    watch.note({"train/loss": math.nan, "accuracy": math.nan}, 1)
    watch.note({"train/loss": math.inf, "accuracy": math.nan}, 2)
    watch.note({"train/loss": 0.5, "accuracy": math.nan}, 3)  # as after a step that a gradient scaler skips
    for step in range(4, 9):
        assert watch.finding == ("" if step < 7 else "train/loss is nan since step 4 (3 logged values in a row)")
        watch.note({"train/loss": np.float32("nan")}, step)
    assert caplog.messages == [watch.finding]


def test_limit_ends_the_training() -> None:
    watch = LossWatch(2)
    watch.note({"Loss": math.inf}, 10)
    with pytest.raises(
        TrainerError, match=r"^Loss is inf since step 10 \(2 logged.*ends the run \(stop\.nan_losses=2\): "
    ):
        watch.note({"Loss": math.inf}, 20)
