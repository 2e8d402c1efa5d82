"""Stages: consecutive units of a torchvision ResNet, under the parameter names of the whole model.

The units of ResNet50 are `stem`, `layer1.0`, … `layer4.2`, `head`. The model can be split between any two of them.
"""

import copy
import functools
import logging
import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from hpcdist.config.schema import Config
from hpcdist.errors import ConfigError
from hpcdist.rank.collective_check import synchronize
from hpcdist.rank.context import Context, Restored
from hpcdist.trainers.pipeline import PipelineConfig

STEM, HEAD = "stem", "head"
#: Channels of the images: stages are parts of ResNets for colour images.
RGB_CHANNELS = 3
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
    """Consecutive `units` of a ResNet, with the same parameters. Its state dict is a part of the whole model's.

    Each forward pass in training mode normalises by the statistics of its micro-batch and updates the running ones.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        super().__init__()
        self.units = tuple(units)
        for unit in units:
            for name in _PARTS.get(unit, (unit,)):
                self._register(model, name)
        # A plain list, since its modules are registered above, under the whole model's names.
        self._chain = [unit_module(model, unit) for unit in units]

    def _register(self, model: nn.Module, name: str) -> None:
        """Add the model's module `name`, such as `conv1` or `layer1.0`, to this module under the same name."""
        parent_name, _, child_name = name.rpartition(".")
        parent: nn.Module = self
        if parent_name:
            if parent_name not in self._modules:
                self.add_module(parent_name, nn.Module())
            parent = self.get_submodule(parent_name)
        parent.add_module(child_name, model.get_submodule(name))

    def forward(self, x: Tensor) -> Tensor:
        """Return activations, or logits [B, num_classes], for images or activations [B, C, H, W]."""
        for unit in self._chain:
            x = unit(x)
        return x


def use_onednn_for_pointwise(model: nn.Module) -> None:
    """Use oneDNN for 1x1 convolutions of small batches on the CPU; the result is the same.

    ATen has its own loop for them in processes with one thread and batches of fewer than 16 images
    (https://github.com/pytorch/pytorch/pull/46675 and 52909), as micro-batches have. It makes ResNet50 1.4 times
    slower for 8 images. Dilated convolutions are exempt, and dilation does not change a 1x1 kernel.
    """
    for part in model.modules():
        if isinstance(part, nn.Conv2d) and part.kernel_size == (1, 1) and part.stride == (1, 1):
            part.dilation = (2, 2)


def activation_shapes(model: nn.Module, stage_units: Sequence[Sequence[str]], image_size: int) -> list[tuple[int, ...]]:
    """Return the shape [C, H, W] of a sample after each stage but the last. Nothing is computed."""
    model = copy.deepcopy(model).to("meta").eval()
    x = torch.empty(1, RGB_CHANNELS, image_size, image_size, device="meta")
    shapes = []
    for units in stage_units[:-1]:
        for unit in units:
            x = unit_module(model, unit)(x)
        shapes.append(tuple(x.shape[1:]))
    return shapes


def cut_after(units: Sequence[str], last_units: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the stages that end with the named units or layers (`layer2`, `layer3.1`), and the last stage."""
    ends = []
    for name in last_units:
        matches = [index for index, unit in enumerate(units) if unit == name or unit.startswith(f"{name}.")]
        if not matches:
            raise ConfigError(f"pipeline.split_points: the model has no {name!r}: its units are {', '.join(units)}")
        ends.append(matches[-1] + 1)
    bounds = [0, *ends, len(units)]
    if any(end <= begin for begin, end in pairwise(bounds)):
        raise ConfigError(
            f"pipeline.split_points={list(last_units)} leaves a stage empty: name units in the model's order"
        )
    return [tuple(units[begin:end]) for begin, end in pairwise(bounds)]


def cut_evenly(units: Sequence[str], costs: Sequence[float], num_stages: int) -> list[tuple[str, ...]]:
    """Return the stages with the smallest maximum cost. Raises ConfigError if there are more stages than units."""
    if num_stages > len(units):
        raise ConfigError(f"roles.stage={num_stages}: the model can be split into {len(units)} stages at most")

    @functools.cache
    def best(count: int, end: int) -> tuple[float, list[int]]:
        """Return the maximum cost of `count` stages over the first units, up to `end`, and the bounds of the stages."""
        if count == 0:
            return 0.0, [0]
        begins = range(1)
        if count > 1:
            begins = range(count - 1, end)
        choices = []
        for begin in begins:  # of the last of these stages
            cost_before, _ = best(count - 1, begin)
            choices.append((max(cost_before, sum(costs[begin:end])), begin))
        cost, begin = min(choices)
        _, bounds_before = best(count - 1, begin)
        return cost, [*bounds_before, end]

    _, bounds = best(num_stages, len(units))
    return [tuple(units[begin:end]) for begin, end in pairwise(bounds)]


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
    synchronize(tensor.device)
    return time.perf_counter()


log = logging.getLogger(__name__)

#: Value of `pipeline.split_points` for stages of about equal measured cost.
_MEASURED = "measured"
#: Split points by number of stages if the config has none; other numbers of stages are split by measurement.
_DEFAULT_SPLIT_POINTS: dict[int, list[str]] = {1: [], 2: ["layer2"]}


def choose_stages(
    ctx: Context, cfg: Config, model: nn.Module, images: Tensor, saved: Restored | None
) -> list[tuple[str, ...]]:
    """Return the units of every stage: from the config, from the checkpoint, or by measured cost of a micro-batch."""
    units = unit_names(model)
    num_stages = cfg.roles["stage"]
    last_units = cfg.section(PipelineConfig).split_points
    if not last_units:
        last_units = _DEFAULT_SPLIT_POINTS.get(num_stages, [_MEASURED])
    if last_units != [_MEASURED]:
        if len(last_units) != num_stages - 1:
            raise ConfigError(
                f"pipeline.split_points={last_units} needs {len(last_units) + 1} stages, but roles.stage={num_stages}"
            )
        return cut_after(units, last_units)
    if saved is not None and len(saved.trainer["units"]) == num_stages:
        return [tuple(stage) for stage in saved.trainer["units"]]
    costs = [0.0] * len(units)
    if ctx.is_main:  # its measurement is used by all ranks
        costs = measure_units(model.to(ctx.device), images.to(ctx.device))
    costs = ctx.groups.sum(costs)
    stages = cut_evenly(units, costs, num_stages)
    cost_of_unit = dict(zip(units, costs, strict=True))
    parts = []
    for stage in stages:
        stage_cost_s = sum(cost_of_unit[unit] for unit in stage)
        parts.append(f"{stage[-1]} {stage_cost_s:.3g} s")
    log.info("split by measured cost of a micro-batch; last unit and cost of each stage: %s", ", ".join(parts))
    return stages
