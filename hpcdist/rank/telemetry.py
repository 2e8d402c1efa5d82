"""Reports of a rank on itself: heartbeat, time account, losses that are not finite, and its stacks when it hangs."""

import faulthandler
import json
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from hpcdist.errors import TrainerError
from hpcdist.host.json_files import write_json
from hpcdist.run.attempt_times import CAUSES, Cause
from hpcdist.run.folder import Attempt, beat_interval_s

log = logging.getLogger(__name__)


#: Logged steps in a row after which a run without `stop.nan_losses` is reported.
_NAN_LOSSES_TO_REPORT = 3
#: Words of a metric that holds the smallest or largest loss so far, which is infinite before the first evaluation.
_EXTREMES = frozenset({"best", "min", "minimum", "max", "maximum", "lowest", "highest", "smallest", "largest"})


def _is_loss(metric: str) -> bool:
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", metric)
    return "loss" in metric.lower() and _EXTREMES.isdisjoint(word.lower() for word in words)


@dataclass(frozen=True)
class _Row:
    """Consecutive steps with NaN or infinite values of a loss."""

    first: int
    last: int
    number: int = 1


class LossWatch:
    """Reports the first loss that is NaN or infinite at several logged steps in a row, or ends the training.

    A loss is a metric with `loss` in its name, unless it is the best value so far.

    Args:
        limit: number of logged steps after which the training ends; None to report such a loss only.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._rows: dict[str, _Row] = {}  #: by metric, of losses with a last value that was not finite
        self.finding = ""  #: the report

    def note(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step. Raises TrainerError after `limit` logged steps without a finite loss."""
        for key, value in metrics.items():
            if not _is_loss(key) or math.isfinite(value):
                self._rows.pop(key, None)
                continue
            row = self._rows.get(key)
            if row is None:
                row = _Row(first=step, last=step)
            elif step > row.last:  # MLflow's `log_model` logs the metrics of a step again
                row = replace(row, last=step, number=row.number + 1)
            self._rows[key] = row
            if row.number < (self._limit or _NAN_LOSSES_TO_REPORT) or self.finding:
                continue
            self.finding = f"{key} is {float(value)} since step {row.first} ({row.number} logged steps in a row)"
            if self._limit is not None:
                raise TrainerError(
                    f"{self.finding}, which ends the run (stop.nan_losses={self._limit}): lower the learning"
                    f" rate, clip the gradients, or check the data before step {row.first}"
                )
            log.info("%s", self.finding)  # a warning would repeat the message of the supervisor


#: Maximum number of metrics in a heartbeat, which is written every second and only displays them.
MAX_METRICS = 1000
#: Initial size of the file, in which most heartbeats fit.
_MIN_BYTES = 1024


