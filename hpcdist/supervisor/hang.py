"""Hung ranks: their stack traces, collected on every node before the ranks are killed, and the ranks that the others
wait for.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from hpcdist.host.files import read_json, write_atomic
from hpcdist.host.machine import gpus
from hpcdist.run.folder import Attempt
from hpcdist.supervisor.hang_node import RankSnapshot, compare_calls, find_ranks, ranks_text
from hpcdist.supervisor.launcher import Ranks

# Summary of the snapshots of all ranks, which finds the ranks that the others wait for. Pure functions.

#: Limit of the table rows for ranks and for locations, and of the stacks files.
MAX_RANKS = 64
#: Limit of the locations and hosts in the sentence.
_NAMED = 3
#: A runnable process that got less than this share of a core is starved.
_STARVED = 0.5


@dataclass(frozen=True, kw_only=True)
class Summary:
    sentence: str  #: ends the reason of the run's failure
    suspects: tuple[int, ...]  #: ranks that the others seem to wait for; empty if unclear
    odd_first: tuple[int, ...]  #: all ranks with a snapshot, the suspects first
    hosts: Mapping[int, str]  #: by rank
    text: str  #: the whole summary
    pending_s: Mapping[int, float] = field(default_factory=dict)  #: `RankSnapshot.pending_s` by rank


def summarize(snapshots: Sequence[RankSnapshot], missing_ranks: Mapping[int, str]) -> Summary:
    """Group ranks by the location of their stacks, and find the suspects.

    Args:
        missing_ranks: hosts of the ranks that were not found, by rank.
    """
    by_rank = {snapshot.rank: snapshot for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.rank)}
    groups = _groups(by_rank)
    absent, collectives = compare_calls({rank: snapshot.calls for rank, snapshot in by_rank.items()})
    suspects = _suspects(by_rank, groups, absent)
    apart = "; ".join(filter(None, [_starved(by_rank), _no_snapshot(missing_ranks)]))
    sentence = "; ".join(
        filter(None, [_sentence(groups, suspects, all_seen=not missing_ranks), *collectives[:1], apart])
    )
    group_of = {rank: number for number, ranks in enumerate(groups.values()) for rank in ranks}
    odd_first = tuple(sorted(by_rank, key=lambda rank: (rank not in suspects, -group_of[rank], rank)))
    return Summary(
        sentence=sentence,
        suspects=suspects,
        odd_first=odd_first,
        hosts={rank: snapshot.host for rank, snapshot in by_rank.items()},
        text=_text(sentence, groups, collectives, apart, [by_rank[rank] for rank in odd_first]),
        pending_s={rank: snapshot.pending_s for rank, snapshot in by_rank.items()},
    )


def _groups(snapshots: Mapping[int, RankSnapshot]) -> dict[str, list[int]]:
    """Group ranks by location, the largest group first.

    If the locations are too many, as they are for computing ranks, only the lines of user code count.
    """
    found = _by_location(snapshots, own=False)
    if len(found) > max(_NAMED, len(snapshots) / 2):
        found = _by_location(snapshots, own=True)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[1])))


def _by_location(snapshots: Mapping[int, RankSnapshot], *, own: bool) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, snapshot in snapshots.items():
        location, state = snapshot.location, f"state {snapshot.process.state}"
        if snapshot.is_stopped:
            at = f"{state} at {location.text()}" if location else state
        elif location is None:
            at = f"no stack, {state}"
        else:
            at = f"in {location.own.text() if own else location.text()}"
        found.setdefault(at, []).append(rank)
    return found


def _starved(snapshots: Mapping[int, RankSnapshot]) -> str:
    """Return a sentence about ranks that do not hang, but get too little CPU time; empty if there are none."""
    starved = [
        rank
        for rank, snapshot in snapshots.items()
        if snapshot.process.state == psutil.STATUS_RUNNING and snapshot.cpu_s < _STARVED * snapshot.over_s
    ]
    if len(starved) <= len(snapshots) / 2:
        return ""
    share = max(snapshots[rank].cpu_s / snapshots[rank].over_s for rank in starved)
    get = "gets" if len(starved) == 1 else "get"
    return f"{ranks_text(starved)} {get} at most {share:.0%} of a core: other processes use their CPUs"


def _suspects(
    snapshots: Mapping[int, RankSnapshot], groups: Mapping[str, Sequence[int]], absent: Collection[int]
) -> tuple[int, ...]:
    """Return the ranks that cannot run; else those that have not called a collective; else a small minority."""
    if stopped := [rank for rank, snapshot in snapshots.items() if snapshot.is_stopped]:
        return tuple(stopped)
    if idle := [rank for rank in absent if not any(call.pending for call in snapshots[rank].calls)]:
        return tuple(sorted(idle))
    most, *others = groups.values() if groups else [[]]
    few = sorted(rank for ranks in others for rank in ranks)
    return tuple(few) if len(most) > 2 * len(few) or (len(most) > 1 and len(few) == 1) else ()


def _sentence(groups: Mapping[str, Sequence[int]], suspects: Sequence[int], *, all_seen: bool) -> str:
    if not groups:
        return ""
    if len(groups) == 1:
        ((at, ranks),) = groups.items()
        who = "all ranks" if all_seen and len(ranks) > 1 else ranks_text(ranks)
        return f"{who} {'is' if len(ranks) == 1 else 'are'} {at}"
    suspected = [item for item in groups.items() if set(item[1]) & set(suspects)]
    others = [item for item in groups.items() if item not in suspected]
    named = [f"{ranks_text(ranks)} {at}" for at, ranks in (*suspected, *others)]
    more = [f"and {len(named) - _NAMED} more locations"] if len(named) > _NAMED else []
    text = "; ".join([*named[:_NAMED], *more])
    if len(suspected) != 1 or suspected[0][1] != list(suspects):
        return text
    # All suspects are at one location, whose ranks the sentence names first.
    who = ranks_text(suspects)
    return f"{who} differ{'s' * (len(suspects) == 1)} from the others:{text.removeprefix(who)}"


def _no_snapshot(missing_ranks: Mapping[int, str]) -> str:
    if not missing_ranks:
        return ""
    hosts = sorted(set(missing_ranks.values()))
    listed = ", ".join(hosts[:_NAMED]) + (f" and {len(hosts) - _NAMED} more" if len(hosts) > _NAMED else "")
    return f"no snapshot of {ranks_text(missing_ranks)} ({listed})"


def _text(
    sentence: str,
    groups: Mapping[str, Sequence[int]],
    collectives: Sequence[str],
    apart: str,
    snapshots: Sequence[RankSnapshot],
) -> str:
    lines = [sentence, "", "locations of the ranks:"]
    rows = [f"  {len(ranks):>5}  {ranks_text(ranks)}: {at}" for at, ranks in groups.items()]
    lines += rows[:MAX_RANKS] + ([f"  and {len(rows) - MAX_RANKS} more locations"] if len(rows) > MAX_RANKS else [])
    if collectives:
        lines += ["", "collectives, from the flight recorders:", *(f"  {text}" for text in collectives)]
    if apart:
        lines += ["", apart]
    lines += ["", "processes:"]
    lines += [f"  rank {one.rank} on {one.host}: {one.state_text()}" for one in snapshots[:MAX_RANKS]]
    if len(snapshots) > MAX_RANKS:
        lines.append(f"  and {len(snapshots) - MAX_RANKS} more")
    return "\n".join([*lines, "", "complete stacks: rank-NNNNN.stacks.txt in this folder", ""])


# Collect the stack traces of all ranks within a time limit, and save them in the attempt's folder.

log = logging.getLogger(__name__)
#: Hung ranks get this time to print their stacks, even if no node answers.
PRINT_S = 1.0
#: Share of the time limit for starting a command on all nodes.
_START_SHARE = 0.35


def collect(attempt: Attempt, ranks: Ranks, *, limit_s: float, interrupted: Callable[[], bool]) -> Summary | None:
    """Collect the stacks of all running ranks.

    Args:
        limit_s: nodes that have not answered by then are left out.

    Returns:
        The summary, or None if no stack could be collected.
    """
    began = time.monotonic()
    # faulthandler prints the stacks to the logs, and `rank/telemetry.py` writes the collectives.
    ranks.signal(signal.SIGUSR1)
    printed_at = time.monotonic() + PRINT_S
    # Sending the signal takes a while if Slurm's controller does not answer.
    left_s = max(0.0, began + limit_s - time.monotonic())
    command = [sys.executable, "-P", "-m", "hpcdist.supervisor.hang_node", str(attempt.path)]
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


# CPU and GPU use of the ranks' processes, which distinguishes a run that computes in silence from one that hangs.
#
#     python -m hpcdist.supervisor.hang ATTEMPT
#
# prints it on each node, outside of containers. Unlike the collection of stack traces, it does not signal the ranks.

#: A rank that has used more than this share of a core computes.
_BUSY_SHARE = 0.1


class Activity(NamedTuple):
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
    try:
        return sum(psutil.Process(pid).cpu_times()[:4])
    except psutil.Error:
        return 0.0  # it has just ended


def read_activities(
    attempt: Attempt, ranks: Ranks, *, limit_s: float, interrupted: Callable[[], bool]
) -> dict[int, Activity]:
    """Return the activities of the ranks on the nodes that answer within `limit_s`, by rank."""
    output = attempt.path / "activity.log"
    command = [sys.executable, "-P", "-m", "hpcdist.supervisor.hang", str(attempt.path)]
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
