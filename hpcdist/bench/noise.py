"""By how much measurements of the same thing differ with nothing being wrong.

On machines that do something else besides, this is a lot. Nothing that differs by less is told as a fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations

from hpcdist.bench.results import Results, Row

#: From which factor between transfers on a machine is busy; and more than this is a fault whatever else goes on.
BUSY, MOST_DISTURBED = 4.0, 20.0


def roughness(series: Iterable[Row]) -> float:
    """By which factor an operation took longer at a smaller size than at a larger one; 1 where it never did."""
    ordered = sorted(series, key=lambda row: row.size)
    return max((small.median_s / large.median_s for small, large in combinations(ordered, 2)), default=1.0)


def disturbance(results: Results) -> float:
    """By which factor transfers between two ranks differ from each other, 1 where that was not seen.

    It shows in how much longer than mostly a transfer takes now and then (p99 of the upper quartile of sizes), and in
    small transfers that took longer than large ones.
    """
    series: dict[str, list[Row]] = defaultdict(list)
    for row in results.rows:
        if row.operation in ("send_recv", "isend_irecv") and row.mode == "blocking" and row.group == "world":
            series[row.operation].append(row)
    tails = sorted(row.p99_s / row.median_s for rows in series.values() for row in rows)
    found = [*tails[len(tails) * 3 // 4 :][:1], *map(roughness, series.values()), 1.0]
    return min(max(found), MOST_DISTURBED)
