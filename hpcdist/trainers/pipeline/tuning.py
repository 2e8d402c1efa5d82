"""What the pipeline trainer measures before its first step: where to cut, and into how many micro-batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpcdist.errors import ConfigError
from hpcdist.rank.checkpointing import Restored
from hpcdist.rank.context import Context
from hpcdist.trainers.pipeline.schema import PipelineConfig
from hpcdist.trainers.pipeline.stages import cut_after, cut_evenly, measure_units, unit_module, unit_names

log = logging.getLogger(__name__)

#: Numbers of micro-batches that are tried, where they divide the batch.
CANDIDATES = (1, 2, 4, 8, 16, 32)


def choose_cut(ctx: Context, model: nn.Module, images: Tensor, saved: Restored | None) -> list[tuple[str, ...]]:
    """The units of every stage: as the config says, as the checkpoint has them, or by measured cost.

    Args:
        images: a micro-batch to measure with.
    """
    units, num_stages = unit_names(model), ctx.world_size
    ends = ctx.config.section(PipelineConfig).split_points or {1: [], 2: ["layer2"]}.get(num_stages, ["measured"])
    if ends != ["measured"]:
        if len(ends) != num_stages - 1:
            raise ConfigError(
                [f"pipeline.split_points={ends} needs {len(ends) + 1} stages, but roles.stage={num_stages}"]
            )
        return cut_after(units, ends)
    if saved is not None and saved.world_size == num_stages:
        return [tuple(stage) for stage in saved.trainer["units"]]
    costs = [0.0] * len(units)
    if ctx.is_main:  # its measure counts, so that all agree
        costs = measure_units(model.to(ctx.device), images.to(ctx.device))
    costs = ctx.sum_over_ranks(costs)
    stages = cut_evenly(units, costs, num_stages)
    parts = [f"{stage[-1]} {sum(costs[units.index(unit)] for unit in stage):.3g} s" for stage in stages]
    log.info("cut by measured cost of a micro-batch, each stage by its last unit: %s", ", ".join(parts))
    return stages


@torch.no_grad()
def boundaries(model: nn.Module, stages: Sequence[Sequence[str]], images: Tensor) -> tuple[Tensor, Tensor]:
    """What enters and what leaves the last of these stages, for the images that enter the first one."""
    enters = leaves = images.to(next(model.parameters()).device)
    model.eval()
    for stage in stages:
        enters = leaves
        for unit in stage:
            leaves = unit_module(model, unit)(leaves)
    model.train()
    return enters, leaves


def choose_micro_batches(ctx: Context, stage: nn.Module, step: Callable[[int], Any]) -> int:
    """The number of micro-batches with which `step(number)` is fastest, gradients and statistics left as they were."""
    cfg = ctx.config
    least = ctx.world_size if cfg.section(PipelineConfig).engine == "pipelining" else 1
    size = cfg.data.batch_size
    numbers = [n for n in CANDIDATES if size % n == 0 and n >= least and size // n > 1] or [least]
    buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    tries = []
    for number in numbers:
        times = []
        for _ in range(3):  # the first one is for caches and allocators
            ctx.barrier()
            began = time.perf_counter()
            step(number)
            ctx.barrier()
            times.append(time.perf_counter() - began)
        # Rank 0's clock counts, so that all agree.
        tries.append(ctx.sum_over_ranks([min(times[1:]) if ctx.is_main else 0.0])[0])
    for name, buffer in stage.named_buffers():
        buffer.copy_(buffers[name])
    stage.zero_grad()
    chosen = numbers[tries.index(min(tries))]
    shown = ", ".join(f"{number}: {seconds:.3g} s" for number, seconds in zip(numbers, tries, strict=True))
    log.info("pipeline.num_micro_batches=auto: %d is the fastest (%s a step)", chosen, shown)
    return chosen
