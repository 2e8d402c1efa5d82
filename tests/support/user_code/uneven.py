"""A trainer with a forward pass of `params.forward_s` seconds, on `params.slow_host` 50 % longer.

It trains until it is asked to stop.
"""

from __future__ import annotations

import socket
import time

import torch
from torch import Tensor, nn

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context


class Paced(nn.Module):
    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.forward_s)
        y: Tensor = self.layer(x)
        return y


def train(ctx: Context, cfg: Config) -> None:
    is_slow = socket.gethostname() == cfg.params.get("slow_host")
    model = ctx.wrap(Paced(cfg.params["forward_s"] * (1.5 if is_slow else 1.0)))
    step = 0
    stop = False
    while not stop:
        model(torch.ones(8, 64)).sum().backward()
        model.zero_grad()
        step += 1
        stop = ctx.should_stop(step, 100_000)
    ctx.save(step, model=model, trainer={})
