"""Where a rank's step goes: its whole length, waiting for data, and computing before the rank waits for the others.

An all-reduce makes every rank's step, and every rank's backward pass, as long as the slowest one's. What tells ranks
apart is what each does before it waits: data time, from the end of a step to the next forward pass, and compute, from
there to the last gradient of the backward pass, after which only the exchange is left. Collectives inside of the model,
such as SyncBatchNorm's, still make it equal.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from hpcdist.rank.topology import Topology
from hpcdist.run.polling import times_interval_s


class Totals(NamedTuple):
    """Sums over a rank's steps so far; whoever takes two of them has the means between them."""

    steps: int = 0
    step_s: float = 0.0
    own_steps: int = 0  #: those whose data time and compute are known
    data_s: float = 0.0
    compute_s: float = 0.0

    def means_since(self, before: Totals) -> dict[str, float]:
        """Seconds a step by what they were spent on; what is not known is left out."""
        means = {}
        if steps := self.steps - before.steps:
            means["step_s"] = (self.step_s - before.step_s) / steps
        if own := self.own_steps - before.own_steps:
            means["data_s"] = (self.data_s - before.data_s) / own
            means["compute_s"] = (self.compute_s - before.compute_s) / own
        return means


class Clock(Protocol):
    """Marks points in a device's work, and tells the time between them without ever waiting for the device."""

    def mark(self) -> Any: ...

    def measure(self, data: list[Any], compute: list[Any]) -> tuple[float, float] | None:
        """Seconds of both in a step, of whose marks two and two belong together; None while one is still to come."""
        ...


class HostClock:
    """Where the host computes: a mark is a time."""

    mark = staticmethod(time.perf_counter)

    def measure(self, data: list[float], compute: list[float]) -> tuple[float, float]:
        if len(data) == len(compute) == 2:
            return data[1] - data[0], compute[1] - compute[0]
        return sum(data[1::2]) - sum(data[::2]), sum(compute[1::2]) - sum(compute[::2])


class CudaClock:
    """Where a GPU computes: a mark is an event in the stream's work, whose time is known once the GPU has been there.

    So data time is what the GPU waits for, not what the host does meanwhile, and a slow host is part of the compute.
    """

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def measure(self, data: list[torch.cuda.Event], compute: list[torch.cuda.Event]) -> tuple[float, float] | None:
        # Once each: one part's end may be the next one's beginning.
        events = {id(event): event for event in data + compute}.values()
        if not all(event.query() for event in events):
            return None
        parts = [zip(marks[::2], marks[1::2], strict=True) for marks in (data, compute)]
        data_s, compute_s = (sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3 for pairs in parts)
        self._free += events
        return data_s, compute_s


