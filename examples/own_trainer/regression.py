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
    ctx.seed_per_rank()  # each rank draws its own samples from here on

    step = 0
    if (saved := ctx.restore()) is not None:
        model.module.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.trainer["optimizer"])
        step = saved.step

    total_steps = params.total_steps
    stop = False
    while step < total_steps and not stop:
        x = torch.rand(64, 1, device=ctx.device) * 6 - 3
        loss = F.mse_loss(model(x), torch.sin(x) + 0.05 * torch.randn_like(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % cfg.tracking.log_every_steps == 0:
            ctx.log({"train/loss": loss.item()}, step)
        stop = ctx.should_stop(step, total_steps)
        if ctx.should_save(step) or step == total_steps:
            ctx.save(step, model=model, trainer={"optimizer": optimizer.state_dict()})

    if not stop:
        ctx.export_model(model.module, torch.zeros(2, 1))
