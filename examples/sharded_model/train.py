"""A model that is sharded over all ranks by FSDP2, in a loop that saves, resumes on any number of ranks, and stops.

cd examples/sharded_model
hpcdist run sharded.yaml
hpcdist resume params.total_steps=300 launch.num_ranks=1
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from hpcdist import Config, Context


class Block(nn.Module):
    """Two layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def train(ctx: Context, cfg: Config) -> None:
    """Fit the network to the sines of its inputs."""
    width = cfg.params["width"]
    model = nn.Sequential(*(Block(width) for _ in range(4)))
    mesh = ctx.mesh(shard=-1)  # all ranks; with ctx.mesh(replicate=-1, shard=8) parts on 8 ranks, and copies of them
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr)

    # Each rank saves its own part of model and optimizer, and loads its part from a checkpoint of any mesh.
    for _ in ctx.steps(cfg.params["total_steps"], model=model, optimizer=optimizer):
        x = 3 * torch.randn(32, width, device=ctx.device)
        loss = F.mse_loss(model(x), torch.sin(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.log({"train/loss": loss.detach()})
