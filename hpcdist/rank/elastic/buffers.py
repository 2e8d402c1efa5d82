"""Buffers of a model, such as running statistics of batch normalisation, over the micro-batches of a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BufferChanges:
    """Changes of a model's buffers during one step.

    At the start of each micro-batch the buffers are reset to their values at the beginning of the step. After the step
    they have changed by the mean of the changes, weighted by the samples, as if there were one update with the mean
    statistics. So they do not depend on which rank computed which micro-batch.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [buffer for buffer in module.buffers() if buffer.dtype != torch.bool and buffer.numel()]
        self._before = [buffer.detach().clone() for buffer in self._buffers]
        self.size = sum(buffer.numel() for buffer in self._buffers)

    @torch.no_grad()
    def take(self, weight: float, dtype: torch.dtype) -> list[Tensor]:
        """Return the weighted changes by the last micro-batch as vectors, and undo them."""
        changes = []
        for buffer, before in zip(self._buffers, self._before, strict=True):
            # An infinite value that has not changed has no difference.
            change = torch.where(buffer == before, torch.zeros_like(buffer), buffer - before)
            changes.append(change.flatten().to(dtype) * weight)
            buffer.copy_(before)
        return changes

    @torch.no_grad()
    def apply(self, changes: Tensor) -> None:
        """Change the buffers by the sum of all micro-batches' results of `take`, [size]."""
        parts = torch.split(changes, [buffer.numel() for buffer in self._buffers])
        for buffer, part in zip(self._buffers, parts, strict=True):
            change = part.view_as(buffer)
            buffer += change.to(buffer.dtype) if buffer.is_floating_point() else change.round().to(buffer.dtype)
