"""Find nodes or ranks, and pairs of them, that are slower than the others.

A slow node is part of many pairs: half of the pairs of four nodes, and most of the pairs of three. Comparing pairs with
their median is therefore not sufficient. The expected speed of a pair is the lower one of the best speeds of its sender
and of its receiver with any partner. A node that is slow with all its partners is a slow node; a pair that is slower
than both its ends is a slow pair. Single ranks are judged in the same way.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Generic, TypeVar

#: A node's name, or the number of a rank.
End = TypeVar("End", bound=Hashable)
#: With fewer partners than this the normal spread of links is uncertain, and the second factor is required.
FEW_PARTNERS, FACTOR_OF_FEW = 4, 2.0
#: Deviations within this number of standard deviations are not faults, but this factor always is.
DEVIATIONS, CERTAIN_FACTOR = 4.0, 4.0


@dataclass(frozen=True)
class SlowLinks(Generic[End]):
    """The slow ends and pairs among links of one kind."""

    links: Mapping[tuple[End, End], float]
    sends: frozenset[End]  #: ends that send slowly to all partners
    receives: frozenset[End]  #: ends that receive slowly from all partners
    pairs: frozenset[tuple[End, End]]  #: links that are slower than both ends are with other partners

    @property
    def usual(self) -> float:
        """Median speed of the pairs that are not slow."""
        healthy = [speed for link, speed in self.links.items() if not self._is_slow(link)]
        return median(healthy or self.links.values())

    def of_ends(self, ends: Iterable[End]) -> float:
        """Return the median speed of the links of these ends in their slow directions."""
        named = set(ends)
        return median(
            speed
            for (source, target), speed in self.links.items()
            if (source in named & self.sends) or (target in named & self.receives)
        )

    def _is_slow(self, link: tuple[End, End]) -> bool:
        return link[0] in self.sends or link[1] in self.receives or link in self.pairs


def find_slow_links(links: Mapping[tuple[End, End], float], factor: float, least_s: float = 0.0) -> SlowLinks[End]:
    """Return the slow ends and pairs among links of one kind.

    Args:
        links: speed by (source, target), such as bytes/s, or 1 / seconds for latencies; all > 0.
        factor: factor from which on a link is slow, if it exceeds the noise.
        least_s: minimum difference of latencies, in seconds; 0 for bandwidths.
    """

    def is_slow(speed: float, usual: float, factor: float) -> bool:
        return speed * factor < usual and (not least_s or 1 / speed - 1 / usual > least_s)

    if not links:
        return SlowLinks(links, frozenset(), frozenset(), frozenset())
    num_sources = len({source for source, _ in links})
    least = max(factor, FACTOR_OF_FEW) if len(links) < FEW_PARTNERS * num_sources else factor
    sent, received = _best_of(links, side=0), _best_of(links, side=1)
    ends = [*sent.values(), *received.values()]
    usual = _upper_median(links.values())
    expected = {link: min(sent.get(link[0], usual), received.get(link[1], usual)) for link in links}
    residuals = {link: math.log(speed / expected[link]) for link, speed in links.items()}
    # The spread cannot be estimated from two links.
    noise = _noise(links, list(residuals.values()), ends) if len(links) > 2 else 0.0
    centre = math.exp(median(residuals.values())) if len(links) > 2 else 1.0
    # The best of many partners has a smaller spread.
    of_ends = min(noise, _deviation(list(map(math.log, ends)))) if ends else noise
    limit, limit_of_ends = (
        min(max(least, math.exp(DEVIATIONS * deviation)), max(CERTAIN_FACTOR, factor)) for deviation in (noise, of_ends)
    )
    typical = _upper_median(ends) if ends else usual
    sends = frozenset(end for end, speed in sent.items() if is_slow(speed, typical, limit_of_ends))
    receives = frozenset(end for end, speed in received.items() if is_slow(speed, typical, limit_of_ends))
    found = SlowLinks(links, sends, receives, frozenset())
    pairs = frozenset(
        link
        for link, speed in links.items()
        if link[0] not in sends
        and link[1] not in receives
        and is_slow(speed, expected[link] * centre, limit)
        and is_slow(speed, found.usual, least)
    )
    return replace(found, pairs=pairs)


def _best_of(links: Mapping[tuple[End, End], float], *, side: int) -> dict[End, float]:
    """Return the best speed of each source (side 0) or target (side 1) with more than one partner."""
    found: dict[End, list[float]] = defaultdict(list)
    for link, speed in links.items():
        found[link[side]].append(speed)
    return {end: max(speeds) for end, speeds in found.items() if len(speeds) > 1}


def _upper_median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _noise(links: Mapping[tuple[End, End], float], residuals: Sequence[float], ends: Sequence[float]) -> float:
    """Return the normal spread of links as a robust standard deviation of logarithms (median absolute deviation).

    Slow links must not count as noise, however many there are. A slow node increases the spread among nodes but not the
    difference between the directions of a pair; a slow direction increases only the latter. Noise increases both.
    """
    both_ways = [math.log(speed / links[b, a]) for (a, b), speed in links.items() if (b, a) in links]
    estimates = [_deviation([math.log(speed) for speed in ends])] if ends else []
    if both_ways:
        estimates.append(1.4826 * median(map(abs, both_ways)) / math.sqrt(2))
    # Corrects the degrees of freedom: the expected speeds were fitted to the same links.
    left = max(1, len(links) - len(ends) + 1)
    return max(_deviation(residuals) * math.sqrt(len(links) / left), min(estimates, default=0.0))


def _deviation(values: Sequence[float]) -> float:
    centre = median(values)
    return 1.4826 * median(abs(value - centre) for value in values)
