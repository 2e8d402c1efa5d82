"""Noise of the measurements: the factor by which equal operations differ without a fault.

The noise is large on machines that run other work. Smaller differences are not reported as faults.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations

from hpcdist.bench.results import Results, Row

#: Noise factor from which on the report mentions the noise, and the largest factor that counts as noise.
BUSY, MAX_NOISE = 4.0, 20.0


def roughness(series: Iterable[Row]) -> float:
    """Return the largest factor by which a smaller size took longer than a larger one; at least 1."""
    ordered = sorted(series, key=lambda row: row.size)
    return max((small.median_s / large.median_s for small, large in combinations(ordered, 2)), default=1.0)


def disturbance(results: Results) -> float:
    """Return the factor by which transfers between two ranks differ, at least 1.

    It is the larger of p99 / median (at the upper quartile over the sizes) and the factor by which small transfers took
    longer than large ones.
    """
    series: dict[str, list[Row]] = defaultdict(list)
    for row in results.rows:
        if row.operation in ("send_recv", "isend_irecv") and row.mode == "blocking" and row.group == "world":
            series[row.operation].append(row)
    tails = sorted(row.p99_s / row.median_s for rows in series.values() for row in rows)
    found = [*tails[len(tails) * 3 // 4 :][:1], *map(roughness, series.values()), 1.0]
    return min(max(found), MAX_NOISE)
