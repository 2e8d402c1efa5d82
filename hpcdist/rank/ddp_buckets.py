"""The order in which DistributedDataParallel adds gradients, made the same in every start of the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

#: With a static graph DDP watches the second backward pass, else the first.
_NUM_PASSES = 2


def settle_buckets(model: DistributedDataParallel, loss: Callable[[], Tensor]) -> None:
    """Let DDP come to its final buckets before the first step that counts; call it on every rank.

    DDP sorts gradients into new buckets once it has seen in which order they come. Where a gradient lies in its
    bucket decides in which order the ranks' parts of it are added, and with more than two ranks the order decides
    the rounding: without this, the first steps after a resume would round otherwise than those of an undisturbed run.

    Args:
        model: its weights, buffers and the generators of random numbers are left as they are.
        loss: a forward pass through `model`, with as large a batch as training has.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[] if model.device_type == "cpu" else model.device_ids):
        for _ in range(_NUM_PASSES):
            torch.autograd.backward(loss())
            model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
