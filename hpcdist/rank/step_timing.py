"""Step times of a rank: duration of the step, time waiting for data, and compute time before waiting for other ranks.

An all-reduce makes the steps and backward passes of all ranks as long as those of the slowest rank. A slow rank shows
only in the times before a rank waits: data time, from the end of a step to the next forward pass, and compute time,
from there to the last gradient of the backward pass. Collectives inside the model, such as those of SyncBatchNorm, also
make the compute times equal.
"""

import functools
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hpcdist.config.topology import Topology
from hpcdist.rank.telemetry import TimeAccount
from hpcdist.run.folder import times_interval_s


class Totals(NamedTuple):
    """Sums over the steps of a rank so far, in seconds. The difference of two `Totals` gives the means between them."""

    steps: int = 0
    step_s: float = 0.0
    own_steps: int = 0  #: number of steps with known data and compute time
    data_s: float = 0.0
    compute_s: float = 0.0

    def means_since(self, before: "Totals") -> dict[str, float]:
        """Return the mean seconds per step since `before`, without unknown ones."""
        means = {}
        num_steps = self.steps - before.steps
        if num_steps:
            means["step_s"] = (self.step_s - before.step_s) / num_steps
        num_known = self.own_steps - before.own_steps
        if num_known:
            means["data_s"] = (self.data_s - before.data_s) / num_known
            means["compute_s"] = (self.compute_s - before.compute_s) / num_known
        return means


class HostClock:
    """Clock for computations on the CPU: a mark is a time."""

    mark = staticmethod(time.perf_counter)

    def measure(self, *parts: list[float]) -> tuple[float, ...]:
        """Return the seconds of each part of a step from its marks: begin, end, begin, end, …"""
        return tuple(sum(part[1::2]) - sum(part[::2]) for part in parts)


