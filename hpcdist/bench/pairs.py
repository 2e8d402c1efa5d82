"""Latency and bandwidth between pairs of ranks; each node takes part in one measurement at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hpcdist.bench.groups import Team
from hpcdist.bench.results import Pair
from hpcdist.network.tournament import tournament
from hpcdist.rank.network.collective_timing import Timing, synchronize

#: Maximum world size for which all pairs are measured, one after the other.
MAX_ALL_PAIRS = 16
#: In larger runs the pairs of this many ranks of the first node are measured.
NUM_SAMPLED_RANKS = 8
_ROUND_TRIPS, _PINGS_BEFORE = 20, 3
_SMALL_BYTES = 8
_PROBE_BYTES = 1 << 18
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 23
_MESSAGES = 3
#: Duration of all messages of one bandwidth measurement, in seconds.
_BUDGET_S = 0.05
Link = tuple[int, int]


def rounds(nodes: Sequence[str]) -> list[list[Link]]:
    """Return rounds of (source, target) pairs that are measured at the same time; a rank is in one pair of a round.

    With up to `MAX_ALL_PAIRS` ranks all pairs are measured individually. In larger runs the first ranks of the nodes
    are measured as a tournament, followed by individual pairs within the first node.

    Args:
        nodes: node name by rank.
    """
    if len(nodes) <= MAX_ALL_PAIRS:
        return [[link] for link in _all_links(range(len(nodes)))]
    firsts = [nodes.index(name) for name in dict.fromkeys(nodes)]
    within = [rank for rank, node in enumerate(nodes) if node == nodes[0]][:NUM_SAMPLED_RANKS]
    return tournament_links(firsts) + [[link] for link in _all_links(within)]


def _all_links(ranks: Sequence[int]) -> list[Link]:
    return [(source, target) for source in ranks for target in ranks if source != target]


def tournament_links(ranks: Sequence[int]) -> list[list[Link]]:
    """Return rounds in which each rank sends to each other rank once and takes part in one transfer at a time."""
    found = []
    for partners in tournament(len(ranks)):
        meetings = [
            (ranks[one], ranks[other]) for one, other in enumerate(partners) if other is not None and one < other
        ]
        found += [meetings, [(other, one) for one, other in meetings]]
    return [meetings for meetings in found if meetings]


def measure_round(links: Sequence[Link], world: Team) -> Pair | None:
    """Measure this rank's pair of a round, if any; return the result on the source."""
    me = dist.get_rank()
    for source, target in links:
        if me in (source, target):
            return _measure(source, target, world)
    return None


def _measure(source: int, target: int, world: Team) -> Pair | None:
    is_source = dist.get_rank() == source
    peer, device = (target if is_source else source), world.device

    def trip(leaving: torch.Tensor, returning: torch.Tensor) -> float:
        """Return the seconds of a round trip, measured at the source."""
        began = time.perf_counter()
        if is_source:
            dist.send(leaving, peer, world.group)
            dist.recv(returning, peer, world.group)
        else:
            dist.recv(leaving, peer, world.group)
            dist.send(returning, peer, world.group)
        synchronize(device)
        return time.perf_counter() - began

    small = torch.zeros(_SMALL_BYTES, dtype=torch.uint8, device=device)
    answer = torch.zeros_like(small)
    seconds = [trip(small, answer) for _ in range(_PINGS_BEFORE + _ROUND_TRIPS)][_PINGS_BEFORE:]
    latency_s = Timing.of(seconds).median_s / 2
    # The first message is slower or faster than later ones: buffers are allocated, a rate limiter allows a burst.
    probe = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
    trip(probe, answer)
    probe_s = max(trip(probe, answer) - latency_s, 1e-6)
    fits = int(_PROBE_BYTES / probe_s * _BUDGET_S / _MESSAGES)
    size = torch.tensor([_power_of_two(min(max(fits, _LEAST_BYTES), _MOST_BYTES))], device=device)
    trip(size, answer)  # the source announces the size
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    trip(data, answer)
    fastest_s = min(trip(data, answer) for _ in range(_MESSAGES))  # other load only increases the time
    if not is_source:
        return None
    transfer_s = max(fastest_s - latency_s, 1e-9)  # without the latency of the answer
    return Pair(source=source, target=target, bytes=len(data), latency_s=latency_s, bandwidth=len(data) / transfer_s)


def _power_of_two(value: int) -> int:
    """Return the largest power of two that does not exceed the value."""
    return 1 << (value.bit_length() - 1)
