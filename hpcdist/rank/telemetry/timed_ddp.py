"""DistributedDataParallel that times its forward and backward passes (`step_timing.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcdist.rank.telemetry.step_timing import StepTimer

#: Maximum number of searches for the parameter whose gradient comes last.
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
        #: Index of the parameter whose gradient came last, during a search.
        self.last: int | None = None
        self.search()

    def search(self) -> None:
        """Add hooks to all parameters until `settle`."""
        if self._num_searches < MAX_SEARCHES:
            self._num_searches += 1
            self._set_hooks({index: functools.partial(self._found, index) for index in range(len(self._parameters))})

    def settle(self) -> None:
        """Keep only the hooks of the last parameters."""
        assert self.last is not None
        self._kept.add(self.last)
        self.last = None
        self._set_hooks(dict.fromkeys(self._kept, self._report))

    def _set_hooks(self, hooks: Mapping[int, Callable[[Any], None]]) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = [
            self._parameters[index].register_post_accumulate_grad_hook(hook) for index, hook in hooks.items()
        ]

    def _found(self, index: int, parameter: Any) -> None:
        self.last = index
        self._report(parameter)
