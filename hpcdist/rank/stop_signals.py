"""The stop signals. This module does not import torch, so that signals are handled during torch's import."""

from __future__ import annotations

import signal
from types import FrameType

#: Slurm sends SIGTERM at a requeue or preemption, and SIGUSR2 before the time limit (`--signal=USR2@…`).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopFlag:
    """A flag that the stop signals set. The handler does nothing else, because the current step must finish first."""

    def __init__(self) -> None:
        self.is_set = False

    def install(self) -> None:
        """Handle the stop signals in this process, also those that have arrived while they were blocked.

        Ranks of forked tasks begin with blocked stop signals (`forked_task.py`).
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self.is_set = True
