"""A trainer that counts, and misbehaves where `params` say so: the supervisor's work needs no real training."""

from __future__ import annotations

import threading

from torch import nn

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context

STEP_S = 0.01


def train(ctx: Context, cfg: Config) -> None:
    """Count to `params.until`; the last rank raises at step `raise_at`, or hangs at step `hang_at`."""
    restored = ctx.restore()
    model = nn.Linear(2, 2)
    step = restored.step if restored else 0
    until = cfg.params["until"]
    is_last = ctx.rank == ctx.world_size - 1
    while step < until:
        step += 1
        threading.Event().wait(STEP_S)
        if is_last and step == cfg.params.get("raise_at"):
            raise ValueError("a mistake in the user's own code")
        if is_last and step == cfg.params.get("hang_at"):
            threading.Event().wait()
        ctx.log({"train/loss": 1 / step}, step)
        stop = ctx.should_stop(step, until)
        if ctx.should_save(step):
            ctx.save(step, model=model, trainer={})
        if stop:
            return
    ctx.end_reason = f"counted to {until}"
