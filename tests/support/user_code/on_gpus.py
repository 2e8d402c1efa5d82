"""`ddp`, whose rank 1 writes how it uses its GPU to `gpu.json`."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context
from hpcdist.trainers.ddp import train as ddp


def train(ctx: Context, cfg: Config) -> None:
    step = ddp.train_step

    def observed(
        ctx: Context, cfg: Config, model: Any, optimizer: Any, scaler: Any, micro_batches: Any
    ) -> dict[str, Any]:
        group: Any = dist.group.WORLD
        convolution = next(one for one in model.parameters() if one.dim() == 4)
        with ddp.autocast(ctx, cfg):
            product = convolution.flatten(1) @ convolution.flatten(1).T
        facts = {
            "device_id": str(group.bound_device_id),
            "timeout_s": group._get_backend(ctx.device).options._timeout.total_seconds(),
            "autocast": str(product.dtype),
            "scaled": scaler.is_enabled(),
            "channels_last": convolution.is_contiguous(memory_format=torch.channels_last),
            "fused": [one["fused"] for one in optimizer.param_groups],
            "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        }
        if ctx.rank == 1:
            (ctx.run.attempt(ctx.topology.attempt).path / "gpu.json").write_text(json.dumps(facts))
        return step(ctx, cfg, model, optimizer, scaler, micro_batches)

    ddp.train_step = observed
    ddp.train(ctx, cfg)
