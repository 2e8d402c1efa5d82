"""How stages get each other's activations: straight from stage to stage by RPC, or by torch.distributed.pipelining.

Neither uses distributed autograd. Its backward pass is one for the whole step, begins when the last micro-batch has
come through, and takes the micro-batches as it likes. Driven by hand, each goes back as soon as its loss is known, on
the thread that computes anyway. `benchmarks/pipeline.py` measures the difference.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor, nn
from torch.distributed import rpc

from hpcdist.errors import PeerLost
from hpcdist.rank.context import Context
from hpcdist.rank.network.rpc import RpcGroup, remote
from hpcdist.trainers.pipeline.schedules import SCHEDULES
from hpcdist.trainers.pipeline.stages import Stage

#: How long a stage waits for a tensor before it asks whether the one that owes it is still there.
PULSE_S = 1.0
#: Batches that a stage may be ahead of the next one in `infer`.
MAX_AHEAD = 2

Kind = Literal["activation", "gradient", "done"]


class Engine(Protocol):
    """Runs this rank's stage together with the others."""

    stage: Stage
    idle_s: float  #: how long this stage has waited for others in `step`, in all

    def step(self, images: Tensor | None, labels: Tensor | None, num_micro_batches: int) -> Tensor:
        """Add the gradients of the batch's mean cross-entropy to the stage's parameters.

        Args:
            images: [B, 3, H, W], for the first stage; None elsewhere.
            labels: int64 [B], for the last stage; None elsewhere.

        Returns the loss in the last stage, zero elsewhere. Every stage calls it with the same number.
        """
        ...

    def infer(self, batches: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
        """Logits of each batch in the last stage, None elsewhere. All batches are of one size; no gradients."""
        ...


# --- by RPC


class _Inbox:
    """Tensors that have come, by kind and number: RPC's threads may deliver them in another order."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.tensors: dict[tuple[str, int], tuple[Tensor, torch.cuda.Event | None]] = {}


_inbox = _Inbox()


@remote
def _deliver(kind: str, number: int, tensor: Tensor) -> None:
    event = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
    with _inbox.changed:
        _inbox.tensors[kind, number] = (tensor, event)
        _inbox.changed.notify()


@remote
def _answer() -> None:
    """A sign of life."""


class Wire:
    """This stage's connections to its two neighbours. What is sent in an order is taken in that order.

    Measured on loopback: TensorPipe's shared memory takes 1.7 ms for 8 MB where gloo's send and recv take 2.7, and
    sending never waits for the receiver.

    Args:
        mapped: ranks whose GPUs tensors travel to directly; others get them through the host's memory.
    """

    def __init__(self, ctx: Context, group: RpcGroup, mapped: Iterable[int] = ()) -> None:
        self._device = ctx.device
        self._names = group.names
        self._mapped = frozenset(mapped)
        self._num_sent: Counter[tuple[int, Kind]] = Counter()
        self._num_taken: Counter[Kind] = Counter()
        self._under_way: deque[tuple[int, torch.futures.Future[None]]] = deque()
        self.waited_s = 0.0

    def send(self, rank: int, kind: Kind, tensor: Tensor) -> None:
        """Have a neighbour take the tensor, which must not be changed any more; does not wait.

        Raises PeerLost when something sent before has not arrived.
        """
        while self._under_way and self._under_way[0][1].done():
            to, future = self._under_way.popleft()
            self._wait(to, future)
        number = self._num_sent[rank, kind]
        self._num_sent[rank, kind] += 1
        if rank not in self._mapped:
            tensor = tensor.cpu()
        self._under_way.append((rank, rpc.rpc_async(self._names[rank], _deliver, (kind, number, tensor))))

    def take(self, rank: int, kind: Kind) -> Tensor:
        """The next tensor of a kind, each of which comes from one neighbour. Raises PeerLost when that is gone."""
        key = (kind, self._num_taken[kind])
        self._num_taken[kind] += 1
        began = time.perf_counter()
        while not self._has_come(key):
            self._wait(rank, rpc.rpc_async(self._names[rank], _answer))
        self.waited_s += time.perf_counter() - began
        tensor, event = _inbox.tensors.pop(key)
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            tensor.record_stream(stream)
        return tensor.to(self._device)

    def _has_come(self, key: tuple[str, int]) -> bool:
        with _inbox.changed:
            return _inbox.changed.wait_for(lambda: key in _inbox.tensors, timeout=PULSE_S)

    def _wait(self, rank: int, future: torch.futures.Future[None]) -> None:
        try:
            future.wait()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise PeerLost(f"{self._names[rank]} (rank {rank}) does not answer: {reason}") from error


class RpcEngine:
    """Drives the schedule by hand; see `Engine`."""

    def __init__(self, stage: Stage, wire: Wire, *, index: int, num_stages: int, schedule: str) -> None:
        self.stage = stage
        self.idle_s = 0.0
        self._wire = wire
        self._index = index
        self._num_stages = num_stages
        self._schedule = SCHEDULES[schedule]
        self._is_last = index == num_stages - 1

    def step(self, images: Tensor | None, labels: Tensor | None, num_micro_batches: int) -> Tensor:
        image_parts = () if images is None else images.chunk(num_micro_batches)
        label_parts = () if labels is None else labels.chunk(num_micro_batches)
        size = 0 if labels is None else len(labels)
        total = torch.zeros((), device=next(self.stage.parameters()).device)
        open_parts: dict[int, tuple[Tensor, Tensor]] = {}
        waited_s = self._wire.waited_s
        for kind, number in self._schedule(self._index, self._num_stages, num_micro_batches):
            if kind == "forward":
                x = self._take_activation().requires_grad_() if images is None else image_parts[number]
                y = self.stage(x)
                if self._is_last:
                    y = F.cross_entropy(y, label_parts[number], reduction="sum") / size
                    total += y.detach()
                else:
                    self._wire.send(self._index + 1, "activation", y.detach())
                open_parts[number] = (x, y)
            else:
                x, y = open_parts.pop(number)
                y.backward(None if self._is_last else self._wire.take(self._index + 1, "gradient"))
                if x.grad is not None:
                    self._wire.send(self._index - 1, "gradient", x.grad)
        self.idle_s += self._wire.waited_s - waited_s
        return total

    def _take_activation(self) -> Tensor:
        return self._wire.take(self._index - 1, "activation")

    @torch.no_grad()
    def infer(self, batches: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
        num_ahead = 0
        for images in batches:
            y = self.stage(self._take_activation() if images is None else images)
            if self._index > 0:
                self._wire.send(self._index - 1, "done", torch.empty(0))
            if self._is_last:
                yield y
                continue
            self._wire.send(self._index + 1, "activation", y)
            num_ahead += 1
            if num_ahead > MAX_AHEAD:
                self._wire.take(self._index + 1, "done")
                num_ahead -= 1
            yield None
        for _ in range(num_ahead):
            self._wire.take(self._index + 1, "done")


def device_maps(ctx: Context) -> dict[str, dict[Any, Any]]:
    """For each other rank with a GPU, this rank's to that one's; empty where this rank has none. A collective."""
    devices: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(devices, str(ctx.device))
    if ctx.device.type != "cuda":
        return {}
    return {
        ctx.roles.name_of(rank): {ctx.device: torch.device(device)}
        for rank, device in enumerate(devices)
        if rank != ctx.rank and device.startswith("cuda")
    }


# --- by torch.distributed.pipelining


class _Contiguous(nn.Module):
    """A stage between whose ends tensors travel in NCHW order: collectives take no other."""

    def __init__(self, stage: Stage, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.stage = stage
        self._memory_format = memory_format

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stage(x.contiguous(memory_format=self._memory_format))
        return y.contiguous()


class PipeliningEngine:
    """The same stages in torch.distributed.pipelining, over the process group; see `Engine`.

    Args:
        boundaries: what travels into and out of this stage for one image: an example of a batch of one each.
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

        # Without examples it would find the shapes out by a training pass over made-up numbers.
        enters, leaves = (
            torch.empty(size // num_micro_batches, *example.shape[1:], device=self._ctx.device)
            for example in self._boundaries
        )
        part = PipelineStage(
            _Contiguous(self.stage, self._memory_format),
            self._ctx.rank,
            self._ctx.world_size,
            self._ctx.device,
            input_args=(enters.requires_grad_(training and self._ctx.rank > 0),),
            output_args=(leaves.requires_grad_(training),),
        )
        self._time(part)
        kind = Schedule1F1B if training and self._kind == "1f1b" else ScheduleGPipe
        # On every rank: with a loss on the last one alone it hangs in silence.
        return kind(part, num_micro_batches, loss_fn=loss if training else None, scale_grads=False)

    def _time(self, part: Any) -> None:
        """Note what the stage's own work takes; the rest of a step is waiting."""

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
