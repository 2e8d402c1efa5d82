"""The stop signals. This module does not import torch, so that signals are handled during torch's import."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)
#: Slurm sends SIGTERM at a requeue or preemption, and SIGUSR2 before the time limit (`--signal=USR2@…`).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopFlag:
    """A flag that the stop signals set. The handler does nothing else, because the current step must finish first."""

    def __init__(self) -> None:
        self.is_set = False

    def install(self) -> None:
        """Handle the stop signals, also those that have arrived while they were blocked.

        Ranks of forked tasks begin with blocked stop signals (`forked_task.py`). Handlers that a script has installed
        before are still called.
        """
        if threading.current_thread() is not threading.main_thread():
            log.warning("hpcdist.should_stop is not called from the main thread: stop signals end this script")
            return
        for number in STOP_SIGNALS:
            before = signal.getsignal(number)

            def handle(signum: int, frame: FrameType | None, before: Any = before) -> None:
                self.is_set = True
                if callable(before):
                    before(signum, frame)

            signal.signal(number, handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