class EventClock:
    """Clock for computations on a GPU: a mark is an event; its time is known once the GPU has passed it.

    Data time is therefore the time in which the GPU waits, and a slow host increases the compute time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Event] = []

    def mark(self) -> torch.Event:
        """Return an event that is recorded on the current stream."""
        event = self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def measure(self, *parts: list[torch.Event]) -> tuple[float, ...] | None:
        """Return the seconds of each part of a step; None if the device has not passed all marks."""
        # Each event only once: the end of one pair may be the begin of the next.
        by_id: dict[int, torch.Event] = {}
        for part in parts:
            for event in part:
                by_id[id(event)] = event
        events = by_id.values()
        if not all(event.query() for event in events):
            return None
        pairs = [zip(part[::2], part[1::2], strict=True) for part in parts]
        seconds = tuple(sum(begin.elapsed_time(end) for begin, end in part) / 1e3 for part in pairs)
        self._free += events
        return seconds


def clock_of(device: torch.device) -> HostClock | EventClock:
    """Return the clock for computations on a device."""
    if device.type == "cpu":
        return HostClock()
    return EventClock(device)


class StepTimer:
    """Times the steps of one rank, at a cost of microseconds per step, and books them in its time account.

    A step ends when `should_stop` returns. Evaluations and saves between steps are not part of a step. The first step
    is not counted, because it includes compilation and memory allocation.
    """

    def __init__(
        self,
        clock: HostClock | EventClock,
        *,
        now: Callable[[], float] = time.perf_counter,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.account = TimeAccount(now=now)
        self._beat = beat
        self._clock = clock
        self._mark = clock.mark
        self._now = now
        self.totals = Totals()
        self._models: list[LastGradient] = []
        self._hook: RemovableHandle | None = None
        #: Steps that the device may not have finished: marks of data time, of compute time and of the gradient
        #: exchange, `_waited_s`, and whether the step counts as redone.
        self._pending: deque[tuple[list[Any], list[Any], list[Any], float, bool]] = deque()
        self.began: float | None = None  #: start of this step; None if the step is not counted, as the first one
        self._data: list[Any] = []  #: marks of this step: begin, end, begin, end, …
        self._compute: list[Any] = []
        self._exchange: list[Any] = []
        self._is_computing = False  #: whether the first forward pass of the step has begun
        self._graded: Any = None  #: mark of the last gradient since the last forward pass
        self._is_exchanged = True
        self._waited_s = 0.0  #: waiting for other ranks within the data time

    def report(self) -> dict[str, float]:
        """Return the fields of `totals`, rounded to microseconds; empty before the first step."""
        totals = self.totals
        if not any(totals):
            return {}
        return {key: round(value, 6) for key, value in totals._asdict().items()}

    def watch(self, gradients: "LastGradient") -> None:
        """Time the passes of a model, which calls `before_forward` and `on_gradient`, and the following updates."""
        if not self._models:
            self._hook = register_optimizer_step_pre_hook(self.before_update)
        self._models.append(gradients)

    def close(self) -> None:
        """Stop timing updates of optimizers."""
        if self._hook is not None:
            self._hook.remove()

    def step_done(self, step: int = 0, *, agreement_s: float = 0.0) -> None:
        """Record the end of a step.

        Args:
            step: number of steps done.
            agreement_s: the part of the step that was spent in the agreement on a stop.
        """
        now = self._now()
        is_redone = self.account.cause == "redone"
        self.account.step_done(step, now)
        if self.began is not None:
            if agreement_s and not is_redone:
                self.account.move(0.0, agreement_s)
            self._add(steps=1, step_s=now - self.began)
            if self._is_computing and self._graded is not None:
                self._compute.append(self._graded)
                self._pending.append((self._data, self._compute, self._exchange, self._waited_s, is_redone))
                self._count_pending()
            elif self._is_computing:
                for model in self._models:
                    model.search()
        for model in self._models:
            if model.last is not None:
                model.settle()
        self._begin_step(now)

    def _count_pending(self) -> None:
        """Count data and compute time of the steps that the device has finished."""
        while self._pending:
            data, compute, exchange, waited_s, was_redone = self._pending[0]
            seconds = self._clock.measure(data, compute, exchange)
            if seconds is None:
                return
            self._pending.popleft()
            data_s, compute_s, exchange_s = seconds
            data_s = max(0.0, data_s - waited_s)
            self._add(own_steps=1, data_s=data_s, compute_s=compute_s)
            if not was_redone:
                self.account.move(data_s, exchange_s)

    def _begin_step(self, now: float) -> None:
        self.began = now
        self._data = [self._mark()]
        self._compute = []
        self._exchange = []
        self._is_computing = False
        self._graded = None
        self._waited_s = 0.0

    def skip(self) -> None:
        """Exclude the time since the last step from the next step."""
        if self.began is not None and not self._is_computing:
            self._begin_step(self._now())

    def training_begins(self) -> None:
        """Record that the first step begins. A forward pass of a model of `Context.wrap` records it as well."""
        self.account.training_begins()

    def alive(self) -> None:
        """Update the heartbeat from work without steps, such as a long evaluation or a download."""
        self._beat()
        self.skip()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count the time inside the block as evaluation in the ledger of the run (`hpcdist cost`)."""
        with self.account.phase("evaluation"):
            yield
        self.skip()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the block as waiting for other ranks, not as data time."""
        began = self._now()
        try:
            with self.account.phase("communication"):
                yield
        finally:
            if not self._is_computing:
                self._waited_s += self._now() - began

    def add(self, *, compute_s: float) -> None:
        """Record work of a rank without steps that is comparable between the ranks of a role, in seconds."""
        self._add(own_steps=1, compute_s=compute_s)
        self.account.work(compute_s)

    def _add(self, **amounts: float) -> None:
        """Add amounts to the totals of these names."""
        before = self.totals
        self.totals = before._replace(**{name: getattr(before, name) + amount for name, amount in amounts.items()})

    def before_forward(self, model: DistributedDataParallel) -> None:
        """Record the begin of a forward pass: the first one of a step ends its data time."""
        if self.began is None:
            if model.training:
                self.account.training_begins()
            return
        if not model.training:
            if not self._is_computing:
                self.began = None  # an evaluation with an unknown end: this step is not counted
            return
        if not torch.is_grad_enabled():
            self.skip()
            return
        if not self._is_computing:
            self._is_computing = True
            mark = self._mark()
            self._data.append(mark)
        elif self._graded is None:
            return  # another forward pass before the backward pass
        else:
            mark = self._mark()
            self._compute.append(self._graded)
            if not self._is_exchanged:  # otherwise the time includes waiting for other ranks
                self._data += (self._graded, mark)
            self._graded = None
        self._compute.append(mark)
        self._is_exchanged = model.require_backward_grad_sync

    def buffers_exchanged(self) -> None:
        """Record the arrival of rank 0's buffers, for which a forward pass waits before it computes."""
        if self._is_computing and self._graded is None:
            self._compute[-1] = self._mark()

    def on_gradient(self, _parameter: Any = None) -> None:
        """Record a gradient, possibly the last one of this backward pass."""
        self._graded = self._mark()

    def before_update(self, *_: Any) -> None:
        """Record the end of the gradient exchange: the begin of the optimizer's update."""
        graded = self._graded
        if graded is not None and (not self._exchange or self._exchange[-2] is not graded):
            self._exchange += (graded, self._mark())


