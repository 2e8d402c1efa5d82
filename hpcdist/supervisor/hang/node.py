"""One node's part: look at each rank that runs here, and write down what was seen.

    python -m hpcdist.supervisor.hang.node ATTEMPT SECONDS

Stacks are py-spy's, where it is installed and may look into the processes; else those that the ranks have printed
into their logs at SIGUSR1, which the supervisor sends. Stands outside of containers, as the user whom the ranks are.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from hpcdist.files.atomic import read_json, write_json
from hpcdist.run.attempt import Attempt
from hpcdist.supervisor.hang.flight_records import Calls, calls_of
from hpcdist.supervisor.hang.frames import Frame, printed, spied
from hpcdist.supervisor.hang.processes import CANNOT_RUN, RankProcess, facts_of, find_ranks
from hpcdist.supervisor.hang.snapshot_of_rank import Look

#: py-spy reads a healthy process in hundredths of a second; one that does not answer must not take all the time.
SPY_S = 5.0
#: How long ranks may take to print their stacks and write down their collectives.
PRINT_S = 4.0
#: Processor time is counted over this long at least.
CPU_OVER_S = 1.0
#: Older than this, a rank's record of its collectives is of another signal.
FRESH_S = 60.0
_LOG_BYTES = 512 * 1024
_TEXT_CHARS = 64 * 1024
_LOOK_EVERY_S = 0.05
_AT_ONCE = 4


def main(argv: Sequence[str]) -> None:
    folder, limit_s = argv
    attempt = Attempt(Path(folder))
    slurms = os.environ.get("SLURMD_NODENAME", "")
    node = slurms or socket.gethostname()
    processes = find_ranks(attempt.path.parent.parent, attempt.number, slurms)
    if looks := look_at(processes, attempt, node, time.monotonic() + float(limit_s)):
        write_json(attempt.node_stacks(node), {"ranks": [look.as_json() for look in looks]})


def look_at(processes: Sequence[RankProcess], attempt: Attempt, node: str, until: float) -> list[Look]:
    """Look at the ranks of this node, within the time that there is (`until`, on the monotonic clock)."""
    began = time.monotonic()
    before = {process: facts for process in processes if (facts := facts_of(process.pid)) is not None}
    spy = py_spy(os.environ)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        spied_now = pool.map(lambda process: _spied(spy, process, until), before)
        stacks = dict(zip(before, spied_now, strict=True))
    prints = Prints(attempt, [process.rank for process, stack in stacks.items() if not stack.frames])
    awaited = [process.rank for process, facts in before.items() if facts.state not in CANNOT_RUN]
    while awaited and time.monotonic() < min(began + PRINT_S, until) and not prints.are_there(awaited):
        time.sleep(_LOOK_EVERY_S)  # nobody tells when another process has written a file
    # Whether a process computes or waits shows only after a while.
    time.sleep(max(0.0, min(began + CPU_OVER_S, until) - time.monotonic()))
    found = []
    for process, first in before.items():
        last = facts_of(process.pid)
        if last is None:
            continue  # it has ended by itself
        stack = stacks[process] if stacks[process].frames else prints.stack(process.rank, stacks[process].problem)
        found.append(
            Look(
                rank=process.rank,
                host=node,
                pid=process.pid,
                frames=tuple(stack.frames),
                source=stack.source,
                problem=stack.problem,
                text=stack.text[:_TEXT_CHARS],
                calls=tuple(prints.calls(process.rank) or ()),
                facts=last,
                cpu_s=last.cpu_s - first.cpu_s,
                over_s=time.monotonic() - began,
            )
        )
    return found


class Stack(NamedTuple):
    """A process's stacks, the main thread's also as frames; or why there are none."""

    frames: Sequence[Frame] = ()
    text: str = ""
    source: str = ""
    problem: str = ""


class Prints:
    """What ranks write by themselves at SIGUSR1: stacks into their logs, collectives into a file.

    Args:
        mute: ranks whose stacks are to be had in their logs alone.
    """

    def __init__(self, attempt: Attempt, mute: Sequence[int]) -> None:
        self._attempt = attempt
        self._mute = mute
        self._since = time.time() - FRESH_S

    def are_there(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks have written all that is wanted of them."""
        return all(self.calls(rank) is not None for rank in ranks) and all(
            self.stack(rank).frames for rank in ranks if rank in self._mute
        )

    def calls(self, rank: int) -> list[Calls] | None:
        record = read_json(self._attempt.flight(rank))
        return calls_of(record["recorders"]) if record and record["time"] >= self._since else None

    def stack(self, rank: int, problem: str = "") -> Stack:
        try:
            with open(self._attempt.log(rank), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
                frames, text = printed(file.read().decode(errors="replace"))
        except FileNotFoundError:
            frames, text = [], ""
        return Stack(frames, text, "faulthandler" if frames else "", problem)


def py_spy(env: Mapping[str, str]) -> str | None:
    """Where py-spy is: where PATH finds it, or beside this Python."""
    return shutil.which("py-spy", path=env.get("PATH")) or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def _spied(spy: str | None, process: RankProcess, until: float) -> Stack:
    left_s = min(SPY_S, until - time.monotonic())
    if spy is None or left_s <= 0:
        return Stack()
    # Reads the memory of a process that runs on: one that is stopped cannot be stopped again, and a false alarm
    # leaves no trace.
    command = [spy, "dump", "--nonblocking", "--full-filenames", "--pid", str(process.pid)]
    command += ["--subprocesses"] if process.children else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired:
        return Stack(problem=f"py-spy did not answer within {left_s:.0f} s")
    frames = spied(done.stdout)
    if frames:
        return Stack(frames, done.stdout, "py-spy")
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    # The first line is a title; the reason stands below `Caused by:`.
    reason = next((line for above, line in pairwise(said) if above == "Caused by:"), said[0] if said else "")
    return Stack(problem=f"py-spy could not look into the process: {reason or 'it said nothing'}")


if __name__ == "__main__":
    main(sys.argv[1:])
