"""The engine that runs the micro-batches of a step through the stages.

It does not use distributed autograd, which runs one backward pass for the whole step, starts it after the last
micro-batch's forward pass, and does not control the order of micro-batches. Here each micro-batch is propagated back
as soon as its loss is known, in the thread that computes anyway. `benchmarks/pipeline.py` measures the difference.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor

from hpcdist.rank.context import Context
from hpcdist.rank.rpc import RpcGroup
from hpcdist.trainers.pipeline.stages import Stage

# Schedules: the order in which a stage processes its micro-batches, and the ideal bubble.
#
# Sources: GPipe, Huang et al. 2018 (arXiv:1811.06965); 1F1B, Narayanan et al. 2019 (PipeDream, arXiv:1806.03377), with
# a flush after each step as in Megatron-LM (arXiv:2104.04473). Both are synchronous: all micro-batches of a step use
# the same weights, and their gradients are summed in the same order. So schedules differ in time and memory only.


class Action(NamedTuple):
    """A forward or backward pass of one micro-batch."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Return all forward passes, then all backward passes: each stage holds the activations of all micro-batches."""
    return [Action("forward", m) for m in range(num_micro_batches)] + [
        Action("backward", m) for m in range(num_micro_batches)
    ]


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Return each backward pass as early as possible: stage k of K holds the activations of K - k micro-batches."""
    num_ahead = min(num_stages - stage - 1, num_micro_batches)
    actions = [Action("forward", m) for m in range(num_ahead)]
    for done in range(num_micro_batches - num_ahead):
        actions += [Action("forward", num_ahead + done), Action("backward", done)]
    return actions + [Action("backward", m) for m in range(num_micro_batches - num_ahead, num_micro_batches)]


SCHEDULES: dict[str, Callable[[int, int, int], list[Action]]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def ideal_bubble(num_stages: int, num_micro_batches: int) -> float:
    """Return the fraction of a step that stages of equal speed are idle, with either schedule."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


# Point-to-point transfer of activations and gradients between pipeline stages by RPC.

#: Seconds to wait for a tensor before the sender is called to check that it is alive.
CHECK_INTERVAL_S = 1.0

Kind = Literal["activation", "gradient", "done"]


class Inbox:
    """Received tensors by kind and number, since RPC's threads may deliver them in another order.

    It exists before its rank opens the RPC group, since neighbours that have opened theirs send at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tensors: dict[tuple[str, int], tuple[Tensor, torch.cuda.Event | None]] = {}

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """What the neighbours call."""
        return {"put": self.put, "check_alive": lambda: None}

    def put(self, kind: str, number: int, tensor: Tensor) -> None:
        """Store a received tensor and wake up the thread that waits for it."""
        event = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
        with self._changed:
            self._tensors[kind, number] = (tensor, event)
            self._changed.notify()

    def wait_for(self, kind: str, number: int, timeout_s: float) -> bool:
        """Wait until the tensor is received; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: (kind, number) in self._tensors, timeout=timeout_s)

    def pop(self, kind: str, number: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Return a received tensor and the event after which its content is complete."""
        return self._tensors.pop((kind, number))


class Wire:
    """Connection of a stage to its two neighbours. Tensors of a kind are received in the order they are sent.

    Args:
        inbox: its functions are those of this rank in the group.
    """

    def __init__(self, ctx: Context, rpc: RpcGroup, inbox: Inbox) -> None:
        self._device = ctx.device
        self._rpc = rpc
        self._inbox = inbox
        self._num_sent: Counter[tuple[int, Kind]] = Counter()
        self._num_received: Counter[Kind] = Counter()
        self._pending: deque[Future[None]] = deque()
        self.waited_s = 0.0

    def send(self, rank: int, kind: Kind, tensor: Tensor) -> None:
        """Send a tensor to a neighbour without waiting. The caller must not change it afterwards.

        Raises PeerLost or RemoteError if an earlier tensor could not be delivered.
        """
        self._check_deliveries()
        number = self._num_sent[rank, kind]
        self._num_sent[rank, kind] += 1
        self._pending.append(self._rpc.call(rank, "put", kind, number, tensor))

    def receive(self, rank: int, kind: Kind) -> Tensor:
        """Return the next tensor of a kind; each kind comes from one neighbour.

        Raises PeerLost if the neighbour is gone, and PeerLost or RemoteError if a sent tensor could not be delivered:
        the neighbour would wait for that tensor, and this rank for the neighbour.
        """
        number = self._num_received[kind]
        self._num_received[kind] += 1
        began = time.perf_counter()
        while not self._inbox.wait_for(kind, number, CHECK_INTERVAL_S):
            self._check_deliveries()
            self._rpc.call(rank, "check_alive").result()
        self.waited_s += time.perf_counter() - began
        tensor, event = self._inbox.pop(kind, number)
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            tensor.record_stream(stream)
        return tensor.to(self._device)

    def _check_deliveries(self) -> None:
        """Raise the error of the oldest delivery that has failed; a call that is not answered fails after a minute."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()


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
                x = (
                    self._wire.receive(self._index - 1, "activation").requires_grad_()
                    if images is None
                    else image_parts[number]
                )
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

    @torch.no_grad()
    def infer(self, batches: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
        """Yield the logits of each batch in the last stage, None elsewhere. All batches have the same size."""
        num_ahead = 0
        for images in batches:
            y = self.stage(self._wire.receive(self._index - 1, "activation") if images is None else images)
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
