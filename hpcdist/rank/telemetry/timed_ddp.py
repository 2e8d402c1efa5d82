"""DistributedDataParallel whose forward and backward passes are timed (`timing.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcdist.rank.telemetry.step_timing import StepTimer

#: How often the last gradient may turn out to be another one before those that were found have to do.
MAX_SEARCHES = 5


class TimedDDP(DistributedDataParallel):
    """DistributedDataParallel that tells a timer of its passes.

    Not by hooks: a module that has one takes another, slower way to its forward.
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
        """A copy is another model, of which the timer knows nothing."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_timer": None}


class LastGradient:
    """Tells when the last gradient of a backward pass has come.

    Which parameter's that is depends on the model. So all are listened to until a step has shown it, and again when a
    step had none of it, as in models with branches; the last ones of all such steps are kept.
    """

    def __init__(self, model: nn.Module, tell: Callable[[Any], None]) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._tell = tell
        self._kept: set[int] = set()
        self._handles: list[Any] = []
        self._num_searches = 0
        self.last: int | None = None  #: of the parameters, while it is searched for
        self.search()

    def search(self) -> None:
        """Listen to all parameters until `settle`."""
        if self._num_searches < MAX_SEARCHES:
            self._num_searches += 1
            self._listen({index: functools.partial(self._found, index) for index in range(len(self._parameters))})

    def settle(self) -> None:
        """Keep to the parameter that was found to be the last."""
        assert self.last is not None
        self._kept.add(self.last)
        self.last = None
        self._listen(dict.fromkeys(self._kept, self._tell))

    def _listen(self, listeners: Mapping[int, Callable[[Any], None]]) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = [
            self._parameters[index].register_post_accumulate_grad_hook(listener)
            for index, listener in listeners.items()
        ]

    def _found(self, index: int, parameter: Any) -> None:
        self.last = index
        self._tell(parameter)
