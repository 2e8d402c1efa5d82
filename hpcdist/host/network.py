"""Slow links between nodes or ranks: rounds of transfers, bandwidths, and the comparison of links; the format of sizes,
times and rates.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Generic, TypeVar


def amount(num_bytes: int) -> str:
    """Format a size, such as `8 B` or `1.5 MiB`."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"


def seconds(time_s: float) -> str:
    """Format a duration, such as `8.3 µs` or `120 ms`."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if time_s * factor < 999.5:
            return f"{_short(time_s * factor)} {unit}"
    return f"{_short(time_s)} s"


def rate(*bytes_per_s: float) -> str:
    """Format rates in the unit of the largest, such as `25.1 MB/s` or `0.980 / 1.30 GB/s`."""
    units = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
    factor, unit = next((unit for unit in units if max(bytes_per_s) >= 0.9995 * unit[0]), units[-1])
    return f"{' / '.join(_short(value / factor) for value in bytes_per_s)} {unit}"


def times(factor: float) -> str:
    """Format a factor with two significant digits, such as `1.6×`."""
    return f"{float(f'{factor:.2g}'):g}×"


def _short(value: float) -> str:
    """Format three significant digits and all digits before the decimal point."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def bandwidths(operation: str, num_bytes: int, time_s: float, num_ranks: int) -> tuple[float, float]:
    """Return the algorithm and the bus bandwidth of an operation, in bytes/s, as nccl-tests defines them.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: `num_bytes` is the size of all data, the parts
    of all ranks together. The bus bandwidth is the rate of the busiest link, which can be compared between operations
    and world sizes.
    """
    algbw = num_bytes / time_s
    share = (num_ranks - 1) / num_ranks
    if operation == "all_reduce":
        return algbw, algbw * 2 * share
    if operation in ("all_gather", "all_to_all", "gather", "reduce_scatter", "scatter"):
        return algbw, algbw * share
    return algbw, algbw


# Nodes or ranks, and pairs of them, that are slower than the others.
#
# A slow node is part of many pairs: half of the pairs of four nodes, and most of the pairs of three. Comparing pairs
# with their median is therefore not sufficient. The expected speed of a pair is the lower one of the best speeds of its
# sender and of its receiver with any partner. A node that is slow with all its partners is a slow node; a pair that is
# slower than both its ends is a slow pair. Single ranks are judged in the same way.

#: A node's name, or the number of a rank.
End = TypeVar("End", bound=Hashable)
#: With fewer partners than this the normal spread of links is uncertain, and the second factor is required.
FEW_PARTNERS, FACTOR_OF_FEW = 4, 2.0
#: Deviations within this number of standard deviations are not faults, but this factor always is.
DEVIATIONS, CERTAIN_FACTOR = 4.0, 4.0


@dataclass(frozen=True)
class SlowLinks(Generic[End]):
    links: Mapping[tuple[End, End], float]
    sends: frozenset[End]  #: ends that send slowly to all partners
    receives: frozenset[End]  #: ends that receive slowly from all partners
    pairs: frozenset[tuple[End, End]]  #: links that are slower than both ends are with other partners

    @property
    def usual(self) -> float:
        """Median speed of the pairs that are not slow."""
        healthy = [
            speed
            for (source, to), speed in self.links.items()
            if source not in self.sends and to not in self.receives and (source, to) not in self.pairs
        ]
        return median(healthy or self.links.values())

    def of_ends(self, ends: Iterable[End]) -> float:
        """Return the median speed of the links of these ends in their slow directions."""
        sends, receives = self.sends & {*ends}, self.receives & {*ends}
        return median(speed for (source, to), speed in self.links.items() if source in sends or to in receives)


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


def tournament(num_players: int, num_rounds: int | None = None) -> list[list[int | None]]:
    """Return the rounds of a round-robin tournament: the partner of each player, None for a player without one.

    The circle method: in round r of m, players i and r - i (modulo m) meet; the player that would meet itself meets
    the last one.

    Args:
        num_rounds: rounds to return, spread evenly over the tournament; None for all, in which each meets each once.
    """
    circle = num_players if num_players % 2 else num_players - 1
    count = circle if num_rounds is None else min(num_rounds, circle)
    rounds = []
    for turn in (step * circle // count for step in range(count)):
        partners: list[int | None] = [(turn - player) % circle for player in range(circle)]
        alone = next(player for player in range(circle) if partners[player] == player)
        partners[alone] = None
        if circle < num_players:
            partners[alone] = circle
            partners.append(alone)
        rounds.append(partners)
    return rounds
