"""The example in the docstring of `Context`."""

from __future__ import annotations

import re
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context


class RecordingContext:
    """Never asks for a save, and stops at `stop_at`; `saved` has the steps of the checkpoints."""

    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at
        self.logged: list[int] = []
        self.saved: list[int] = []

    def wrap(self, model: nn.Module) -> SimpleNamespace:
        return SimpleNamespace(module=model, parameters=model.parameters)

    def restore(self) -> None:
        """Return no checkpoint: the run starts."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append(step)

    def should_stop(self, step: int, total_steps: int) -> bool:
        return step == self.stop_at

    def should_save(self, step: int) -> bool:
        return step == self.stop_at

    def save(self, step: int, **_: Any) -> None:
        self.saved.append(step)


def test_example_saves_the_last_step_and_before_a_stop() -> None:
    example = re.search(r"(?s)\n(        def train\(.*?)\n\n    Attributes:", Context.__doc__ or "")
    assert example is not None
    names: dict[str, Any] = {
        "Config": Config, "Context": Context, "torch": torch,
        "build_model": lambda: nn.Linear(1, 1), "train_step": lambda model, optimizer: torch.tensor(0.5),
    }  # fmt: skip
    exec(dedent(example[1]), names)
    for stop_at, saved in ((100, [25]), (7, [7])):
        ctx = RecordingContext(stop_at)
        names["train"](ctx, Config(params={"total_steps": 25}))
        assert ctx.saved == saved
        assert ctx.logged == list(range(10, min(stop_at, 25), 10))
