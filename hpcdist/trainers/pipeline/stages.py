"""Stages: consecutive units of a torchvision ResNet, under the parameter names of the whole model, and their engine.

The units of ResNet50 are `stem`, `layer1.0`, … `layer4.2`, `head`. The model can be split between any two of them.
"""

import copy
import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor, nn

from hpcdist.config.schema import Config
from hpcdist.errors import ConfigError
from hpcdist.rank.collective_check import synchronize
from hpcdist.rank.context import Context, Restored
from hpcdist.rank.rpc import RpcGroup
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
    """Consecutive `units` of a ResNet, whose parameters it shares. Its state dict is a part of the whole model's.

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
    num_stages = ctx.world_size
    last_units = cfg.section(PipelineConfig).split_points
    if not last_units:
        last_units = _DEFAULT_SPLIT_POINTS.get(num_stages, [_MEASURED])
    if last_units != [_MEASURED]:
        if len(last_units) != num_stages - 1:
            raise ConfigError(
                f"pipeline.split_points={last_units} needs {len(last_units) + 1} stages, but roles.stage={num_stages}"
            )
        return cut_after(units, last_units)
    if saved is not None and saved.world_size == num_stages:
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


# The engine that runs the micro-batches of a step through the stages.
#
# It does not use distributed autograd, which runs one backward pass for the whole step, starts it after the last
# micro-batch's forward pass, and does not control the order of micro-batches. Here each micro-batch is propagated back
# as soon as its loss is known, in the thread that computes anyway. `benchmarks/pipeline.py` measures the difference.


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> list[tuple[str, int]]:
    """Return the passes, `forward` or `backward`, with their micro-batches, each backward pass as early as possible.

    Stage k of K then holds the activations of K - k micro-batches.

    Source: Narayanan et al. 2019 (PipeDream, arXiv:1806.03377), with a flush after each step as in Megatron-LM
    (arXiv:2104.04473): all micro-batches of a step use the same weights.
    """
    num_ahead = min(num_stages - stage - 1, num_micro_batches)
    num_alternating = num_micro_batches - num_ahead
    passes = [("forward", number) for number in range(num_ahead)]
    for number in range(num_alternating):
        passes.append(("forward", num_ahead + number))
        passes.append(("backward", number))
    passes += [("backward", number) for number in range(num_alternating, num_micro_batches)]
    return passes


def ideal_bubble(num_stages: int, num_micro_batches: int) -> float:
    """Return the fraction of a step that stages of equal speed are idle."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


#: Seconds to wait for a tensor before the sender is called to check that it is alive.
CHECK_INTERVAL_S = 1.0
#: Batches by which a stage may be ahead of the next one without gradients; it limits the activations in memory.
MAX_BATCHES_AHEAD = 2

Kind = Literal["activation", "gradient", "done"]