def clock_of(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()


class Gradients(Protocol):
    """Whoever tells of a model's gradients (`timed_ddp.py`)."""

    last: int | None  #: a parameter, while it is searched for the one whose gradient comes last

    def search(self) -> None: ...
    def settle(self) -> None: ...


class StepTimer:
    """Times the steps of one rank, at a few microseconds a step. `Context` owns it.

    A step ends when `should_stop` returns. Evaluation and saving, between two steps, belong to none, and the first
    step counts nowhere: compilers and allocators settle in it.
    """

    def __init__(self, clock: Clock, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mark = clock.mark
        self._now = now
        self._steps, self._step_s, self._own_steps, self._data_s, self._compute_s = 0, 0.0, 0, 0.0, 0.0
        self._models: list[Gradients] = []
        #: Of steps that the device may not have done yet: marks of data time and of compute, and `_waited_s`.
        self._pending: deque[tuple[list[Any], list[Any], float]] = deque()
        self._began: float | None = None  #: when this step began; None before the first one has ended
        self._data: list[Any] = []  #: marks of this step: begin, end, begin, end …
        self._compute: list[Any] = []
        self._is_computing = False  #: since the step's first forward pass
        self._graded: Any = None  #: when the last gradient since the last forward pass came
        self._is_exchanged = True
        self._waited_s = 0.0  #: for other ranks, within the data time

    @property
    def totals(self) -> Totals:
        return Totals(self._steps, self._step_s, self._own_steps, self._data_s, self._compute_s)

    def report(self) -> dict[str, float]:
        """The totals for the rank's heartbeat; nothing before there are any."""
        totals = self.totals
        return {key: round(value, 6) for key, value in totals._asdict().items()} if any(totals) else {}

    # --- what the context tells

    def watch(self, gradients: Gradients) -> None:
        """Time this model's passes from now on: it calls `before_forward` and `on_gradient`."""
        self._models.append(gradients)

    def step_done(self) -> None:
        """A step has ended here."""
        now = self._now()
        if self._began is not None:
            self._steps += 1
            self._step_s += now - self._began
            if self._is_computing and self._graded is not None:
                self._compute.append(self._graded)
                self._pending.append((self._data, self._compute, self._waited_s))
                while self._pending and self._count(*self._pending[0]):
                    self._pending.popleft()
            elif self._is_computing:
                for model in self._models:
                    model.search()
        for model in self._models:
            if model.last is not None:
                model.settle()
        self._begin_step(now)

    def _begin_step(self, now: float) -> None:
        self._began = now
        self._data, self._compute = [self._mark()], []
        self._is_computing = False
        self._graded = None
        self._waited_s = 0.0

    def skip(self) -> None:
        """What was done since the last step belongs to no step."""
        if self._began is not None and not self._is_computing:
            self._begin_step(self._now())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is done inside is waiting for other ranks, and no data time."""
        began = self._now()
        try:
            yield
        finally:
            if not self._is_computing:
                self._waited_s += self._now() - began

    def add(self, *, compute_s: float) -> None:
        """A piece of work that is comparable between the ranks of a role, on one that has no steps of its own."""
        self._own_steps += 1
        self._compute_s += compute_s

    # --- what models tell

    def before_forward(self, model: DistributedDataParallel) -> None:
        """A model's forward pass begins."""
        if self._began is None:
            return
        if not model.training:
            if not self._is_computing:
                self._began = None  # an evaluation: nobody says when it ends, so this step counts nowhere
            return
        if not torch.is_grad_enabled():
            self.skip()
            return
        if not self._is_computing:
            self._is_computing = True
            mark = self._mark()
            self._data.append(mark)
        elif self._graded is None:
            return  # one more forward pass before the backward pass
        else:
            mark = self._mark()
            self._compute.append(self._graded)
            if not self._is_exchanged:  # else nobody knows how long it waited for the others
                self._data += (self._graded, mark)
            self._graded = None
        self._compute.append(mark)
        self._is_exchanged = model.require_backward_grad_sync

    def buffers_exchanged(self) -> None:
        """Rank 0's buffers are here, for which a forward pass waits before it computes."""
        if self._is_computing and self._graded is None:
            self._compute[-1] = self._mark()

    def on_gradient(self, _parameter: Any = None) -> None:
        """A gradient has come, perhaps the last one of this backward pass."""
        self._graded = self._mark()

    def _count(self, data: list[Any], compute: list[Any], waited_s: float) -> bool:
        """Add a step to the sums; False where the device has not done it, which is not waited for."""
        seconds = self._clock.measure(data, compute)
        if seconds is None:
            return False
        self._own_steps += 1
        self._data_s += max(0.0, seconds[0] - waited_s)
        self._compute_s += seconds[1]
        return True


class NodeTimes:
    """The step times that a node logs: those of its first rank that has steps, others' are in the heartbeats.

    `time/step_s`, `time/data_s` and `time/compute_s`, means since the last point; `time/<node>/…` of several nodes,
    as system metrics are named.
    """

    def __init__(self, timer: StepTimer, topology: Topology, log_every: int) -> None:
        self._timer = timer
        self._rank, self._local_rank = topology.rank, topology.local_rank
        self._log_every = log_every
        self._prefix = f"time/{socket.gethostname()}/" if topology.num_nodes > 1 else "time/"
        self._interval_s = times_interval_s(topology.num_nodes)
        self._is_first = topology.local_rank == 0
        self._before = Totals()
        self._next = 0.0

    def leave_to(self, ranks: Sequence[int]) -> None:
        """Only these ranks have steps."""
        own_node = range(self._rank - self._local_rank, self._rank)
        self._is_first = self._rank in ranks and not any(rank in own_node for rank in ranks)

    def due(self, step: int) -> dict[str, float]:
        """The metrics of a node after this step; empty where it is not their turn."""
        if step % self._log_every or not self._is_first:
            return {}
        now = time.monotonic()
        if now < self._next:
            return {}
        self._next = now + self._interval_s
        totals = self._timer.totals
        means = totals.means_since(self._before)
        self._before = totals
        return {self._prefix + key: value for key, value in means.items()}
