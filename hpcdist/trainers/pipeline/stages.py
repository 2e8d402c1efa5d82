"""A torchvision ResNet as a chain of units, and stages: pieces of that chain which keep the whole model's names.

The units of ResNet50 are `stem`, `layer1.0`, … `layer4.2`, `head`: what a cut may stand between.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpcdist.errors import ConfigError

STEM, HEAD = "stem", "head"
LAYERS = ("layer1", "layer2", "layer3", "layer4")
_PARTS = {STEM: ("conv1", "bn1", "relu", "maxpool"), HEAD: ("avgpool", "fc")}


def unit_names(model: nn.Module) -> list[str]:
    """The units of a torchvision ResNet, in order."""
    blocks = [f"{layer}.{index}" for layer in LAYERS for index, _ in model.get_submodule(layer).named_children()]
    return [STEM, *blocks, HEAD]


def unit_module(model: nn.Module, unit: str) -> nn.Module:
    """One unit as a module of its own, sharing the model's parameters."""
    if unit == HEAD:
        return nn.Sequential(model.get_submodule("avgpool"), nn.Flatten(1), model.get_submodule("fc"))
    if unit == STEM:
        return nn.Sequential(*(model.get_submodule(part) for part in _PARTS[STEM]))
    return model.get_submodule(unit)


class Stage(nn.Module):
    """A run of a ResNet's units. Its state dict holds a part of the whole model's, under the same names.

    Each forward pass in training mode normalises by its own micro-batch, and updates the running statistics by it.

    Args:
        model: a torchvision ResNet, whose parameters the stage shares.
        units: neighbours out of `unit_names(model)`.
        checkpointing: keep each unit's input alone for the backward pass, which computes the rest again
            (Chen et al. 2016, arXiv:1604.06174). Running statistics are updated once all the same.
    """

    def __init__(self, model: nn.Module, units: Sequence[str], *, checkpointing: bool = False) -> None:
        super().__init__()
        self.units = tuple(units)
        self.checkpointing = checkpointing
        for unit in units:
            for part in _PARTS.get(unit, (unit,)):
                self._adopt(part, model.get_submodule(part))
        # A plain list: what is in it is registered above, under the whole model's names.
        self._chain = [unit_module(model, unit) for unit in units]

    def _adopt(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        if parent and parent not in self._modules:
            self.add_module(parent, nn.Module())
        (self.get_submodule(parent) if parent else self).add_module(child, module)

    def forward(self, x: Tensor) -> Tensor:
        """Images or the last stage's activations [B, C, H, W] to activations, or logits [B, num_classes]."""
        for unit in self._chain:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(unit, x, use_reentrant=False, context_fn=partial(_contexts, unit))
            else:
                x = unit(x)
        return x


def _contexts(unit: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), _statistics_left_alone(unit)


@contextmanager
def _statistics_left_alone(module: nn.Module) -> Iterator[None]:
    """Have running statistics updated in copies that are thrown away: this batch has been counted."""
    kept = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    for part, buffers in kept:
        part._buffers.update({name: buffer.clone() for name, buffer in buffers.items() if buffer is not None})
    try:
        yield
    finally:
        for part, buffers in kept:
            part._buffers.update(buffers)


def use_onednn_for_pointwise(model: nn.Module) -> None:
    """Have one-pixel convolutions of small batches computed by oneDNN on the CPU; the result is the same sum.

    ATen takes a loop of its own for them when a process has one thread and the batch fewer than 16 images
    (https://github.com/pytorch/pytorch/pull/46675 and 52909), as micro-batches have: with it ResNet50 takes 1.4 times
    as long for 8 images. A dilated convolution is exempt, and dilation means nothing to a kernel of one pixel.
    """
    for part in model.modules():
        if isinstance(part, nn.Conv2d) and part.kernel_size == (1, 1) and part.stride == (1, 1):
            part.dilation = (2, 2)


# --- where to cut


def cut_after(units: Sequence[str], last_units: Sequence[str]) -> list[tuple[str, ...]]:
    """The stages that end with the named units or layers (`layer2`, `layer3.1`); the last one ends with the model.

    Raises ConfigError for a name that is no unit, and for a stage that would be empty.
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
    """The stages of which the dearest costs least. Raises ConfigError where there are more stages than units."""
    if num_stages > len(units):
        raise ConfigError([f"roles.stage={num_stages}: the model has {len(units)} units that stages can be made of"])
    # best[n][e]: the dearest of n stages over the first e units, and where the last of them begins.
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
    """Seconds that each unit takes for one micro-batch, forward and backward: the least of `repeats`, after a first.

    A copy is measured: the model's statistics and gradients stay as they are.
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
    """The time at which everything that was asked of the tensor's device is done."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
