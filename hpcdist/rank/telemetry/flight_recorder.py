"""Diagnostics of a hung rank at SIGUSR1: the stacks of its threads, and its last collectives.

faulthandler prints the stacks to the log within the C signal handler, which works in any state of the rank. A separate
thread writes PyTorch's flight recorders, because the main thread may be inside a collective, where no Python signal
handler runs. This module does not import torch, so that it also works during torch's import.

PyTorch can dump its recorder itself when a line is written to a pipe (TORCH_NCCL_DEBUG_INFO_PIPE_FILE). That supports
only NCCL, writes a pickle, and a rank whose pipe cannot be created does not start. The JSON written here also covers
gloo and is safe to read.

Reference: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
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
#: Number of collectives that a recorder keeps, torch's default.
_ENTRIES = 2000
#: Number of latest entries that are written for each process group, and the limit including unfinished ones.
_NUM_LAST = 20
_NUM_UNFINISHED = 200
#: Maximum world size for a complete NCCL dump, which is 1 MB for each rank; larger runs dump unfinished entries only.
_MAX_FULL_DUMP = 64


def dump_on_signal(attempt: Attempt, rank: int, world_size: int) -> None:
    """Write stacks and flight records whenever this rank receives SIGUSR1."""
    wake, waker = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(waker, False)
    # Python's C handler writes the signal number to the pipe, also while the main thread is blocked.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
    threading.Thread(
        target=_write_at_signals, args=(wake, attempt, rank, world_size), name="flight recorder", daemon=True
    ).start()


def enable_flight_recorders(attempt: Attempt, env: MutableMapping[str, str]) -> None:
    """Enable the flight recorders, and make torch write its own dumps at an NCCL timeout to the attempt's folder.

    Not every version of torch records by default. Variables that are set already, also by their older names, are kept.
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
                log.warning("the flight records cannot be written: %s", error)


def write_records(attempt: Attempt, rank: int, world_size: int) -> None:
    """Write the last collectives of each process group as JSON, and NCCL's own dump."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    found: dict[str, dict[str, Any]] = {}
    # ProcessGroupNCCL has a recorder of its own, if torch is built with NCCL.
    for backend, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        if (dump := getattr(c10d, name, None)) is not None:
            recorded = json.loads(dump())
            if recorded.get("entries"):
                found[backend] = {**recorded, "entries": _newest(recorded["entries"])}
    write_json(attempt.flight(rank), {"rank": rank, "time": time.time(), "recorders": found})
    if c10d is not None and "nccl" in found:
        only_active = world_size > _MAX_FULL_DUMP
        # The input of torch's analyzer: `torchfrtrace FOLDER --prefix flight-rank-`.
        write_atomic(attempt.path / f"flight-rank-{rank}", c10d._dump_nccl_trace(True, True, only_active))


def _newest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last entries of each process group, in their order."""
    kept = []
    counts: dict[str, int] = {}
    for entry in reversed(entries):
        group = str(entry["process_group"][0])
        counts[group] = counts.get(group, 0) + 1
        if counts[group] <= _NUM_LAST or not (entry["retired"] or counts[group] > _NUM_UNFINISHED):
            kept.append(entry)
    return kept[::-1]
