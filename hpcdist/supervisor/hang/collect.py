"""The supervisor's part: ask every node what its ranks are doing, and write down what came back, within a deadline."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcdist.files.atomic import read_json, write_atomic
from hpcdist.run.attempt import Attempt
from hpcdist.supervisor.hang.snapshot_of_rank import Look
from hpcdist.supervisor.hang.summary import MAX_RANKS, Summary, summarize
from hpcdist.supervisor.launcher import Ranks

log = logging.getLogger(__name__)
#: Ranks that stand still get this long to print their stacks, also where no node answers.
PRINT_S = 1.0
#: What starting a command on all nodes may take of the time that there is.
_START_SHARE = 0.35


def collect(attempt: Attempt, ranks: Ranks, *, limit_s: float, interrupted: Callable[[], bool]) -> Summary | None:
    """Collect the stacks of all ranks that still run; None when nothing was to be had.

    Args:
        limit_s: nodes that have not answered by then are left out.
        interrupted: asked again and again; true ends the wait.
    """
    began = time.monotonic()
    # faulthandler prints the stacks into the logs, `rank/telemetry/flight_recorder.py` writes down the collectives.
    ranks.signal(signal.SIGUSR1)
    printed_at = time.monotonic() + PRINT_S
    # With Slurm's controller away the signal has taken a while.
    left_s = max(0.0, began + limit_s - time.monotonic())
    command = [sys.executable, "-P", "-m", "hpcdist.supervisor.hang.node", str(attempt.path)]
    command.append(f"{left_s * (1 - _START_SHARE):.1f}")
    messages = attempt.path / "stacks.log"
    try:
        ranks.examine(command, output=messages, limit_s=left_s, interrupted=interrupted)
        while ranks.running and (left_s := printed_at - time.monotonic()) > 0 and not interrupted():
            ranks.wait(left_s)
        return _write_down(attempt, ranks, messages)
    except OSError as error:
        # A full disk, most likely: it must not keep anyone from ending the ranks.
        log.warning("stacks cannot be collected in %s: %s", attempt.path, error)
        return None


def _write_down(attempt: Attempt, ranks: Ranks, messages: Path) -> Summary | None:
    looks = {look.rank: look for look in _answers(attempt)}
    if messages.exists() and not messages.stat().st_size:
        messages.unlink()
    if not looks:
        return None
    unseen = {rank: ranks.host_of(rank) for rank in ranks.running if rank not in looks}
    summary = summarize(list(looks.values()), unseen)
    write_atomic(attempt.stacks_summary, summary.text)
    for rank in summary.odd_first[:MAX_RANKS]:
        write_atomic(attempt.stacks(rank), looks[rank].whole_text())
    for rank in summary.odd_first[MAX_RANKS:]:
        attempt.flight(rank).unlink(missing_ok=True)
    return summary


def _answers(attempt: Attempt) -> Iterator[Look]:
    """What the nodes have seen; their files are not needed any more."""
    for path in sorted(attempt.path.glob(attempt.node_stacks("*").name)):
        for value in (read_json(path) or {"ranks": []})["ranks"]:
            yield Look.from_json(value)
        path.unlink()
