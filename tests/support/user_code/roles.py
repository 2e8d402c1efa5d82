"""A trainer with roles: workers send gradients to a server, which updates the weights; with collectives, without RPC.

The ranks write their roles and hosts to `placement.json` in the attempt's folder. `params.hold_at` holds the ranks at a
step, as in `gated.py`.
"""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist
from gated import hold
from torch import nn

from hpcdist.config.schema import Config
from hpcdist.host.json_files import write_json
from hpcdist.rank.context import Context


def train(ctx: Context, cfg: Config) -> None:
    ctx.roles.require(server=1, worker=None)
    record_placement(ctx)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    (server,) = ctx.roles.ranks_of("server")
    step = 0
    if (saved := ctx.restore()) is not None:
        model.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.trainer["optimizer"])
        step = saved.step
    stop = False
    while step < cfg.params["steps"] and not stop:
        optimizer.zero_grad()
        inputs = torch.randn(8, 16)
        loss = model(inputs).square().mean() if ctx.roles.own == "worker" else 0.0 * model(inputs).sum()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.reduce(parameter.grad, dst=server)
        if ctx.roles.own == "server":
            optimizer.step()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=server)
        step += 1
        ctx.log({"train/norm": float(sum(p.detach().square().sum() for p in model.parameters()))}, step)
        if step == cfg.params.get("hold_at") and ctx.topology.attempt == 1:
            hold(ctx)
        stop = ctx.should_stop(step, cfg.params["steps"])
        if ctx.should_save(step) or step == cfg.params["steps"]:
            ctx.save(step, model=model, trainer={"optimizer": optimizer.state_dict()})
    ctx.end_reason = f"trained {step} steps"


def record_placement(ctx: Context) -> None:
    name, host = ctx.roles.name_of(ctx.rank), socket.gethostname()
    own = (ctx.rank, name, ctx.roles.own, ctx.roles.own_index, host, ctx.topology.local_rank)
    ranks: list[object] = [None] * ctx.world_size
    dist.all_gather_object(ranks, own)
    if ctx.is_main:
        write_json(ctx.run.attempt(ctx.topology.attempt).path / "placement.json", {"ranks": ranks})
