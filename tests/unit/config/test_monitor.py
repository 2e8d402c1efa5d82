"""The monitored metric, read from configs that were written by older versions, edited or damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcdist.config.loading import load_config
from hpcdist.config.written import Monitor, first_monitor, monitor_of

DEFAULT = Monitor("eval/accuracy", "max")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"checkpoint": {"monitor": "eval/loss", "monitor_mode": "min"}}, Monitor("eval/loss", "min")),
        ({"checkpoint": {"monitor": "eval/f1"}}, Monitor("eval/f1", "max")),
        ({}, DEFAULT),
        ({"checkpoint": None}, DEFAULT),
        ({"checkpoint": "often"}, DEFAULT),
        ({"checkpoint": {"monitor": ""}}, Monitor("", "max")),
        ({"checkpoint": {"monitor": 5, "monitor_mode": ["min"]}}, DEFAULT),
    ],
)
def test_defaults_replace_missing_and_damaged_values(config: dict[str, Any], expected: Monitor) -> None:
    assert monitor_of(config) == expected


def test_code_of_the_users_own_has_no_monitored_metric_by_default(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text, expected in (
        ("trainer: mine:train\n", ""),
        ("trainer: {script: [train.py]}\n", ""),
        ("trainer: mine:train\ncheckpoint: {every_steps: 5, monitor: eval/f1}\n", "eval/f1"),
        ("trainer: ddp\n", "eval/accuracy"),
        ("checkpoint: {every_steps: 5}\n", "eval/accuracy"),
    ):
        path.write_text(text)
        assert load_config(path).checkpoint.monitor == expected, text
    path.write_text("trainer: mine:train\n")
    assert load_config(path, ["checkpoint.monitor=eval/loss"]).checkpoint.monitor == "eval/loss"


def test_first_readable_config_counts(tmp_path: Path) -> None:
    damaged, other = tmp_path / "damaged.yaml", tmp_path / "config.yaml"
    damaged.write_text("- no keys")
    other.write_text("checkpoint: {monitor: eval/loss, monitor_mode: min}\n")
    assert first_monitor([tmp_path / "missing.yaml", damaged, other]) == ("eval/loss", "min")
    assert first_monitor([damaged]) == DEFAULT
