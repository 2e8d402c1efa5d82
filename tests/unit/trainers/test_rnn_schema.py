"""Validation of configs of `trainer: rnn`."""

from __future__ import annotations

import pytest

from hpcdist.config.loading import load_config
from hpcdist.errors import ConfigError
from hpcdist.trainers.rnn import RnnConfig


def test_shipped_config_is_valid_and_paths_are_expanded() -> None:
    config = load_config("rnn_lm", ["rnn.files=[~/text/*.txt]"])
    assert (list(config.roles), config.checkpoint.monitor_mode) == (["trainer", "parameter_server"], "min")
    assert config.section(RnnConfig).files[0].startswith("/")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "roles={server: 1, trainer: 1}",
            "roles: trainer rnn needs trainers, then parameter_servers, got server: 1, trainer: 1: set",
        ),
        ("optim.grad_accum_steps=2", "optim.grad_accum_steps=2 is not for trainer rnn: use rnn.batch_size"),
        ("rnn.dropout=1.0", r"rnn.dropout must be < 1, got 1.0"),
        ("rnn.temperature=0", "rnn.temperature must be > 0, got 0"),
        ("rnn.vocab_size=1", "rnn.vocab_size must be >= 2, got 1"),
    ],
)
def test_invalid_values_raise_config_error(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("rnn_lm", [override])


def test_tied_weights_need_equal_sizes() -> None:
    with pytest.raises(ConfigError, match=r"rnn.tie_weights needs embedding_size = hidden_size, got 64 and 128"):
        load_config("rnn_lm", ["rnn.tie_weights=true", "rnn.embedding_size=64"])
