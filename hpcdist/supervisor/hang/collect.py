"""Collect the stack traces of all ranks within a time limit, and save them in the attempt's folder."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcdist.files.atomic import read_json, write_atomic
from hpcdist.run.attempt import Attempt
from hpcdist.supervisor.hang.rank_snapshot import RankSnapshot
from hpcdist.supervisor.hang.summary import MAX_RANKS, Summary, summarize
from hpcdist.supervisor.launcher import Ranks

log = logging.getLogger(__name__)
#: Hung ranks get this time to print their stacks, even if no node answers.
PRINT_S = 1.0
#: Share of the time limit for starting a command on all nodes.
_START_SHARE = 0.35


def collect(attempt: Attempt, ranks: Ranks, *, limit_s: float, interrupted: Callable[[], bool]) -> Summary | None:
    """Collect the stacks of all running ranks.

    Args:
        limit_s: nodes that have not answered by then are left out.
        interrupted: called repeatedly; true ends the wait.

    Returns:
        The summary, or None if no stack could be collected.
    """
    began = time.monotonic()
    # faulthandler prints the stacks to the logs, and `rank/telemetry/flight_recorder.py` writes the collectives.
    ranks.signal(signal.SIGUSR1)
    printed_at = time.monotonic() + PRINT_S
    # Sending the signal takes a while if Slurm's controller does not answer.
    left_s = max(0.0, began + limit_s - time.monotonic())
    command = [sys.executable, "-P", "-m", "hpcdist.supervisor.hang.node", str(attempt.path)]
    command.append(f"{left_s * (1 - _START_SHARE):.1f}")
    messages = attempt.path / "stacks.log"
    try:
        ranks.examine(command, output=messages, limit_s=left_s, interrupted=interrupted)
        while ranks.running and (left_s := printed_at - time.monotonic()) > 0 and not interrupted():
            ranks.wait(left_s)
        return _save(attempt, ranks, messages)
    except OSError as error:
        # Most likely a full disk, which must not prevent the end of the ranks.
        log.warning("stack traces cannot be collected in %s: %s", attempt.path, error)
        return None


def _save(attempt: Attempt, ranks: Ranks, messages: Path) -> Summary | None:
    snapshots = {one.rank: one for one in _read_snapshots(attempt)}
    if messages.exists() and not messages.stat().st_size:
        messages.unlink()
    if not snapshots:
        return None
    missing = {rank: ranks.host_of(rank) for rank in ranks.running if rank not in snapshots}
    summary = summarize(list(snapshots.values()), missing)
    write_atomic(attempt.stacks_summary, summary.text)
    for rank in summary.odd_first[:MAX_RANKS]:
        write_atomic(attempt.stacks(rank), snapshots[rank].whole_text())
    for rank in summary.odd_first[MAX_RANKS:]:
        attempt.flight(rank).unlink(missing_ok=True)
    return summary


def _read_snapshots(attempt: Attempt) -> Iterator[RankSnapshot]:
    """Yield the snapshots from all nodes, and remove the nodes' files."""
    for path in sorted(attempt.path.glob(attempt.node_stacks("*").name)):
        for value in (read_json(path) or {"ranks": []})["ranks"]:
            yield RankSnapshot.from_json(value)
        path.unlink()
