"""CPU and GPU use of the ranks' processes, which distinguishes a run that computes in silence from one that hangs.

    python -m hpcdist.supervisor.hang.activity ATTEMPT

prints it on each node, outside of containers. Unlike the collection of stack traces, it does not signal the ranks.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from hpcdist.machine.gpus import gpus
from hpcdist.run.attempt import Attempt
from hpcdist.supervisor.hang.processes import find_ranks
from hpcdist.supervisor.launcher import Ranks

log = logging.getLogger(__name__)
#: A rank that has used more than this share of a core computes.
_BUSY_SHARE = 0.1


class Activity(NamedTuple):
    """Activity of a rank's process and its descendants."""

    time: float
    cpu_s: float  #: CPU time until now, with that of children that have ended
    on_gpu: bool  #: whether a GPU that they use computes now


def main(folder: str) -> None:
    """Print the rank and the activity of this node's ranks, one JSON line each."""
    attempt = Attempt(Path(folder))
    on_gpu = {pid for gpu in gpus() if gpu.busy for pid in gpu.pids}
    for found in find_ranks(attempt.path.parent.parent, attempt.number, os.environ.get("SLURMD_NODENAME", "")):
        pids = [found.pid, *found.children]
        print(json.dumps([found.rank, time.time(), sum(map(_cpu_s, pids)), not on_gpu.isdisjoint(pids)]), flush=True)


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of its children that have ended."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:4])
    except psutil.Error:
        return 0.0  # it has just ended


def read_activities(
    attempt: Attempt, ranks: Ranks, *, limit_s: float, interrupted: Callable[[], bool]
) -> dict[int, Activity]:
    """Return the activities of the ranks on the nodes that answer within `limit_s`, by rank."""
    output = attempt.path / "activity.log"
    command = [sys.executable, "-P", "-m", "hpcdist.supervisor.hang.activity", str(attempt.path)]
    try:
        ranks.examine(command, output=output, limit_s=limit_s, interrupted=interrupted)
        lines = output.read_text(errors="replace").splitlines()
        output.unlink()
        rows = [json.loads(line) for line in lines if line.startswith("[")]
        return {rank: Activity(*row) for rank, *row in rows}
    except (OSError, ValueError, TypeError) as error:
        log.warning("the CPU time of the ranks is unknown: %s: %s", output, error)
        return {}


def busy_ranks(before: Mapping[int, Activity], after: Mapping[int, Activity]) -> set[int]:
    """Return the ranks that have computed between two readings."""
    return {
        rank
        for rank, now in after.items()
        if now.on_gpu
        or (rank in before and now.cpu_s - before[rank].cpu_s > _BUSY_SHARE * (now.time - before[rank].time))
    }


if __name__ == "__main__":
    main(sys.argv[1])
