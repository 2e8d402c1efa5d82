"""`pipeline`, whose rank 0 writes to `copies.json` how many tensors the simulated GPUs have copied to the host.

The numbers are those before the training steps, after them and at the end of the training, which saves a checkpoint.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context
from hpcdist.trainers.pipeline import train as pipeline


def train(ctx: Context, cfg: Config) -> None:
    step = pipeline.train_step
    counts: list[int] = []

    def count() -> None:
        torch.accelerator.synchronize()
        ctx.groups.barrier()
        counts.append((Path(os.environ["SIMGPU_FOLDER"]) / "log").read_text().count(" to the host"))
        ctx.groups.barrier()

    def counted(
        cfg: Config,
        setup: pipeline.StageSetup,
        images: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_micro_batches: int,
    ) -> dict[str, Any]:
        if not counts:
            count()
        result = step(cfg, setup, images, labels, num_micro_batches)
        if setup.progress.step == cfg.stop.max_steps:
            count()
        return result

    pipeline.train_step = counted
    pipeline.train(ctx, cfg)
    count()
    if ctx.is_main:
        (ctx.run.attempt(ctx.topology.attempt).path / "copies.json").write_text(json.dumps(counts))
