"""Intervals of reads and writes in a run folder, which limit the load of the shared file system at any scale.

Small runs read and write about once a second; with more than WRITES_PER_S ranks, each rank does so less often. The
limits are exceeded only if hangs could not be detected otherwise: with more ranks than a quarter of
`launch.hang_timeout_s` × WRITES_PER_S, 28,800 by default. `benchmarks/scale.py` measures the resulting load.
"""

from __future__ import annotations

#: Heartbeats of all ranks together; also system metrics of all nodes together.
WRITES_PER_S = 64.0
#: Step-time points of all nodes together.
TIMES_PER_S = 8.0
#: Files that the supervisor, or the shipper, checks.
CHECKS_PER_S = 64.0
BEAT_EVERY_S = 1.0
#: Limit of the heartbeat interval, as a share of the hang timeout.
_SHARE_OF_HANG = 0.25


def beat_interval_s(rank: int, num_ranks: int, hang_timeout_s: float) -> float:
    """Return the seconds between heartbeats of a rank. Rank 0, which shows the progress, keeps the short interval."""
    interval_s = BEAT_EVERY_S if rank == 0 else max(BEAT_EVERY_S, num_ranks / WRITES_PER_S)
    return min(interval_s, _SHARE_OF_HANG * hang_timeout_s)


def num_due_ranks(num_ranks: int, since_last_s: float, hang_timeout_s: float) -> int:
    """Return the number of ranks to check, `since_last_s` seconds after the last check."""
    per_s = max(CHECKS_PER_S, num_ranks / (_SHARE_OF_HANG * hang_timeout_s))
    return min(num_ranks, max(1, round(per_s * since_last_s)))


def system_interval_s(configured_s: float, num_nodes: int) -> float:
    """Return the seconds between system metrics of a node; 0 means none."""
    return max(configured_s, num_nodes / WRITES_PER_S) if configured_s > 0 else 0.0


def times_interval_s(num_nodes: int) -> float:
    """Return the minimum seconds between step times of a node; 0 for few nodes, which log at each interval."""
    return num_nodes / TIMES_PER_S if num_nodes > TIMES_PER_S else 0.0
