"""A reproducible order in which DistributedDataParallel adds gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

#: With a static graph DDP rebuilds its buckets after the second backward pass, otherwise after the first.
_NUM_PASSES = 2


def settle_buckets(model: DistributedDataParallel, loss: Callable[[], Tensor]) -> None:
    """Make DDP rebuild its buckets before the first training step. Call it on every rank.

    DDP rebuilds its buckets after it has seen the order of the gradients. The position of a gradient in its bucket
    determines the order in which the ranks' values are added, and with more than two ranks the order determines the
    rounding. Without this call the first steps after a resume are rounded differently than in an uninterrupted run.

    Args:
        model: the wrapped model; its weights and buffers and the random number generators are not changed.
        loss: runs a forward pass of `model` with a batch of the training's size, and returns the loss.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[] if model.device_type == "cpu" else model.device_ids):
        for _ in range(_NUM_PASSES):
            torch.autograd.backward(loss())
            model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
