"""`first_step.py` as a trainer of hpcdist."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

from hpcdist import Config, Context


def train(ctx: Context, cfg: Config) -> None:
    model = ctx.wrap(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,)))
    loss.backward()
    optimizer.step()
    if ctx.is_main:
        Path(cfg.params["out"]).write_text(repr(time.time()))
    ctx.end_reason = "completed one step"
