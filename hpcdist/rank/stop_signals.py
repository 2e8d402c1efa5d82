"""The stop signals. Without torch, so that they are caught before it is imported."""

from __future__ import annotations

import signal
from types import FrameType

#: Slurm sends SIGTERM at a requeue or preemption, and SIGUSR2 ahead of the time limit (`--signal=USR2@…`).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopFlag:
    """Set by the stop signals. Nothing else happens in their handler: the step under way must end first."""

    def __init__(self) -> None:
        self.is_set = False

    def install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self.is_set = True
