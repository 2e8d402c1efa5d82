"""A trainer of an elastic run with a simulated lack of GPU memory.

From step `params.after` on, a forward pass with more than `params.fits` samples raises torch.OutOfMemoryError.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context

NUM_STEPS = 8
NUM_SAMPLES = 96


class Net(nn.Module):
    def __init__(self, fits: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.fits = fits
        self.is_limited = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_limited and len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        y: Tensor = self.layer(x)
        return y


def train(ctx: Context, cfg: Config) -> None:
    torch.manual_seed(cfg.seed)
    x, y = torch.randn(NUM_SAMPLES, 8), torch.randint(0, 3, (NUM_SAMPLES,))
    model = ctx.wrap(Net(cfg.params["fits"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in ctx.steps(NUM_STEPS, model=model, optimizer=optimizer):
        model.module.is_limited = step >= cfg.params["after"]
        for micro in ctx.elastic.micro_batches(model, step, NUM_SAMPLES):
            loss = F.cross_entropy(model(x[micro.indices]), y[micro.indices])
            (loss * micro.weight).backward()
        optimizer.step()
