"""Counts as `counting` does, but for one seed that it cannot bear until somebody mends this file."""

from __future__ import annotations

import counting

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context

BAD_SEED = 2


def train(ctx: Context, cfg: Config) -> None:
    """Count to `params.until`; raise at once for the bad seed."""
    if cfg.seed == BAD_SEED:
        raise ValueError(f"cannot bear seed {cfg.seed}")
    counting.train(ctx, cfg)
