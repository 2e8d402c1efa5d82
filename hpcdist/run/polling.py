"""How often the files of a run are touched: bounds for the shared file system, whatever the number of ranks.

Small runs do everything about once a second; above WRITES_PER_S ranks each rank's turn comes more seldom instead.
Only where turns would be too rare to tell a hang do the bounds give way: with more than a quarter of
`launch.hang_timeout_s` × WRITES_PER_S ranks, 28,800 by default. `benchmarks/scale.py` counts what comes of it.
"""

from __future__ import annotations

#: Heartbeats written by all ranks together, and likewise system metrics by all nodes.
WRITES_PER_S = 64.0
#: Points of all nodes' step times.
TIMES_PER_S = 8.0
#: Files that the supervisor, or the shipper, asks for news of ranks.
LOOKS_PER_S = 64.0
BEAT_EVERY_S = 1.0
#: A sign of life may be on its way for this share of the time after which its absence means a hang.
_SHARE_OF_HANG = 0.25


def beat_interval_s(rank: int, num_ranks: int, hang_timeout_s: float) -> float:
    """Seconds between two heartbeats of a rank. Rank 0's are what people see of the progress, and stay frequent."""
    interval_s = BEAT_EVERY_S if rank == 0 else max(BEAT_EVERY_S, num_ranks / WRITES_PER_S)
    return min(interval_s, _SHARE_OF_HANG * hang_timeout_s)


def looks_at_once(num_ranks: int, since_last_s: float, hang_timeout_s: float) -> int:
    """How many ranks' signs of life are due for a look, `since_last_s` after the last ones."""
    per_s = max(LOOKS_PER_S, num_ranks / (_SHARE_OF_HANG * hang_timeout_s))
    return min(num_ranks, max(1, round(per_s * since_last_s)))


def system_interval_s(configured_s: float, num_nodes: int) -> float:
    """Seconds between two points of a node's system metrics; 0 means none."""
    return max(configured_s, num_nodes / WRITES_PER_S) if configured_s > 0 else 0.0


def times_interval_s(num_nodes: int) -> float:
    """Seconds between two points of a node's step times, at least; few nodes log at each logging interval."""
    return num_nodes / TIMES_PER_S if num_nodes > TIMES_PER_S else 0.0
