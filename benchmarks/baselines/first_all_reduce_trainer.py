"""`first_all_reduce.py` as a trainer of hpcdist."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from hpcdist import Config, Context


def train(ctx: Context, cfg: Config) -> None:
    dist.all_reduce(torch.ones(1))
    if ctx.is_main:
        Path(cfg.params["out"]).write_text(repr(time.time()))
    ctx.end_reason = "completed one all-reduce"
