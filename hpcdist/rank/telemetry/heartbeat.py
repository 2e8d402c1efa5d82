"""The heartbeat of a rank: a small file from which the supervisor reads its progress."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hpcdist.rank.telemetry.loss_watch import LossWatch
from hpcdist.run.attempt import Attempt
from hpcdist.run.polling import beat_interval_s

log = logging.getLogger(__name__)

#: Maximum number of metrics in a heartbeat and maximum length of their names; the heartbeat is written every second and
#: its metrics are only displayed.
MAX_METRICS = 1000
MAX_NAME = 250


class Heartbeat:
    """A file with the time and the step of this rank's last beat, written by a thread.

    The trainer only sets values in memory, so that a slow file system does not delay a step. The thread writes the file
    only after a new beat or step; the file of a hung rank therefore keeps the time of its last beat.

    The file is overwritten in place: atomic replacements by every rank would load a shared file system, and a reader of
    an incomplete line reads the file again. More ranks write less often, see `polling.beat_interval_s`.
    """

    def __init__(
        self, attempt: Attempt, rank: int, num_ranks: int, hang_timeout_s: float, nan_losses: int | None = None
    ) -> None:
        self._path = attempt.beat(rank)
        self._file: int | None = None
        self._host = socket.gethostname()
        self._noted = 0.0
        #: Whether this rank reports each step, or calls `alive`: then it hangs if it does so no more.
        self.is_regular = False
        self.step = 0
        self._written = (self._noted, self.step)
        self.total_steps: int | None = None
        self.metrics: dict[str, float] = {}
        #: Steps of those of the metrics that were logged with one.
        self.metric_steps: dict[str, int] = {}
        self._losses = LossWatch(nan_losses)
        #: What this rank does beside steps, for the user who watches the run.
        self.doing = ""
        #: Returns this rank's step times so far (`StepTimer.report`).
        self.timing: Callable[[], dict[str, float]] = dict
        #: Returns the time account of this rank (`TimeAccount.report`).
        self.account: Callable[[], dict[str, Any]] = dict
        #: Returns the joules that sensors have counted for this rank, by sensor (`EnergyMeter.joules`).
        self.energy: Callable[[], dict[str, float]] = dict
        #: Phases that have ended (`TimeAccount.phases`), which are appended to `phases.jsonl`.
        self.phases: Sequence[tuple[str, float, float]] = ()
        self._phases_file = attempt.phases
        self._num_phases = 0
        self._size = 1024
        self._interval_s = beat_interval_s(rank, num_ranks, hang_timeout_s)
        # Ranks that start at the same time must not write at the same time.
        self._first_s = self._interval_s * (rank + 1) / num_ranks
        self._failed = False
        self._ended = threading.Event()
        self.beat()
        self._write()
        self._thread = threading.Thread(target=self._keep_writing, name="heartbeat", daemon=True)
        self._thread.start()

    def beat(self, *, regular: bool = False) -> None:
        """Record that this rank is alive, in memory; `regular` promises further beats."""
        self._noted = time.time()
        self.is_regular |= regular

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Record the latest values of metrics; metrics beyond MAX_METRICS are ignored."""
        for key, value in metrics.items():
            if len(self.metrics) < MAX_METRICS or key in self.metrics:
                self.metrics[key] = value

    def note_logged(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Record metrics and, if they belong to a step, the step if it is the newest one."""
        self.note_metrics(metrics)
        if step is None:
            return
        self._losses.note(metrics, step)
        self.metric_steps |= {key: step for key in metrics if key in self.metrics}
        self.step = max(self.step, step)

    def close(self) -> None:
        """Write a last beat and stop the thread."""
        self._ended.set()
        self._thread.join()
        self.beat()
        self._write()

    def _keep_writing(self) -> None:
        wait_s = self._first_s
        while not self._ended.wait(wait_s):
            wait_s = self._interval_s
            # A step may be noted after its beat: a killed rank would lose it.
            if (self._noted, self.step) != self._written:
                self._write()

    def _write(self) -> None:
        noted, step = self._noted, self.step
        text = json.dumps(
            {
                "time": noted,
                "host": self._host,
                "regular": self.is_regular,
                "step": step,
                "total_steps": self.total_steps,
                "doing": self.doing,
                # Values may be NumPy or torch scalars, which JSON does not support.
                "metrics": {key[:MAX_NAME]: float(value) for key, value in self.metrics.copy().items()},
                "metric_steps": {key[:MAX_NAME]: int(step) for key, step in self.metric_steps.copy().items()},
                "diverged": self._losses.finding,
                "timing": self.timing(),
                "account": self.account(),
                "energy_j": self.energy(),
            }
        )
        # A shorter text must overwrite the longer previous one completely.
        self._size = max(self._size, len(text))
        try:
            self._overwrite(text.encode().ljust(self._size))
        except OSError as error:
            if not self._failed:
                log.warning("the heartbeat %s cannot be written: %s", self._path, error.strerror)
            self._failed = True
            if self._file is not None:  # opened again by the next write: a stale handle does not recover
                with suppress(OSError):
                    os.close(self._file)
                self._file = None
            return
        if self._failed:
            log.warning("the heartbeat %s can be written again", self._path)
        self._failed = False
        self._written = (noted, step)
        self._append_phases()

    def _append_phases(self) -> None:
        phases = self.phases[self._num_phases :]
        if phases:
            lines = [json.dumps({"cause": cause, "began": began, "ended": ended}) for cause, began, ended in phases]
            with suppress(OSError), open(self._phases_file, "a") as file:  # the next call repeats a failed write
                file.write("".join(line + "\n" for line in lines))
                self._num_phases += len(phases)

    def _overwrite(self, data: bytes) -> None:
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        offset = 0
        while offset < len(data):
            offset += os.pwrite(self._file, data[offset:], offset)