class Wire:
    """Connection of a stage to its two neighbours. Tensors of a kind are received in the order they are sent.

    It exists before its rank opens the RPC group, since neighbours that have opened theirs send at once.
    """

    rpc: RpcGroup

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrival = threading.Condition()
        #: Received tensors by kind and number, since RPC's threads may deliver them in another order.
        self._arrived: dict[tuple[str, int], Tensor] = {}
        self._num_sent: Counter[tuple[int, Kind]] = Counter()
        self._num_received: Counter[Kind] = Counter()
        self._pending: deque[Future[None]] = deque()
        self.waited_s = 0.0
        #: What the neighbours call.
        self.functions: dict[str, Callable[..., Any]] = {"put": self.put, "check_alive": lambda: None}

    def put(self, kind: str, number: int, tensor: Tensor) -> None:
        """Store a received tensor and wake up the thread that waits for it."""
        with self._arrival:
            self._arrived[kind, number] = tensor
            self._arrival.notify()

    def send(self, rank: int, kind: Kind, tensor: Tensor) -> None:
        """Send a tensor to a neighbour without waiting. The caller must not change it afterwards.

        Raises PeerLost or RemoteError if an earlier tensor could not be delivered.
        """
        self._check_deliveries()
        number = self._num_sent[rank, kind]
        self._num_sent[rank, kind] += 1
        self._pending.append(self.rpc.call(rank, "put", kind, number, tensor))

    def receive(self, rank: int, kind: Kind) -> Tensor:
        """Return the next tensor of a kind; each kind comes from one neighbour.

        Raises PeerLost if the neighbour is gone, and PeerLost or RemoteError if a sent tensor could not be delivered:
        the neighbour would wait for that tensor, and this rank for the neighbour.
        """
        key = kind, self._num_received[kind]
        self._num_received[kind] += 1
        began = time.perf_counter()
        while not self._wait_for(key):
            self._check_deliveries()
            self.rpc.call(rank, "check_alive").result()
        self.waited_s += time.perf_counter() - began
        return self._arrived.pop(key).to(self._device)

    def _wait_for(self, key: tuple[str, int]) -> bool:
        with self._arrival:
            return self._arrival.wait_for(lambda: key in self._arrived, CHECK_INTERVAL_S)

    def _check_deliveries(self) -> None:
        """Raise the error of the oldest delivery that has failed; a call that is not answered fails after a minute."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()


class RpcEngine:
    """Runs this rank's stage over `Wire`."""

    def __init__(self, stage: Stage, wire: Wire, *, index: int, num_stages: int) -> None:
        self.stage = stage
        self.idle_s = 0.0  #: that the stage has waited for others in `step`
        self._wire = wire
        self._index = index
        self._num_stages = num_stages
        self._is_last = index == num_stages - 1

    def step(self, images: Tensor | None, labels: Tensor | None, num_micro_batches: int) -> Tensor:
        """Add the gradients of the batch's mean cross-entropy to the stage's parameters.

        The first stage has the images [B, 3, H, W], the last stage has the labels, int64 [B], and returns the loss; the
        others return zero. Every stage calls it with the same `num_micro_batches`.
        """
        image_parts: tuple[Tensor, ...] = ()
        if images is not None:
            image_parts = images.chunk(num_micro_batches)
        label_parts: tuple[Tensor, ...] = ()
        batch_size = 0
        if labels is not None:
            label_parts = labels.chunk(num_micro_batches)
            batch_size = len(labels)
        loss_sum = torch.zeros((), device=next(self.stage.parameters()).device)
        open_parts: dict[int, tuple[Tensor, Tensor]] = {}  # input and output of micro-batches without a backward pass
        waited_s = self._wire.waited_s
        for kind, number in one_f_one_b(self._index, self._num_stages, num_micro_batches):
            if kind == "forward":
                if images is None:
                    x = self._wire.receive(self._index - 1, "activation").requires_grad_()
                else:
                    x = image_parts[number]
                y = self.stage(x)
                if self._is_last:
                    y = F.cross_entropy(y, label_parts[number], reduction="sum") / batch_size
                    loss_sum += y.detach()
                else:
                    self._wire.send(self._index + 1, "activation", y.detach())
                open_parts[number] = (x, y)
            else:
                x, y = open_parts.pop(number)
                y.backward(self._receive_output_gradient())
                if x.grad is not None:
                    self._wire.send(self._index - 1, "gradient", x.grad)
        self.idle_s += self._wire.waited_s - waited_s
        return loss_sum

    def _receive_output_gradient(self) -> Tensor | None:
        """Return the gradient of the oldest open output; None in the last stage, whose output is the loss."""
        if self._is_last:
            return None
        return self._wire.receive(self._index + 1, "gradient")

    @torch.no_grad()
    def infer(self, batches: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
        """Yield the logits of each batch in the last stage, None elsewhere. All batches have the same size."""
        num_ahead = 0
        for images in batches:
            x = images
            if x is None:
                x = self._wire.receive(self._index - 1, "activation")
            y = self.stage(x)
            if self._index > 0:
                self._wire.send(self._index - 1, "done", torch.empty(0))
            if self._is_last:
                yield y
                continue
            self._wire.send(self._index + 1, "activation", y)
            num_ahead += 1
            if num_ahead > MAX_BATCHES_AHEAD:
                self._wire.receive(self._index + 1, "done")
                num_ahead -= 1
            yield None
        for _ in range(num_ahead):
            self._wire.receive(self._index + 1, "done")
