"""Engines that run the micro-batches of a step through the stages: by RPC, or by torch.distributed.pipelining.

Neither uses distributed autograd, which runs one backward pass for the whole step, starts it after the last
micro-batch's forward pass, and does not control the order of micro-batches. Here each micro-batch is propagated back
as soon as its loss is known, in the thread that computes anyway. `benchmarks/pipeline.py` measures the difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor, nn

from hpcdist.rank.context import Context
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


class _Contiguous(nn.Module):
    """A stage with inputs and outputs in NCHW order, the only one that collectives support."""

    def __init__(self, stage: Stage, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.stage = stage
        self._memory_format = memory_format

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stage(x.contiguous(memory_format=self._memory_format))
        return y.contiguous()


class PipeliningEngine:
    """Runs the stages by torch.distributed.pipelining over the process group, with the methods of `RpcEngine`.

    Args:
        boundaries: example input and output of this stage, for a batch of one image.
    """

    def __init__(
        self, stage: Stage, ctx: Context, *, schedule: str, boundaries: tuple[Tensor, Tensor], channels_last: bool
    ) -> None:
        self.stage = stage
        self.idle_s = 0.0
        self._ctx = ctx
        self._kind = schedule
        self._boundaries = boundaries
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self._schedules: dict[tuple[int, int, bool], Any] = {}
        self._busy_s = 0.0

    def step(self, images: Tensor | None, labels: Tensor | None, num_micro_batches: int) -> Tensor:
        size = self._ctx.config.data.batch_size
        schedule = self._of_size(size, num_micro_batches, training=True)
        losses: list[Tensor] = []
        began, self._busy_s = time.perf_counter(), 0.0
        arguments = () if images is None else (images,)
        schedule.step(*arguments, target=labels, losses=losses if labels is not None else None)
        self.idle_s += time.perf_counter() - began - self._busy_s
        total = torch.zeros((), device=self._ctx.device)
        for loss in losses:
            total += loss.detach()
        return total

    @torch.no_grad()
    def infer(self, batches: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
        size = self._ctx.config.data.eval_batch_size
        schedule = self._of_size(size, 1, training=False)
        for images in batches:
            yield schedule.eval(*(() if images is None else (images,)))

    def _of_size(self, size: int, num_micro_batches: int, *, training: bool) -> Any:
        key = (size, num_micro_batches, training)
        if key not in self._schedules:
            self._schedules[key] = self._build(size, num_micro_batches, training=training)
        return self._schedules[key]

    def _build(self, size: int, num_micro_batches: int, *, training: bool) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(logits, labels, reduction="sum") / size

        # Without examples PipelineStage infers the shapes from a training pass over random numbers.
        stage_input, stage_output = (
            torch.empty(size // num_micro_batches, *example.shape[1:], device=self._ctx.device)
            for example in self._boundaries
        )
        part = PipelineStage(
            _Contiguous(self.stage, self._memory_format),
            self._ctx.rank,
            self._ctx.world_size,
            self._ctx.device,
            input_args=(stage_input.requires_grad_(training and self._ctx.rank > 0),),
            output_args=(stage_output.requires_grad_(training),),
        )
        self._time(part)
        kind = Schedule1F1B if training and self._kind == "1f1b" else ScheduleGPipe
        # The loss function is given on every rank: given on the last one only, the schedule hangs.
        return kind(part, num_micro_batches, loss_fn=loss if training else None, scale_grads=False)

    def _time(self, part: Any) -> None:
        """Measure the computation of the stage; the rest of a step is waiting."""

        def timed(work: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                began = time.perf_counter()
                try:
                    return work(*args, **kwargs)
                finally:
                    self._busy_s += time.perf_counter() - began

            return run

        part.forward_one_chunk = timed(part.forward_one_chunk)
        part.backward_one_chunk = timed(part.backward_one_chunk)


Engine: TypeAlias = RpcEngine | PipeliningEngine
