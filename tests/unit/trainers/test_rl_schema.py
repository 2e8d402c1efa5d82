"""Validation of configs of `trainer: rl`."""

from __future__ import annotations

from typing import Any

import pytest

from hpcdist.config.loading import load_config
from hpcdist.errors import ConfigError
from hpcdist.trainers.rl import RlConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_envs": 0}, "num_envs must be >= 1, got 0"),
        ({"update_epochs": 0}, "update_epochs must be >= 1, got 0"),
        ({"clip_range": 0.0}, "clip_range must be > 0, got 0"),
        ({"entropy_coef": -0.1}, "entropy_coef must be >= 0, got -0.1"),
        ({"gamma": 1.5}, "gamma must be from 0 to 1, got 1.5"),
        ({"hidden_sizes": [64, 0]}, "hidden_sizes must hold sizes >= 1, got 0"),
    ],
)
def test_invalid_values_of_the_section_raise_value_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RlConfig(**values)


def test_roles_and_gradient_accumulation_are_validated() -> None:
    config = load_config("rl_cartpole")
    assert config.roles == {"agent": 1, "observer": 2}
    with pytest.raises(ConfigError, match="needs one agent, then observers, got agent: 2, observer: 2"):
        load_config("rl_cartpole", ["roles.agent=2"])
    with pytest.raises(ConfigError, match=r"optim\.grad_accum_steps=2 is not for trainer rl: use rl\.num_minibatches"):
        load_config("rl_cartpole", ["optim.grad_accum_steps=2"])
