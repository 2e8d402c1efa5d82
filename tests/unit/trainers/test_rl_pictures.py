"""The pictures of an evaluation of the RL trainer, which a machine without plotting libraries lacks."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from hpcdist.trainers.rl import train


def test_missing_plotting_libraries_do_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object, **__: object) -> bytes:
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(train, "returns_plot", missing)
    monkeypatch.setattr(train, "greedy_gif", missing)
    policy: Any = SimpleNamespace(actor_state=dict, activation="tanh")
    monkeypatch.setattr(train, "Actor", lambda *_: None)
    history: Any = SimpleNamespace(evaluations=[], last_returns=[])
    ctx: Any = SimpleNamespace(artifact=None)
    problem: Any = SimpleNamespace(name="CartPole-v1")
    cfg: Any = SimpleNamespace(seed=1)
    with caplog.at_level(logging.WARNING):
        train._record(ctx, cfg, problem, policy, history)
    assert caplog.messages[0] == (
        "returns.png is not written: No module named 'matplotlib' (install matplotlib with the extra `train`)"
    )
