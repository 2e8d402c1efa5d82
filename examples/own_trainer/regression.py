"""A trainer in a user's module: the key `trainer` of regression.yaml names the function `train`.

cd examples/own_trainer
hpcdist run regression.yaml
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from hpcdist import Config, Context


@dataclass
class Params:
    """The section `params` of the config, which hpcdist checks and logs."""

    total_steps: int
    """Number of optimizer steps."""
    hidden: int = 32
    """Size of the hidden layer."""


def train(ctx: Context, cfg: Config, params: Params) -> None:
    """Fit a small network to a noisy sine, with checkpoints, stop requests and tracking."""
    net = nn.Sequential(nn.Linear(1, params.hidden), nn.Tanh(), nn.Linear(params.hidden, 1))
    model = ctx.wrap(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.optim.lr)

    # The loop begins at the newest checkpoint. Each rank draws its own samples in it.
    for _ in ctx.steps(params.total_steps, model=model, optimizer=optimizer):
        x = torch.rand(64, 1, device=ctx.device) * 6 - 3
        loss = F.mse_loss(model(x), torch.sin(x) + 0.05 * torch.randn_like(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.log({"train/loss": loss})

    ctx.export_model(model.module, torch.zeros(2, 1))
