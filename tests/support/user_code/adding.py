"""The DDP trainer, after an all-reduce with a known result."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context
from hpcdist.trainers.ddp import train as ddp


def train(ctx: Context, cfg: Config) -> None:
    """All-reduce a vector that is long enough to be sent in several pieces, then train."""
    indices = torch.arange(10_000, dtype=torch.float64)
    result = indices + ctx.rank
    dist.all_reduce(result)
    expected = ctx.world_size * indices + ctx.world_size * (ctx.world_size - 1) / 2
    if not torch.equal(result, expected):
        raise ValueError(f"rank {ctx.rank} got {result[:3].tolist()} instead of {expected[:3].tolist()}")
    ctx.log({"check/sum": float(result[0])}, 0)
    ddp.train(ctx, cfg)
