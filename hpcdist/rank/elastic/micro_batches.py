"""The micro-batches of one optimizer step on this rank, and the sum of their gradients over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcdist.rank.elastic.buffers import BufferChanges
from hpcdist.rank.elastic.division import Division, micro_batch_seed
from hpcdist.rank.elastic.summation import Exchange, PartialSums
from hpcdist.rank.seeding import seed_everything


@dataclass(frozen=True)
class MicroBatch:
    """One of the equal parts of a global batch.

    Attributes:
        number: its number in the global batch.
        indices: its samples, int64 [n] on the CPU.
        weight: n / samples of the global batch, the factor of the mean loss of the micro-batch.
    """

    number: int
    indices: Tensor
    weight: float


class MicroBatches:
    """The micro-batches of this rank. `exact`: the order of the sum does not depend on the number of ranks."""

    def __init__(self, division: Division, *, exact: bool) -> None:
        self.division = division
        self._exact = exact

    def of_step(self, model: DistributedDataParallel, step: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a step; see `Context.micro_batches`."""
        division = self.division
        epoch, step_in_epoch = divmod(step, division.steps_per_epoch)
        batch_size = division.batch_size(step_in_epoch)
        gradients = self._gradients(model, step_in_epoch)
        share = division.share(step_in_epoch)
        order = division.order(epoch)
        for number in share:
            samples = division.samples(order, step_in_epoch, number)
            seed_everything(micro_batch_seed(division.seed, step, number))
            gradients.before(number)
            yield MicroBatch(number, samples, len(samples) / batch_size)
            gradients.after(number, len(samples) / batch_size)
        gradients.reduce()
        # All ranks draw the same numbers until the next step, and a checkpoint holds the same state of each rank.
        seed_everything(micro_batch_seed(division.seed, step, -1))

    def _gradients(self, model: DistributedDataParallel, step_in_epoch: int) -> _ExactGradients | _Gradients:
        division = self.division
        shares = [division.share(step_in_epoch, rank) for rank in range(division.world_size)]
        if self._exact:
            return _ExactGradients(model, Exchange(division.num_filled(step_in_epoch), shares), shares[division.rank])
        return _Gradients(model, shares, shares[division.rank])


class _Gradients:
    """Gradients that DDP adds during the last backward pass of the step, if every rank has one."""

    def __init__(self, model: DistributedDataParallel, shares: list[range], share: range) -> None:
        self._model = model
        self._last = share[-1] if share else None
        self._is_alone = len(shares) == 1
        self._by_ddp = all(shares) and not self._is_alone
        self._buffers = BufferChanges(model.module)
        self._changes: list[Tensor] | None = None
        model.zero_grad(set_to_none=True)
        if not share:
            # The other ranks do it in their forward passes. It is a collective operation.
            model.reducer._rebuild_buckets()

    def before(self, number: int) -> None:
        self._model.require_backward_grad_sync = self._by_ddp and number == self._last

    def after(self, number: int, weight: float) -> None:
        self._model.require_backward_grad_sync = True
        new = self._buffers.take(weight, _sum_dtype(_trained(self._model.module)))
        if self._changes is None:
            self._changes = new
        elif new:  # torch refuses empty lists, those of a model without buffers
            torch._foreach_add_(self._changes, new)

    def reduce(self) -> None:
        parameters = _trained(self._model.module)
        changes = self._changes if self._changes is not None else [_zeros(parameters, self._buffers.size)]
        if self._by_ddp or self._is_alone:
            flat = torch.cat(changes) if self._buffers.size else None
        else:
            flat = torch.cat([*_flat_gradients(parameters), *changes])
        if flat is None:
            return
        if not self._is_alone:
            dist.all_reduce(flat)
        if not (self._by_ddp or self._is_alone):
            _set_gradients(parameters, flat)
        self._buffers.apply(flat[len(flat) - self._buffers.size :])


class _ExactGradients:
    """Gradients that are summed in a fixed tree over the micro-batches, together with the changes of the buffers."""

    def __init__(self, model: DistributedDataParallel, exchange: Exchange, share: range) -> None:
        self._model = model
        self._exchange = exchange
        self._parameters = _trained(model.module)
        self._buffers = BufferChanges(model.module)
        self._sums = PartialSums(exchange.num_leaves, share)
        model.zero_grad(set_to_none=True)

    def before(self, number: int) -> None:
        self._model.require_backward_grad_sync = False

    def after(self, number: int, weight: float) -> None:
        self._model.require_backward_grad_sync = True
        changes = self._buffers.take(weight, _sum_dtype(self._parameters))
        vector = torch.cat([*_flat_gradients(self._parameters), *changes])
        self._model.zero_grad(set_to_none=True)
        self._sums.add(number, vector)

    def reduce(self) -> None:
        size = sum(parameter.numel() for parameter in self._parameters) + self._buffers.size
        vectors = self._sums.vectors()
        flat = self._exchange.sum(vectors, vectors[0] if vectors else _zeros(self._parameters, size))
        _set_gradients(self._parameters, flat)
        self._buffers.apply(flat[size - self._buffers.size :])


def sum_over_ranks(_state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are text
    """Add a bucket of gradients over the ranks; a communication hook of DDP, which otherwise averages them."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _sum_dtype(parameters: list[nn.Parameter]) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for a model in double precision."""
    return functools.reduce(torch.promote_types, {parameter.dtype for parameter in parameters}, torch.float32)


def _zeros(parameters: list[nn.Parameter], size: int) -> Tensor:
    return torch.zeros(size, device=parameters[0].device, dtype=_sum_dtype(parameters))


def _flat_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the gradients as vectors; zeros for parameters that have none."""
    dtype = _sum_dtype(parameters)
    return [
        torch.zeros(parameter.numel(), device=parameter.device, dtype=dtype)
        if parameter.grad is None
        else parameter.grad.flatten().to(dtype)
        for parameter in parameters
    ]


def _set_gradients(parameters: list[nn.Parameter], flat: Tensor) -> None:
    """Set the gradients from the start of a flat vector, in the memory format of the parameters."""
    begin = 0
    for parameter in parameters:
        part = flat[begin : begin + parameter.numel()].view(parameter.shape)
        begin += parameter.numel()
        if parameter.is_contiguous() and parameter.dtype == part.dtype:
            parameter.grad = part
        else:
            parameter.grad = torch.empty_like(parameter).copy_(part)
