"""The connections of a stage to its neighbours by process groups: NCCL between GPUs, gloo between CPUs.

Activations and gradients have a group each for every pair of neighbours. A group of NCCL executes its operations in the
order in which they are called: in a common group, a stage that sends the next activation would wait for a neighbour
that sends a gradient, and neither would receive. `batch_isend_irecv` would also avoid this, but ties each transfer to
one of the other direction, and so delays the tensor that is ready first.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.rank.step_timing import clock_of
from hpcdist.trainers.pipeline.mesh import StageMesh


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view [numel] of a tensor without gaps in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


class Sender:
    """Sends tensors to a neighbour without waiting; the neighbour receives them in the same order."""

    def __init__(self, group: dist.ProcessGroup, to_rank: int, memory_format: torch.memory_format) -> None:
        self._group = group
        self._to_rank = to_rank
        self._memory_format = memory_format
        #: Tensors must live until they are sent.
        self._pending: deque[tuple[Any, Tensor]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Send a tensor [N, C, H, W]. The caller must not change it afterwards."""
        tensor = tensor.detach().contiguous(memory_format=self._memory_format)
        work = dist.isend(in_memory_order(tensor), dst=self._to_rank, group=self._group)
        self._pending.append((work, tensor))

    def wait_until_sent(self, *, except_last: int = 0) -> None:
        """Wait until the neighbour has received all tensors, except for a number of the last ones."""
        while len(self._pending) > except_last:
            work, _ = self._pending.popleft()
            work.wait()


class Receiver:
    """Receives the tensors of a neighbour. While the caller works on one of them, the next one can arrive."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        from_rank: int,
        sample_shape: Sequence[int],
        memory_format: torch.memory_format,
        device: torch.device,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._group = group
        self._from_rank = from_rank
        self._sample_shape = sample_shape
        self._memory_format = memory_format
        self._device = device
        self._waiting = waiting
        self._clock = clock_of(device)
        self._waits: deque[list[Any]] = deque()  #: begin and end of waits that the device may not have passed
        self._waited_s = 0.0
        self._num_expected = 0
        self._num_samples = 0
        self._next: tuple[Any, Tensor] | None = None

    def expect(self, num_tensors: int, num_samples: int) -> None:
        """Prepare to receive this number of tensors, each of this number of samples."""
        assert self._next is None, "all tensors that were expected before have been received"
        self._num_expected = num_tensors
        self._num_samples = num_samples
        self._begin_next()

    def _begin_next(self) -> None:
        self._next = None
        if self._num_expected == 0:
            return
        self._num_expected -= 1
        shape = (self._num_samples, *self._sample_shape)
        tensor = torch.empty(shape, device=self._device, memory_format=self._memory_format)
        work = dist.irecv(in_memory_order(tensor), src=self._from_rank, group=self._group)
        self._next = work, tensor

    def receive(self) -> Tensor:
        """Return the next tensor [N, C, H, W]. On a GPU the stream waits for it, and the host does not."""
        assert self._next is not None, "a tensor is expected"
        work, tensor = self._next
        self._begin_next()
        began = self._clock.mark()
        with self._waiting():
            work.wait()
        self._waits.append([began, self._clock.mark()])
        return tensor

    @property
    def waited_s(self) -> float:
        """Seconds that this rank, or its GPU, has waited for tensors, as far as the GPU has got."""
        while self._waits:
            seconds = self._clock.measure(self._waits[0])
            if seconds is None:
                break
            self._waited_s += seconds[0]
            self._waits.popleft()
        return self._waited_s


class Wire:
    """The connections of a stage to the next and to the previous stage of its replica; None where there is none.

    Call it on every rank, with the same shapes.

    Args:
        shapes: shape [C, H, W] of a sample after each stage but the last.
        timeout: time limit of one transfer.
        waiting: a block in which this rank waits for a neighbour, such as `ctx.timer.waiting`.
    """

    def __init__(
        self,
        mesh: StageMesh,
        device: torch.device,
        shapes: Sequence[Sequence[int]],
        memory_format: torch.memory_format,
        timeout: timedelta,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.next_activations: Sender | None = None
        self.next_gradients: Receiver | None = None
        self.activations: Receiver | None = None
        self.gradients: Sender | None = None
        for replica in range(mesh.num_replicas):
            # Every rank takes part in the creation of every group.
            for shape, (before, after) in zip(shapes, pairwise(mesh.ranks_of_replica(replica)), strict=True):
                forward = dist.new_group([before, after], timeout)
                backward = dist.new_group([before, after], timeout)
                if not (isinstance(forward, dist.ProcessGroup) and isinstance(backward, dist.ProcessGroup)):
                    continue  # placeholders on the other ranks
                if mesh.rank == before:
                    self.next_activations = Sender(forward, after, memory_format)
                    self.next_gradients = Receiver(backward, after, shape, memory_format, device, waiting)
                else:
                    self.activations = Receiver(forward, before, shape, memory_format, device, waiting)
                    self.gradients = Sender(backward, before, memory_format)

    def wait_until_sent(self) -> None:
        """Wait until the neighbours have received all tensors."""
        for sender in (self.next_activations, self.gradients):
            if sender is not None:
                sender.wait_until_sent()

    @property
    def waited_s(self) -> float:
        """Seconds that this rank, or its GPU, has waited for tensors of its neighbours."""
        receivers = (self.activations, self.next_gradients)
        return sum(receiver.waited_s for receiver in receivers if receiver is not None)
