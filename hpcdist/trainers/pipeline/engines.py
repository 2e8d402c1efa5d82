"""The engine that runs the micro-batches of a step through the stages.

It does not use distributed autograd, which runs one backward pass for the whole step, starts it after the last
micro-batch's forward pass, and does not control the order of micro-batches. Here each micro-batch is propagated back
as soon as its loss is known, in the thread that computes anyway. `benchmarks/pipeline.py` measures the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor

from hpcdist.trainers.pipeline.schedules import SCHEDULES
from hpcdist.trainers.pipeline.stages import Stage
from hpcdist.trainers.pipeline.wire import Wire

#: Number of batches by which a stage may be ahead of the next one in `infer`.
MAX_AHEAD = 2


class RpcEngine:
    """Runs a schedule of this rank's stage over `Wire`.

    `idle_s` counts the seconds that the stage has waited for others in `step`.
    """

    def __init__(self, stage: Stage, wire: Wire, *, index: int, num_stages: int, schedule: str) -> None:
        self.stage = stage
        self.idle_s = 0.0
        self._wire = wire
        self._index = index
        self._num_stages = num_stages
        self._schedule = SCHEDULES[schedule]
        self._is_last = index == num_stages - 1

    def step(self, images: Tensor | None, labels: Tensor | None, num_micro_batches: int) -> Tensor:
        """Add the gradients of the batch's mean cross-entropy to the stage's parameters.

        Args:
            images: [B, 3, H, W], for the first stage; None elsewhere.
            labels: int64 [B], for the last stage; None elsewhere.

        Returns the loss in the last stage, zero elsewhere. Every stage calls it with the same `num_micro_batches`.
        """
        image_parts = () if images is None else images.chunk(num_micro_batches)
        label_parts = () if labels is None else labels.chunk(num_micro_batches)
        size = 0 if labels is None else len(labels)
        total = torch.zeros((), device=next(self.stage.parameters()).device)
        open_parts: dict[int, tuple[Tensor, Tensor]] = {}
        waited_s = self._wire.waited_s
        for kind, number in self._schedule(self._index, self._num_stages, num_micro_batches):
            if kind == "forward":
                x = self._receive_activation().requires_grad_() if images is None else image_parts[number]
                y = self.stage(x)
                if self._is_last:
                    y = F.cross_entropy(y, label_parts[number], reduction="sum") / size
                    total += y.detach()
                else:
                    self._wire.send(self._index + 1, "activation", y.detach())
                open_parts[number] = (x, y)
            else:
                x, y = open_parts.pop(number)
                y.backward(None if self._is_last else self._wire.receive(self._index + 1, "gradient"))
                if x.grad is not None:
                    self._wire.send(self._index - 1, "gradient", x.grad)
        self.idle_s += self._wire.waited_s - waited_s
        return total

    def _receive_activation(self) -> Tensor:
        return self._wire.receive(self._index - 1, "activation")

    @torch.no_grad()
    def infer(self, batches: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
        """Yield the logits of each batch in the last stage, None elsewhere. All batches have the same size."""
        num_ahead = 0
        for images in batches:
            y = self.stage(self._receive_activation() if images is None else images)
            if self._index > 0:
                self._wire.send(self._index - 1, "done", torch.empty(0))
            if self._is_last:
                yield y
                continue
            self._wire.send(self._index + 1, "activation", y)
            num_ahead += 1
            if num_ahead > MAX_AHEAD:
                self._wire.receive(self._index + 1, "done")
                num_ahead -= 1
            yield None
        for _ in range(num_ahead):
            self._wire.receive(self._index + 1, "done")
