"""Measurements before the first step: split points of the model and number of micro-batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hpcdist.errors import ConfigError
from hpcdist.rank.checkpointing import Restored
from hpcdist.rank.context import Context
from hpcdist.trainers.pipeline.schema import PipelineConfig
from hpcdist.trainers.pipeline.stages import cut_after, cut_evenly, measure_units, unit_names

log = logging.getLogger(__name__)

#: Numbers of micro-batches to try, if they divide the batch.
CANDIDATES = (1, 2, 4, 8, 16, 32)


def choose_cut(ctx: Context, model: nn.Module, images: Tensor, saved: Restored | None) -> list[tuple[str, ...]]:
    """Return the units of every stage: from the config, from the checkpoint, or by measured cost.

    Args:
        images: a micro-batch for the measurement.
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
    if ctx.is_main:  # its measurement is used by all ranks
        costs = measure_units(model.to(ctx.device), images.to(ctx.device))
    costs = ctx.sum_over_ranks(costs)
    stages = cut_evenly(units, costs, num_stages)
    parts = [f"{stage[-1]} {sum(costs[units.index(unit)] for unit in stage):.3g} s" for stage in stages]
    log.info("split by measured cost of a micro-batch; last unit and cost of each stage: %s", ", ".join(parts))
    return stages


def choose_micro_batches(ctx: Context, stage: nn.Module, step: Callable[[int], Any]) -> int:
    """Return the number for which `step(number)` is fastest. Gradients and running statistics are restored."""
    cfg = ctx.config
    size = cfg.data.batch_size
    numbers = [n for n in CANDIDATES if size % n == 0 and size // n > 1] or [1]
    buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    tries = []
    for number in numbers:
        times = []
        for _ in range(3):  # the first one warms up caches and allocators
            ctx.barrier()
            began = time.perf_counter()
            step(number)
            ctx.barrier()
            times.append(time.perf_counter() - began)
        # All ranks use the measurement of rank 0.
        tries.append(ctx.sum_over_ranks([min(times[1:]) if ctx.is_main else 0.0])[0])
    for name, buffer in stage.named_buffers():
        buffer.copy_(buffers[name])
    stage.zero_grad()
    chosen = numbers[tries.index(min(tries))]
    shown = ", ".join(f"{number}: {seconds:.3g} s" for number, seconds in zip(numbers, tries, strict=True))
    log.info("pipeline.num_micro_batches=auto: %d is the fastest (%s per step)", chosen, shown)
    return chosen
