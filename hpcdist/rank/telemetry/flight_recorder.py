"""What a rank that stands still tells of itself, at SIGUSR1: its stacks, and the collectives that it has called.

faulthandler prints the stacks of all threads into the log, from the signal's own handler: that needs nothing of the
rank. What PyTorch's flight recorders hold is written by a thread that sleeps until then, since the main thread may be
inside a collective, where no handler of Python's runs. Without torch, so that it works before it is imported.

PyTorch would write its recorder by itself at a line in a pipe (TORCH_NCCL_DEBUG_INFO_PIPE_FILE). It does so for NCCL
alone, as a pickle, and a rank whose pipe cannot be made does not start. The JSON of here is for gloo, too, and safe to
read. https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import MutableMapping
from typing import Any

from hpcdist.files.atomic import write_atomic, write_json
from hpcdist.run.attempt import Attempt

log = logging.getLogger(__name__)
#: Collectives that a recorder keeps, as many as by torch's own default.
_ENTRIES = 2000
#: Entries of each process group that are written down, the last ones.
_LAST = 20
_MOST = 200  #: those that have not ended included
#: In larger runs the recorder's own dump, which is a megabyte, holds only what has not ended.
_WHOLE_UP_TO = 64


def tell_on_signal(attempt: Attempt, rank: int, world_size: int) -> None:
    """From now on SIGUSR1 makes this rank tell what it is doing."""
    wake, waker = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(waker, False)
    # Python's own handler writes the signal's number into the pipe, in whatever state the interpreter is.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
    threading.Thread(
        target=_write_at_signals, args=(wake, attempt, rank, world_size), name="flight recorder", daemon=True
    ).start()


def record_collectives(attempt: Attempt, env: MutableMapping[str, str]) -> None:
    """Switch the flight recorders on, and let torch's own dumps at a timeout of NCCL go where the run is.

    Not every version records by default. What somebody has set already stays, under the older names, too.
    """
    for names, value in (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), str(_ENTRIES)),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(attempt.path / "flight-rank-")),
    ):
        if not env.keys() & set(names):
            env[names[0]] = value


def _write_at_signals(wake: int, attempt: Attempt, rank: int, world_size: int) -> None:
    while numbers := os.read(wake, 64):
        if signal.SIGUSR1 in numbers:
            try:
                write_records(attempt, rank, world_size)
            except (OSError, RuntimeError, ValueError) as error:
                log.warning("the flight recorder cannot be written down: %s", error)


def write_records(attempt: Attempt, rank: int, world_size: int) -> None:
    """Write what the flight recorders hold, the last collectives of each group, as JSON; and NCCL's own dump."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    found: dict[str, dict[str, Any]] = {}
    # Two recorders: ProcessGroupNCCL has its own, and only where torch is built with it.
    for backend, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        if (dump := getattr(c10d, name, None)) is not None:
            recorded = json.loads(dump())
            if recorded.get("entries"):
                found[backend] = {**recorded, "entries": _newest(recorded["entries"])}
    write_json(attempt.flight(rank), {"rank": rank, "time": time.time(), "recorders": found})
    if c10d is not None and "nccl" in found:
        only_active = world_size > _WHOLE_UP_TO
        # What torch's analyzer reads: `torchfrtrace FOLDER --prefix flight-rank-`.
        write_atomic(attempt.path / f"flight-rank-{rank}", c10d._dump_nccl_trace(True, True, only_active))


def _newest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last entries of each process group, in their order."""
    kept = []
    counts: dict[str, int] = {}
    for entry in reversed(entries):
        group = str(entry["process_group"][0])
        counts[group] = counts.get(group, 0) + 1
        if counts[group] <= _LAST or not (entry["retired"] or counts[group] > _MOST):
            kept.append(entry)
    return kept[::-1]
