"""Stages: consecutive units of a torchvision ResNet, under the parameter names of the whole model.

The units of ResNet50 are `stem`, `layer1.0`, … `layer4.2`, `head`. The model can be split between any two of them.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpcdist.errors import ConfigError
from hpcdist.rank.checkpointing import Restored
from hpcdist.rank.context import Context
from hpcdist.trainers.pipeline import PipelineConfig

STEM, HEAD = "stem", "head"
LAYERS = ("layer1", "layer2", "layer3", "layer4")
_PARTS = {STEM: ("conv1", "bn1", "relu", "maxpool"), HEAD: ("avgpool", "fc")}


def unit_names(model: nn.Module) -> list[str]:
    """Return the units of a torchvision ResNet, in order."""
    blocks = [f"{layer}.{index}" for layer in LAYERS for index, _ in model.get_submodule(layer).named_children()]
    return [STEM, *blocks, HEAD]


def unit_module(model: nn.Module, unit: str) -> nn.Module:
    """Return a unit as a module that shares the model's parameters."""
    if unit == HEAD:
        return nn.Sequential(model.get_submodule("avgpool"), nn.Flatten(1), model.get_submodule("fc"))
    if unit == STEM:
        return nn.Sequential(*(model.get_submodule(part) for part in _PARTS[STEM]))
    return model.get_submodule(unit)


class Stage(nn.Module):
    """Consecutive units of a ResNet. Its state dict is a part of the whole model's, with the same names.

    Each forward pass in training mode normalises by the statistics of its micro-batch and updates the running ones.

    Args:
        model: a torchvision ResNet; the stage shares its parameters.
        units: consecutive elements of `unit_names(model)`.
        checkpointing: keep only the input of each unit for the backward pass, which recomputes the rest
            (Chen et al. 2016, arXiv:1604.06174). Running statistics are still updated once.
    """

    def __init__(self, model: nn.Module, units: Sequence[str], *, checkpointing: bool = False) -> None:
        super().__init__()
        self.units = tuple(units)
        self.checkpointing = checkpointing
        for unit in units:
            for part in _PARTS.get(unit, (unit,)):
                self._adopt(part, model.get_submodule(part))
        # A plain list, since its modules are registered above, under the whole model's names.
        self._chain = [unit_module(model, unit) for unit in units]

    def _adopt(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        if parent and parent not in self._modules:
            self.add_module(parent, nn.Module())
        (self.get_submodule(parent) if parent else self).add_module(child, module)

    def forward(self, x: Tensor) -> Tensor:
        """Return activations, or logits [B, num_classes], for images or activations [B, C, H, W]."""
        for unit in self._chain:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(unit, x, use_reentrant=False, context_fn=partial(_contexts, unit))
            else:
                x = unit(x)
        return x


def _contexts(unit: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), _keep_statistics(unit)


@contextmanager
def _keep_statistics(module: nn.Module) -> Iterator[None]:
    """Discard updates of running statistics, since the first forward pass has made them."""
    kept = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    for part, buffers in kept:
        part._buffers.update({name: buffer.clone() for name, buffer in buffers.items() if buffer is not None})
    try:
        yield
    finally:
        for part, buffers in kept:
            part._buffers.update(buffers)


def use_onednn_for_pointwise(model: nn.Module) -> None:
    """Use oneDNN for 1x1 convolutions of small batches on the CPU; the result is the same.

    ATen has its own loop for them in processes with one thread and batches of fewer than 16 images
    (https://github.com/pytorch/pytorch/pull/46675 and 52909), as micro-batches have. It makes ResNet50 1.4 times
    slower for 8 images. Dilated convolutions are exempt, and dilation does not change a 1x1 kernel.
    """
    for part in model.modules():
        if isinstance(part, nn.Conv2d) and part.kernel_size == (1, 1) and part.stride == (1, 1):
            part.dilation = (2, 2)


# --- split points


def cut_after(units: Sequence[str], last_units: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the stages that end with the named units or layers (`layer2`, `layer3.1`), and the last stage.

    Raises ConfigError for an unknown unit and for an empty stage.
    """
    ends = []
    for name in last_units:
        found = [index for index, unit in enumerate(units) if unit == name or unit.startswith(f"{name}.")]
        if not found:
            raise ConfigError([f"pipeline.split_points: the model has no {name!r}: its units are {', '.join(units)}"])
        ends.append(found[-1] + 1)
    bounds = [0, *ends, len(units)]
    if any(end <= begin for begin, end in pairwise(bounds)):
        raise ConfigError(
            [f"pipeline.split_points={list(last_units)} leaves a stage empty: name units in the model's order"]
        )
    return [tuple(units[begin:end]) for begin, end in pairwise(bounds)]


def cut_evenly(units: Sequence[str], costs: Sequence[float], num_stages: int) -> list[tuple[str, ...]]:
    """Return the stages with the smallest maximum cost. Raises ConfigError if there are more stages than units."""
    if num_stages > len(units):
        raise ConfigError([f"roles.stage={num_stages}: the model can be split into {len(units)} stages at most"])
    # best[n][e]: the maximum cost of n stages over the first e units, and the first unit of the last stage.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for count in range(1, num_stages + 1):
        best.append(
            {
                end: min((max(best[-1][begin][0], sum(costs[begin:end])), begin) for begin in best[-1] if begin < end)
                for end in range(count, len(units) + 1)
            }
        )
    stages: list[tuple[str, ...]] = []
    end = len(units)
    for count in range(num_stages, 0, -1):
        begin = best[count][end][1]
        stages.insert(0, tuple(units[begin:end]))
        end = begin
    return stages


def measure_units(model: nn.Module, images: Tensor, *, repeats: int = 3) -> list[float]:
    """Return the seconds of each unit for one micro-batch, forward and backward: the minimum of `repeats`.

    It measures a copy, so that the model's statistics and gradients do not change. The first repetition warms up.
    """
    model = copy.deepcopy(model).train()
    names = unit_names(model)
    least = [float("inf")] * len(names)
    for repeat in range(repeats + 1):
        x = images
        for index, name in enumerate(names):
            unit = unit_module(model, name)
            x = x.detach().requires_grad_(index > 0)
            began = _now(x)
            y = unit(x)
            y.backward(torch.ones_like(y))
            if repeat > 0:
                least[index] = min(least[index], _now(y) - began)
            x = y
    return least


def _now(tensor: Tensor) -> float:
    """Return the time after all work of the tensor's device is done."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()


# Measurements before the first step: split points of the model and number of micro-batches.

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
