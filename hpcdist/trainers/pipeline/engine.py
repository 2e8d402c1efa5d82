"""The engine that runs the micro-batches of a step through the stages.

Each micro-batch is propagated back as soon as its loss is known, in the thread that computes anyway: distributed
autograd, as in the tutorial, runs one backward pass for the whole step, starts it after the last micro-batch's forward
pass, and does not control the order of micro-batches. `benchmarks/pipeline.py` measures the difference.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor

from hpcdist.trainers.pipeline.stages import Stage
from hpcdist.trainers.pipeline.wire import Wire


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


#: Batches by which a stage may be ahead of the next one in `infer`; it limits the activations in memory.
MAX_BATCHES_AHEAD = 2


class StageEngine:
    """Runs this rank's stage, which is connected to its neighbours by `wire`."""

    def __init__(self, stage: Stage, wire: Wire, *, index: int, num_stages: int) -> None:
        self.stage = stage
        self._wire = wire
        self._index = index
        self._num_stages = num_stages

    @property
    def waited_s(self) -> float:
        """Seconds that the stage has waited for others, also in `infer`."""
        return self._wire.waited_s

    def step(
        self,
        images: Tensor | None,
        labels: Tensor | None,
        *,
        num_micro_batches: int,
        micro_batch_size: int,
        batch_size: int,
    ) -> Tensor:
        """Add the gradients of the batch's mean cross-entropy to the stage's parameters.

        The first stage has the images [B, 3, H, W], the last stage has the labels, int64 [B], and returns the loss; the
        others return zero. Every stage of a replica calls it with the same numbers.

        Args:
            num_micro_batches: of this replica; together they have its B samples.
            micro_batch_size: samples of each of them.
            batch_size: samples of the step in all replicas. Losses and gradients are this replica's part of their mean.
        """
        wire = self._wire
        wire.wait_until_sent()  # the tensors of the last step, which have arrived by now
        for receiver in (wire.activations, wire.next_gradients):
            if receiver is not None:
                receiver.expect(num_micro_batches, micro_batch_size)
        image_parts: tuple[Tensor, ...] = ()
        if images is not None:
            image_parts = images.split(micro_batch_size)
        label_parts: tuple[Tensor, ...] = ()
        if labels is not None:
            label_parts = labels.split(micro_batch_size)
        loss_sum = torch.zeros((), device=next(self.stage.parameters()).device)
        open_parts: dict[int, tuple[Tensor, Tensor]] = {}  # input and output of micro-batches without a backward pass
        for kind, number in one_f_one_b(self._index, self._num_stages, num_micro_batches):
            if kind == "forward":
                x = self._received_input()
                if x is None:
                    x = image_parts[number]
                y = self.stage(x.requires_grad_(images is None))
                if wire.next_activations is None:
                    y = F.cross_entropy(y, label_parts[number], reduction="sum") / batch_size
                    loss_sum += y.detach()
                else:
                    wire.next_activations.send(y)
                open_parts[number] = (x, y)
            else:
                x, y = open_parts.pop(number)
                y.backward(self._received_gradient())
                if wire.gradients is not None:
                    assert x.grad is not None, "a received activation requires a gradient"
                    wire.gradients.send(x.grad)
        return loss_sum

    def _received_input(self) -> Tensor | None:
        """Return the next activation of the stage before; None in the first stage."""
        if self._wire.activations is None:
            return None
        return self._wire.activations.receive()

    def _received_gradient(self) -> Tensor | None:
        """Return the gradient of the oldest open output; None in the last stage: its output is the loss."""
        if self._wire.next_gradients is None:
            return None
        return self._wire.next_gradients.receive()

    @torch.no_grad()
    def infer(self, batches: Iterable[Tensor | None], *, num_batches: int, batch_size: int) -> Iterator[Tensor | None]:
        """Yield the logits of each batch in the last stage, None elsewhere. The first stage has the batches."""
        wire = self._wire
        wire.wait_until_sent()
        if wire.activations is not None:
            wire.activations.expect(num_batches, batch_size)
        for images in batches:
            x = images
            if x is None:
                x = self._received_input()
            y = self.stage(x)
            if wire.next_activations is None:
                yield y
            else:
                wire.next_activations.send(y)
                wire.next_activations.wait_until_sent(except_last=MAX_BATCHES_AHEAD)
                yield None
        wire.wait_until_sent()
