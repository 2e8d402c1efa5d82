"""Which rank or pair of ranks is slower than the others.

A slow node is part of many pairs: of four nodes' pairs it is half, of three nodes' most. So pairs are not simply held
against their median. What a pair can do is the lesser of what its sender can send and what its receiver can receive,
and each of these is the best that was seen with any partner. A rank that is slow with all its partners is a slow
rank; a pair that is slower than both its ends is a slow pair.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

Link = tuple[int, int]
#: Where ranks have fewer partners than these to show how much links differ by nature, only twice as slow is slow.
FEW_PARTNERS, SLOW_OF_FEW = 4, 2.0
#: What lies within so many standard deviations is no fault; but this factor always is one.
DEVIATIONS, SURELY = 4.0, 4.0


@dataclass(frozen=True)
class Slow:
    """What is slow among links of one kind."""

    links: Mapping[Link, float]
    sends: frozenset[int]  #: ranks that are slow to all they send to
    receives: frozenset[int]  #: ranks that are slow from all they receive from
    pairs: frozenset[Link]  #: links that are slower than their ends are with others

    @property
    def usual(self) -> float:
        """Speed of the median pair among those that nothing slows down."""
        healthy = [speed for link, speed in self.links.items() if not self._is_slow(link)]
        return median(healthy or self.links.values())

    def of_ranks(self, ranks: Iterable[int]) -> float:
        """The median speed of ranks' links in the directions in which they are slow."""
        named = set(ranks)
        return median(
            speed
            for (source, target), speed in self.links.items()
            if (source in named & self.sends) or (target in named & self.receives)
        )

    def _is_slow(self, link: Link) -> bool:
        return link[0] in self.sends or link[1] in self.receives or link in self.pairs


def find_slow(links: Mapping[Link, float], factor: float, least_s: float = 0.0) -> Slow:
    """Compare links of one kind by their speeds.

    Args:
        links: by (source, target), any speed, such as bytes/s or, for latencies, 1/s; all > 0.
        factor: from which on one is slow, if the noise allows to say so.
        least_s: for latencies, a difference below this is none.
    """

    def is_slow(speed: float, usual: float, factor: float) -> bool:
        return speed * factor < usual and (not least_s or 1 / speed - 1 / usual > least_s)

    num_sources = len({source for source, _ in links})
    least = max(factor, SLOW_OF_FEW) if len(links) < FEW_PARTNERS * num_sources else factor
    sent, received = _best_of(links, end=0), _best_of(links, end=1)
    ends = [*sent.values(), *received.values()]
    usual = _upper_median(links.values())
    expected = {link: min(sent.get(link[0], usual), received.get(link[1], usual)) for link in links}
    residuals = {link: math.log(speed / expected[link]) for link, speed in links.items()}
    # Two links cannot show by how much links differ.
    noise = _noise(links, list(residuals.values()), ends) if len(links) > 2 else 0.0
    centre = math.exp(median(residuals.values())) if len(links) > 2 else 1.0
    # The best of many partners differs by less.
    of_ends = min(noise, _deviation(list(map(math.log, ends)))) if ends else noise
    limit, limit_of_ends = (
        min(max(least, math.exp(DEVIATIONS * deviation)), max(SURELY, factor)) for deviation in (noise, of_ends)
    )
    typical = _upper_median(ends) if ends else usual
    sends = frozenset(rank for rank, speed in sent.items() if is_slow(speed, typical, limit_of_ends))
    receives = frozenset(rank for rank, speed in received.items() if is_slow(speed, typical, limit_of_ends))
    found = Slow(links, sends, receives, frozenset())
    pairs = frozenset(
        link
        for link, speed in links.items()
        if link[0] not in sends
        and link[1] not in receives
        and is_slow(speed, expected[link] * centre, limit)
        and is_slow(speed, found.usual, least)
    )
    return replace(found, pairs=pairs)


def _best_of(links: Mapping[Link, float], *, end: int) -> dict[int, float]:
    """What each rank reached with its best partner; only of those with several, since one partner tells of a pair."""
    found: dict[int, list[float]] = defaultdict(list)
    for link, speed in links.items():
        found[link[end]].append(speed)
    return {rank: max(speeds) for rank, speeds in found.items() if len(speeds) > 1}


def _upper_median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _noise(links: Mapping[Link, float], residuals: Sequence[float], ends: Sequence[float]) -> float:
    """By how much links differ by nature: a standard deviation of logarithms, robust (median absolute deviation).

    What is slow must not count as noise, however much of it there is. A slow node shows among the nodes, but not
    between the two directions of a pair; a slow direction shows between these, but not among the nodes. Noise does in
    both.
    """
    both_ways = [math.log(speed / links[b, a]) for (a, b), speed in links.items() if a < b and (b, a) in links]
    estimates = [_deviation([math.log(speed) for speed in ends])] if ends else []
    if both_ways:
        estimates.append(1.4826 * median(map(abs, both_ways)) / math.sqrt(2))
    # What was fitted to so few links hides a part of the noise: as many degrees of freedom are gone as ranks have ends.
    left = max(1, len(links) - len(ends) + 1)
    return max(_deviation(residuals) * math.sqrt(len(links) / left), min(estimates, default=0.0))


def _deviation(values: Sequence[float]) -> float:
    centre = median(values)
    return 1.4826 * median(abs(value - centre) for value in values)