class NodeTimes:
    """The step times that a node logs to MLflow: the times of its first rank with steps.

    The metrics are `time/step_s`, `time/data_s` and `time/compute_s`, means since the last point, in seconds. In a run
    on several nodes the names are `time/<node>/…`, as those of system metrics.
    """

    def __init__(self, timer: StepTimer, topology: Topology, log_every: int) -> None:
        self._timer = timer
        self._rank = topology.rank
        self._local_rank = topology.local_rank
        self._log_every = log_every
        self._prefix = "time/"
        if topology.num_nodes > 1:
            self._prefix = f"time/{socket.gethostname()}/"
        self._interval_s = times_interval_s(topology.num_nodes)
        self._is_first = topology.local_rank == 0
        self._before = Totals()
        self._next = 0.0

    def leave_to(self, ranks: Sequence[int]) -> None:
        """Log only the times of these ranks, because the others have no steps."""
        ranks_before_on_node = range(self._rank - self._local_rank, self._rank)
        self._is_first = self._rank in ranks and not any(rank in ranks_before_on_node for rank in ranks)

    def due(self, step: int) -> dict[str, float]:
        """Return the metrics to log after this step; empty if none are due."""
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


#: Maximum number of searches for the parameter with the last gradient.
MAX_SEARCHES = 5


class TimedDDP(DistributedDataParallel):
    """DistributedDataParallel that reports its passes to a timer.

    It overrides methods instead of using forward hooks, because a module with hooks has a slower forward call.
    """

    def __init__(self, module: nn.Module, timer: StepTimer, **options: Any) -> None:
        super().__init__(module, **options)
        self._timer: StepTimer | None = timer
        timer.watch(LastGradient(module, timer.on_gradient))

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **options: Any) -> Any:
        if self._timer is not None:
            self._timer.before_forward(self)
        return super().forward(*inputs, **options)  # type: ignore[no-untyped-call]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _sync_buffers(self) -> None:
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        if self._timer is not None:
            self._timer.buffers_exchanged()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the timer: a copy of the model is not timed."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_timer": None}


class LastGradient:
    """Reports the last gradient of each backward pass.

    The model determines which parameter's gradient comes last. All parameters have a hook until one step has shown it,
    and again after a step in which that parameter had no gradient, as in models with branches. The last parameters of
    all such steps keep their hooks.
    """

    def __init__(self, model: nn.Module, report: Callable[[Any], None]) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._report = report
        self._kept: set[int] = set()
        self._handles: list[Any] = []
        self._num_searches = 0
        #: Index of the parameter with the last gradient, during a search.
        self.last: int | None = None
        self.search()

    def search(self) -> None:
        """Add hooks to all parameters until `settle`."""
        if self._num_searches < MAX_SEARCHES:
            self._num_searches += 1
            hooks = {index: functools.partial(self._note, index) for index in range(len(self._parameters))}
            self._set_hooks(hooks)

    def settle(self) -> None:
        """Keep only the hooks of the last parameters."""
        assert self.last is not None
        self._kept.add(self.last)
        self.last = None
        self._set_hooks(dict.fromkeys(self._kept, self._report))

    def _set_hooks(self, hooks: Mapping[int, Callable[[Any], None]]) -> None:
        """Replace all hooks by these, by the indices of their parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = [
            self._parameters[index].register_post_accumulate_grad_hook(hook) for index, hook in hooks.items()
        ]

    def _note(self, index: int, parameter: Any) -> None:
        self.last = index
        self._report(parameter)
