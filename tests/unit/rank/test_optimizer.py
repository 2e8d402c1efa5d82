"""Learning rate schedules."""

from __future__ import annotations

import pytest

from hpcdist.config.schema import ScheduleConfig
from hpcdist.rank.training_loop import lr_factor


def test_learning_rate_warms_up_and_decays_as_a_cosine() -> None:
    cfg = ScheduleConfig(name="cosine", warmup_steps=4, min_lr_factor=0.1)
    factors = [lr_factor(step, 14, cfg) for step in range(15)]
    assert factors[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factors[9] == pytest.approx(0.1 + 0.9 / 2)
    assert factors[14] == pytest.approx(0.1)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert lr_factor(99, 14, cfg) == pytest.approx(0.1), "constant after the last step"
    constant = ScheduleConfig(warmup_steps=2)
    assert [lr_factor(step, 9, constant) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert lr_factor(5, 5, ScheduleConfig(name="cosine", warmup_steps=5)) == 1.0
