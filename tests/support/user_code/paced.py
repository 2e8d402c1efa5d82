"""A shipped trainer whose steps take a minimum time in all attempts: `params.pace_s`; `params.paced` is the trainer."""

from __future__ import annotations

import importlib
import time

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context


def train(ctx: Context, cfg: Config) -> None:
    """Train like the trainer."""
    ask_all = ctx.should_stop

    def should_stop(step: int, total_steps: int | None = None) -> bool:
        time.sleep(cfg.params["pace_s"])
        return ask_all(step, total_steps)

    ctx.should_stop = should_stop  # type: ignore[method-assign]
    importlib.import_module(f"hpcdist.trainers.{cfg.params.get('paced', 'ddp')}.train").train(ctx, cfg)
