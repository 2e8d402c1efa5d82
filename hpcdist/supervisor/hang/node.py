"""Take snapshots of the ranks on one node, and write them to the attempt's folder.

    python -m hpcdist.supervisor.hang.node ATTEMPT SECONDS

Stacks come from py-spy if it is installed and permitted to read the processes, otherwise from the ranks' logs: ranks
print their stacks on SIGUSR1, which the supervisor sends. Runs outside of containers, as the user of the ranks.
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
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from hpcdist.files.atomic import read_json, write_json
from hpcdist.files.regular_file import open_regular
from hpcdist.run.attempt import Attempt
from hpcdist.supervisor.hang.flight_records import calls_of, pending_s
from hpcdist.supervisor.hang.frames import Frame, parse_faulthandler, parse_py_spy
from hpcdist.supervisor.hang.processes import CANNOT_RUN, RankProcess, find_ranks, state_of
from hpcdist.supervisor.hang.rank_snapshot import RankSnapshot

#: Time limit of py-spy for one process; it usually takes some 10 ms.
SPY_S = 5.0
#: Time for ranks to print their stacks and write their collectives.
PRINT_S = 4.0
#: Minimum duration for measuring CPU time.
CPU_OVER_S = 1.0
#: An older record of collectives belongs to an earlier signal.
FRESH_S = 60.0
_LOG_BYTES = 512 * 1024
_TEXT_CHARS = 64 * 1024
_POLL_S = 0.05
_AT_ONCE = 4


def main(argv: Sequence[str]) -> None:
    """Take the stacks of this node's ranks within a time limit and write them to the attempt's folder."""
    folder, limit_s = argv
    attempt = Attempt(Path(folder))
    slurm_node = os.environ.get("SLURMD_NODENAME", "")
    node = slurm_node or socket.gethostname()
    processes = find_ranks(attempt.path.parent.parent, attempt.number, slurm_node)
    if snapshots := take_snapshots(processes, attempt, node, time.monotonic() + float(limit_s)):
        write_json(attempt.node_stacks(node), {"ranks": [asdict(snapshot) for snapshot in snapshots]})


def take_snapshots(processes: Sequence[RankProcess], attempt: Attempt, node: str, until: float) -> list[RankSnapshot]:
    """Return snapshots of the ranks on this node, taken before `until` on the monotonic clock."""
    began = time.monotonic()
    before = {process: state for process in processes if (state := state_of(process.pid)) is not None}
    spy = py_spy(os.environ)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        results = pool.map(lambda process: _run_py_spy(spy, process, until), before)
        stacks = dict(zip(before, results, strict=True))
    prints = RankPrints(attempt, [process.rank for process, stack in stacks.items() if not stack.frames])
    awaited = [process.rank for process, state in before.items() if state.state not in CANNOT_RUN]
    while awaited and time.monotonic() < min(began + PRINT_S, until) and not prints.are_complete(awaited):
        time.sleep(_POLL_S)  # no event shows that another process has written a file
    # CPU time distinguishes computing from waiting only after a while.
    time.sleep(max(0.0, min(began + CPU_OVER_S, until) - time.monotonic()))
    found = []
    for process, first in before.items():
        last = state_of(process.pid)
        if last is None:
            continue  # the process has ended by itself
        stack = stacks[process] if stacks[process].frames else prints.stack(process.rank, stacks[process].problem)
        record = prints.flight_record(process.rank)
        found.append(
            RankSnapshot(
                rank=process.rank,
                host=node,
                pid=process.pid,
                frames=tuple(stack.frames),
                source=stack.source,
                problem=stack.problem,
                text=stack.text[:_TEXT_CHARS],
                calls=tuple(calls_of(record["recorders"])) if record else (),
                pending_s=pending_s(record["recorders"], record["time"]) if record else 0.0,
                process=last,
                cpu_s=last.cpu_s - first.cpu_s,
                over_s=time.monotonic() - began,
            )
        )
    return found


class Stack(NamedTuple):
    """Stacks of a process as text, and the main thread's as frames; or the reason why there are none."""

    frames: Sequence[Frame] = ()
    text: str = ""
    source: str = ""
    problem: str = ""


class RankPrints:
    """Output of ranks on SIGUSR1: stacks in their logs, collectives in a file.

    Args:
        unread: ranks whose stacks py-spy could not read.
    """

    def __init__(self, attempt: Attempt, unread: Sequence[int]) -> None:
        self._attempt = attempt
        self._unread = unread
        self._since = time.time() - FRESH_S

    def are_complete(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks have written their collectives, and their stacks if py-spy could not read them."""
        return all(self.flight_record(rank) is not None for rank in ranks) and all(
            self.stack(rank).frames for rank in ranks if rank in self._unread
        )

    def flight_record(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's flight record with its collectives; None if there is no new one."""
        record = read_json(self._attempt.flight(rank))
        return record if record and record["time"] >= self._since else None

    def stack(self, rank: int, problem: str = "") -> Stack:
        """Return the stack that a rank has written to its log."""
        try:
            with open_regular(self._attempt.log(rank)) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
                frames, text = parse_faulthandler(file.read().decode(errors="replace"))
        except FileNotFoundError:
            frames, text = [], ""
        return Stack(frames, text, "faulthandler" if frames else "", problem)


def py_spy(env: Mapping[str, str]) -> str | None:
    """Return the path of py-spy, in PATH or in the folder of this Python; None if it is not installed."""
    return shutil.which("py-spy", path=env.get("PATH")) or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def _run_py_spy(spy: str | None, process: RankProcess, until: float) -> Stack:
    left_s = min(SPY_S, until - time.monotonic())
    if spy is None or left_s <= 0:
        return Stack()
    # Without pausing the process: a stopped process cannot be stopped again, and a false alarm has no effect.
    command = [spy, "dump", "--nonblocking", "--full-filenames", "--pid", str(process.pid)]
    command += ["--subprocesses"] if process.children else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired:
        return Stack(problem=f"py-spy did not answer within {left_s:.0f} s")
    frames = parse_py_spy(done.stdout)
    if frames:
        return Stack(frames, done.stdout, "py-spy")
    messages = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    # The first line is a title; the reason follows `Caused by:`.
    reason = next((line for above, line in pairwise(messages) if above == "Caused by:"), "")
    reason = reason or (messages[0] if messages else "no output")
    return Stack(problem=f"py-spy could not read the process: {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
