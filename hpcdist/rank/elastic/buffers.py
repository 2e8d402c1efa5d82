"""Buffers of a model, such as running statistics of batch normalisation, over the micro-batches of a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BufferChanges:
    """Changes of a model's buffers during one step.

    At the start of each micro-batch the buffers are reset to their values at the beginning of the step. After the step
    they have changed by the mean of the changes, weighted by the samples, as if there were one update with the mean
    statistics. Values of type bool have changed if a micro-batch has changed them. So the buffers do not depend on
    which rank computed which micro-batch.

    A forward pass may change the buffers in place, or assign tensors of the same shape to them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.numel()}
        self._before = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}
        self.size = sum(_real(buffer).numel() for buffer in self._buffers.values())

    @torch.no_grad()
    def take(self, weight: float, dtype: torch.dtype) -> list[Tensor]:
        """Return the weighted changes by the last micro-batch as vectors, and undo them."""
        changes = []
        for name, buffer in self._buffers.items():
            before, after = self._before[name], self._module.get_buffer(name)
            changes.append(_change(_real(before), _real(after)).flatten().to(dtype) * weight)
            buffer.copy_(before)
            if after is not buffer:
                owner, _, own_name = name.rpartition(".")
                setattr(self._module.get_submodule(owner), own_name, buffer)
        return changes

    @torch.no_grad()
    def apply(self, changes: Tensor) -> None:
        """Change the buffers by the sum of all micro-batches' results of `take`, [size]."""
        buffers = [_real(buffer) for buffer in self._buffers.values()]
        for buffer, part in zip(buffers, torch.split(changes, [each.numel() for each in buffers]), strict=True):
            change = part.view_as(buffer)
            if buffer.dtype == torch.bool:
                buffer ^= change > 0
            else:
                buffer += change.to(buffer.dtype) if buffer.is_floating_point() else change.round().to(buffer.dtype)


def _real(buffer: Tensor) -> Tensor:
    """Return a complex buffer as a view with real and imaginary parts."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _change(before: Tensor, after: Tensor) -> Tensor:
    if before.dtype == torch.bool:
        return after ^ before
    # An infinite value that has not changed has no difference.
    return torch.where(after == before, torch.zeros_like(before), after - before)
