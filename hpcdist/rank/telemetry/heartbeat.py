"""How far this rank is, told to the supervisor through a small file."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from hpcdist.run.attempt import Attempt
from hpcdist.run.polling import beat_interval_s

log = logging.getLogger(__name__)


#: Metrics in a heartbeat, and characters of their names: it is written once a second, and shown to people only.
MAX_METRICS = 1000
MAX_NAME = 250


class Heartbeat:
    """A file with the time and the step of this rank's last sign of life, kept up to date by a thread.

    The trainer only notes that it is alive, so that a slow file system never holds up a step. The thread writes what
    was noted since its last turn, and nothing when there was nothing: a rank that hangs falls silent, and its file
    then tells its very last sign, however seldom its turns are.

    Overwritten in place: an atomic replacement from every rank is a load on a shared file system, and a reader that
    meets half a line simply looks again.

    Args:
        num_ranks, hang_timeout_s: what the interval follows from, see `pace.beat_interval_s`.
    """

    def __init__(self, attempt: Attempt, rank: int, num_ranks: int, hang_timeout_s: float) -> None:
        self._path = attempt.beat(rank)
        self._file: int | None = None
        self._host = socket.gethostname()
        self._noted = self._written = 0.0
        self.step = 0
        self.total_steps: int | None = None
        self.metrics: dict[str, float] = {}
        #: What this rank's steps were spent on so far (`StepTimer.report`); empty before its first step.
        self.timing: Callable[[], dict[str, float]] = dict
        self._size = 1024
        self._interval_s = beat_interval_s(rank, num_ranks, hang_timeout_s)
        # Ranks that are started together shall not write together.
        self._first_s = self._interval_s * (rank + 1) / num_ranks
        self._failed = False
        self._ended = threading.Event()
        self.beat()
        self._write()
        self._thread = threading.Thread(target=self._keep_writing, name="heartbeat", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Note a sign of life; costs nothing."""
        self._noted = time.time()

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Note the last values of metrics; of more than MAX_METRICS those that came first."""
        if len(self.metrics) + len(metrics) <= MAX_METRICS:
            self.metrics.update(metrics)
            return
        for key, value in metrics.items():
            if len(self.metrics) < MAX_METRICS or key in self.metrics:
                self.metrics[key] = value

    def close(self) -> None:
        """Write the last sign now, and no more."""
        self._ended.set()
        self._thread.join()
        self.beat()
        self._write()

    def _keep_writing(self) -> None:
        wait_s = self._first_s
        while not self._ended.wait(wait_s):
            wait_s = self._interval_s
            if self._noted != self._written:
                self._write()

    def _write(self) -> None:
        noted = self._noted
        text = json.dumps(
            {
                "time": noted,
                "host": self._host,
                "step": self.step,
                "total_steps": self.total_steps,
                # Values may be NumPy's or torch's, which JSON does not know.
                "metrics": {key[:MAX_NAME]: float(value) for key, value in self.metrics.copy().items()},
                "timing": self.timing(),
            }
        )
        # A shorter text must not leave a longer one's tail behind.
        self._size = max(self._size, len(text))
        try:
            self._overwrite(text.encode().ljust(self._size))
        except OSError as error:
            if not self._failed:
                log.warning("no heartbeat: %s cannot be written (%s)", self._path, error.strerror)
            self._failed = True
            self._let_go()
            return
        if self._failed:
            log.warning("%s can be written again", self._path)
        self._failed = False
        self._written = noted

    def _overwrite(self, data: bytes) -> None:
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        offset = 0
        while offset < len(data):
            offset += os.pwrite(self._file, data[offset:], offset)

    def _let_go(self) -> None:
        """Close the file, to open it anew at the next turn: a handle that is stale stays so."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None
