"""Requests to stop or cancel a run by signals to its supervisor."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

from hpcdist.host import retry
from hpcdist.run.folder import StopCause, StopRequest

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalRequests:
    """Ctrl-C, SIGTERM (docker stop) and SIGHUP (closed terminal) stop a run; a second Ctrl-C cancels it.

    The handler records the signal; `Watch` or the supervisor writes the request, because file operations do not belong
    in a signal handler.

    Args:
        in_job: whether SIGTERM means that Slurm ends the job.
    """

    def __init__(self, *, in_job: bool = False) -> None:
        self._in_job = in_job
        self._name: str | None = None
        self._num_interrupts = 0
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Install the handlers inside the block. A handler that is replaced meanwhile is not restored."""
        before = [signal.signal(number, self.on_signal) for number in _NUMBERS]
        try:
            yield
        finally:
            for number, handler in zip(_NUMBERS, before, strict=True):
                if signal.getsignal(number) == self.on_signal:
                    signal.signal(number, handler)

    def request(self) -> StopRequest | None:
        """Return the request that the signals so far make; None without a signal."""
        if self._name is None:
            return None
        action: Literal["stop", "cancel"] = "stop"
        if self._num_interrupts > 1:
            action = "cancel"
        cause: StopCause = "signal"
        if self._in_job and self._name == "SIGTERM":
            cause = "preemption"
        return StopRequest(action=action, cause=cause, by=self._name)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal: note it for `request`. A second Ctrl-C also ends retries of file operations."""
        if number == signal.SIGINT:
            self._num_interrupts += 1
        if number == signal.SIGHUP:  # failed writes to the closed terminal must not end the run
            with open(os.devnull, "wb") as null:
                for descriptor in self._terminals:
                    os.dup2(null.fileno(), descriptor)
        self._name = signal.Signals(number).name
        if self._num_interrupts > 1:
            retry.give_up()