class Heartbeat:
    """A small file with the time and the step of this rank's last beat, written by a thread for the supervisor.

    The trainer only sets values in memory, so that a slow file system does not delay a step. The thread writes only
    after a new beat or step, so the file of a hung rank keeps the time of its last beat. It overwrites the file:
    atomic replacements by every rank would load a shared file system, and a reader repeats an incomplete line.
    """

    def __init__(
        self, attempt: Attempt, rank: int, num_ranks: int, hang_timeout_s: float, nan_losses: int | None = None
    ) -> None:
        self._path = attempt.beat(rank)
        self._file: int | None = None
        self._host = socket.gethostname()
        self._noted = 0.0  #: Unix time of the last beat
        #: Whether this rank has promised further beats: it reports each step, or calls `alive`. It counts as hung if it
        #: then stops doing so.
        self.is_regular = False
        self.step = 0
        self._written = (self._noted, self.step)
        self.total_steps: int | None = None
        self.metrics: dict[str, float] = {}
        self.metric_steps: dict[str, int] = {}  #: of the metrics that were logged with a step
        #: Of two values at one step, MLflow shows the first one of a trainer, and the last one of a script.
        self.last_value_counts = False
        self._losses = LossWatch(nan_losses)
        #: The work of this rank beside steps, for the user who watches the run.
        self.doing = ""
        self.timing: Callable[[], dict[str, float]] = dict  #: `StepTimer.report`
        self.energy: Callable[[], dict[str, float]] = dict  #: `EnergyMeter.joules`
        #: The time account of this rank. Rank 0 appends its phases to `phases.jsonl`.
        self.account: TimeAccount | None = None
        self._phases_file = None
        if rank == 0:
            self._phases_file = attempt.phases
        self._num_phases = 0  #: number of phases in that file
        self._size = _MIN_BYTES
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

    @contextmanager
    def promise_ends(self) -> Iterator[None]:
        """Take back at the end of the block what beats in it have promised."""
        before = self.is_regular
        yield
        self.is_regular = before
        self.beat()

    def note_logged(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Record at most MAX_METRICS metrics, of each the value at its largest step that MLflow shows."""
        new = metrics
        if step is not None:
            newest = step if self.last_value_counts else step - 1
            new = {key: value for key, value in metrics.items() if self.metric_steps.get(key, -1) <= newest}
        for key, value in new.items():
            if len(self.metrics) < MAX_METRICS or key in self.metrics:
                self.metrics[key] = value
        if step is None:
            return
        self._losses.note(metrics, step)
        self.metric_steps |= {key: step for key in new if key in self.metrics}
        self.step = max(self.step, step)

    def close(self) -> None:
        """End the thread, and write the last beat."""
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

    def _content(self, noted: float, step: int) -> dict[str, Any]:
        """Return the content of the file, at the time `noted` and after `step` steps."""
        # Numbers may be NumPy or torch scalars, which JSON does not support.
        total_steps = self.total_steps
        if total_steps is not None:
            total_steps = int(total_steps)
        account = {}
        if self.account is not None:
            account = self.account.report()
        # Another thread may add metrics meanwhile.
        return {
            "time": noted,
            "host": self._host,
            "regular": self.is_regular,
            "step": int(step),
            "total_steps": total_steps,
            "doing": self.doing,
            "metrics": {key: float(value) for key, value in self.metrics.copy().items()},
            "metric_steps": {key: int(step) for key, step in self.metric_steps.copy().items()},
            "diverged": self._losses.finding,
            "timing": self.timing(),
            "account": account,
            "energy_j": self.energy(),
        }

    def _write(self) -> None:
        noted = self._noted
        step = self.step
        text = json.dumps(self._content(noted, step))
        # A shorter text must overwrite the longer previous one completely.
        self._size = max(self._size, len(text))
        data = text.encode().ljust(self._size)
        offset = 0
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            while offset < len(data):
                offset += os.pwrite(self._file, data[offset:], offset)
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
        """Write the phases that have ended since the last call, on rank 0."""
        if self.account is None or self._phases_file is None:
            return
        phases = self.account.phases[self._num_phases :]
        if not phases:
            return
        text = ""
        for cause, began, ended in phases:
            text += json.dumps({"cause": cause, "began": began, "ended": ended}) + "\n"
        with suppress(OSError), open(self._phases_file, "a") as file:  # the next call repeats a failed write
            file.write(text)
            self._num_phases += len(phases)


# The time account and the ledger of a run (`review/ledger.py`), which sums the accounts of all ranks, have the same
# causes. The heartbeat contains the account, so it costs no further file operations.

#: Maximum number of phases of an attempt that are recorded with begin and end, for the timeline of a run.
MAX_PHASES = 1000


class TimeAccount:
    """Books the time of one rank. At any moment one cause is current.

    A rank begins with `start`. Its first step is `compile`, because it includes compilation, kernel selection and the
    allocation of memory. Afterwards its time is `compute`, except for phases (`phase`) and for parts of steps that are
    known only after the step (`move`). Steps that an earlier attempt had done count as `redone` instead of `compute`,
    `data` and `communication`.
    """

    def __init__(self, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.began = time.time()
        self._first = self._since = now()
        self.cause: Cause = "start"
        self._seconds: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        #: Number of the last step that an earlier attempt had done.
        self.reached = 0
        #: Whether the rank has ended well; its remaining time is then `finish`, otherwise `down`.
        self.is_closed = False
        #: Phases that have ended: cause, begin and end in seconds since the epoch.
        self.phases: list[tuple[Cause, float, float]] = []

    def training_begins(self) -> None:
        """End `start`, unless it has ended already: the first step is `compile`."""
        if self.cause == "start":
            self._switch("compile", self._now())

    def step_done(self, step: int, now: float) -> None:
        """Record the end of a step; `step` is the number of steps done."""
        before = self.cause
        is_next_redone = step < self.reached
        if before in ("start", "compile") or (before == "redone") != is_next_redone:
            self._switch("redone" if is_next_redone else "compute", now)
        else:
            self._seconds[before] += now - self._since
            self._since = now

    def move(self, data_s: float, communication_s: float) -> None:
        """Book seconds of past `compute` as `data` and `communication`."""
        booked = self._seconds
        left = booked["compute"] - data_s - communication_s
        if left < 0:  # parts of a step that are measured on a device may be longer than the step on the host
            scale = booked["compute"] / (data_s + communication_s)
            data_s *= scale
            communication_s *= scale
            left = 0.0
        booked["compute"] = left
        booked["data"] += data_s
        booked["communication"] += communication_s

    @contextmanager
    def phase(self, cause: Cause) -> Iterator[None]:
        """Book the time inside the block to a cause. A phase inside another phase belongs to the outer one."""
        if self.cause in ("checkpoint", "evaluation", "communication", "finish") or (
            cause == "communication" and self.cause != "compute"
        ):
            yield
            return
        before = self.cause
        self._switch(cause, self._now())
        try:
            yield
        finally:
            self._switch(before, self._now())

    def enter(self, cause: Cause) -> None:
        """Book the time from now on to a cause: `finish` after the steps, or `idle` on a rank without steps."""
        self._switch(cause, self._now())

    def work(self, seconds: float) -> None:
        """Book seconds of a rank without steps as `compute`."""
        if self.cause == "idle":
            now = self._now()
            self._switch("idle", now)
            seconds = min(seconds, self._seconds["idle"])
            self._seconds["idle"] -= seconds
            self._seconds["compute"] += seconds

    def _switch(self, cause: Cause, now: float) -> None:
        before, since = self.cause, self._since
        self._seconds[before] += now - since
        self._since, self.cause = now, cause
        is_phase = before in ("start", "compile", "checkpoint", "evaluation", "finish") and before != cause
        if is_phase and len(self.phases) < MAX_PHASES:
            offset = self.began - self._first
            self.phases.append((before, offset + since, offset + now))

    def report(self) -> dict[str, Any]:
        """Return the account until now: `seconds` by cause, which add up to `until` - `began`."""
        while True:
            # Another thread may book meanwhile.
            cause, since, seconds = self.cause, self._since, dict(self._seconds)
            if self._since == since and self.cause == cause:
                break
        now = self._now()
        seconds[cause] += max(0.0, now - since)
        return {
            "began": round(self.began, 3),
            "until": round(self.began + now - self._first, 3),
            "cause": cause,
            "closed": self.is_closed,
            "seconds": {name: round(value, 4) for name, value in seconds.items() if value},
        }


# Diagnostics of a hung rank at SIGUSR1: the stacks of its threads, and its last collectives.
#
# faulthandler prints the stacks to the log within the C signal handler, which works in any state of the rank. A
# separate thread writes PyTorch's flight recorders, because the main thread may be inside a collective, where no Python
# signal handler runs. This module does not import torch, so that it also works during torch's import.
#
# PyTorch's own dump by a pipe (TORCH_NCCL_DEBUG_INFO_PIPE_FILE) supports only NCCL and writes a pickle.
#
# Reference: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html

#: Number of latest entries that are written for each process group, and the limit including unfinished ones.
_NUM_LAST = 20
_NUM_UNFINISHED = 200


def dump_on_signal(attempt: Attempt, rank: int) -> None:
    """Write stacks and flight records whenever this rank receives SIGUSR1."""
    wake, waker = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(waker, False)
    # Python's C handler writes the signal number to the pipe, also while the main thread is blocked.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)

    def write_at_signals() -> None:
        while True:
            numbers = os.read(wake, 64)
            if not numbers:
                return
            if signal.SIGUSR1 in numbers:
                try:
                    write_records(attempt, rank)
                except (OSError, RuntimeError, ValueError) as error:
                    log.warning("the flight records cannot be written: %s", error)

    threading.Thread(target=write_at_signals, name="flight recorder", daemon=True).start()


#: Numbers of collectives that the flight recorders keep; 0 turns them off.
_BUFFER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def enable_flight_recorders(attempt: Attempt, env: MutableMapping[str, str]) -> None:
    """Enable the flight recorders, with torch's own dumps in the attempt's folder, unless the user has set them."""
    for names, value in (
        (_BUFFER_SIZE, "2000"),  # collectives, torch's default
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(attempt.path / "flight-rank-")),
    ):
        if not env.keys() & set(names):
            env[names[0]] = value


def write_records(attempt: Attempt, rank: int) -> None:
    """Write the last collectives of each process group as JSON."""
    recorders: dict[str, dict[str, Any]] = {}
    for backend, recorded in _recorders():
        entries = _last_entries(recorded.get("entries", []))
        if entries:
            recorders[backend] = {**recorded, "entries": entries}
    write_json(attempt.flight(rank), {"rank": rank, "time": time.time(), "recorders": recorders})


def has_joined_group(env: Mapping[str, str]) -> bool | None:
    """Return whether this process was ever in a process group of torch.distributed, or called `init_rpc`.

    None if that is unknown: torch is not imported, or its flight recorders are off.
    """
    groups = [recorded["pg_config"] for _, recorded in _recorders() if "pg_config" in recorded]
    if not groups or any(env.get(name) == "0" for name in _BUFFER_SIZE):
        return None
    return any(groups)


def _recorders() -> list[tuple[str, dict[str, Any]]]:
    """Return the contents of the flight recorders of this process with the names of their backends."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    recorders: list[tuple[str, dict[str, Any]]] = []
    # NCCL has a recorder of its own, from torch 2.15 on one named "nccl2" (unless TORCH_DIST_USE_NCCL2=0).
    for backend, name, options in (
        ("gloo", "_dump_fr_trace_json", {}),
        ("nccl", "_dump_nccl_trace_json", {}),
        ("nccl", "_dump_fr_trace_json", {"backend": "nccl2"}),
    ):
        try:
            recorders.append((backend, json.loads(getattr(c10d, name)(**options))))
        except (AttributeError, TypeError):  # not in this torch
            continue
    return recorders


def _last_entries(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last entries of each process group, and more of its unfinished ones."""
    last = []
    num_seen: Counter[str] = Counter()  # by process group
    for entry in reversed(entries):
        group = str(entry["process_group"][0])
        num_seen[group] += 1
        is_unfinished = not entry["retired"] and num_seen[group] <= _NUM_UNFINISHED
        if num_seen[group] <= _NUM_LAST or is_unfinished:
            last.append(entry)
    return last[::-1]
