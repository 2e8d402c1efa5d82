"""Every way between two ranks: latency and bandwidth, one pair of a node at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hpcdist.bench.groups import Team
from hpcdist.bench.measurement import quantile
from hpcdist.bench.results import Pair
from hpcdist.network import tournament

#: With so many ranks or fewer all pairs are measured, one after the other.
FEW = 16
#: Ranks of a node whose pairs are looked at where there are many ranks.
SAMPLE = 8
_ROUND_TRIPS, _PINGS_BEFORE = 20, 3
_SMALL_BYTES = 8
_PROBE_BYTES = 1 << 18
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 23
_MESSAGES = 3
#: Of all messages of one bandwidth.
_BUDGET_S = 0.05
Way = tuple[int, int]


def rounds(nodes: Sequence[str]) -> list[list[Way]]:
    """Which ways, from rank to rank, are measured at the same time; no rank is in two of a round.

    Up to `FEW` ranks: all ways, each alone. Beyond: all ways between the nodes' first ranks, as a tournament, so that
    each node is in one way at a time; then the ways within the first node, each alone.

    Args:
        nodes: each rank's.
    """
    if len(nodes) <= FEW:
        return [[way] for way in _ways(range(len(nodes)))]
    firsts = [nodes.index(name) for name in dict.fromkeys(nodes)]
    within = [rank for rank, node in enumerate(nodes) if node == nodes[0]][:SAMPLE]
    return tournament_links(firsts) + [[way] for way in _ways(within)]


def _ways(ranks: Sequence[int]) -> list[Way]:
    return [(source, target) for source in ranks for target in ranks if source != target]


def tournament_links(ranks: Sequence[int]) -> list[list[Way]]:
    """Return rounds in which each rank sends to each other rank once and takes part in one transfer at a time."""
    found = []
    for partners in tournament(len(ranks)):
        meetings = [
            (ranks[one], ranks[other]) for one, other in enumerate(partners) if other is not None and one < other
        ]
        found += [meetings, [(other, one) for one, other in meetings]]
    return [meetings for meetings in found if meetings]


def measure_round(ways: Sequence[Way], world: Team) -> Pair | None:
    """Measure this rank's way of a round, if it is in one; the result is the source's."""
    me = dist.get_rank()
    for source, target in ways:
        if me in (source, target):
            return _measure(source, target, world)
    return None


def _measure(source: int, target: int, world: Team) -> Pair | None:
    is_source = dist.get_rank() == source
    peer, device = (target if is_source else source), world.device

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def trip(leaving: torch.Tensor, returning: torch.Tensor) -> float:
        """Seconds there and back, at the source."""
        began = time.perf_counter()
        if is_source:
            dist.send(leaving, peer, world.group)
            dist.recv(returning, peer, world.group)
        else:
            dist.recv(leaving, peer, world.group)
            dist.send(returning, peer, world.group)
        finish()
        return time.perf_counter() - began

    small = torch.zeros(_SMALL_BYTES, dtype=torch.uint8, device=device)
    answer = torch.zeros_like(small)
    seconds = [trip(small, answer) for _ in range(_PINGS_BEFORE + _ROUND_TRIPS)][_PINGS_BEFORE:]
    latency_s = quantile(sorted(seconds), 0.5) / 2
    # The first message opens what is still closed: buffers, a rate limiter's burst.
    probe = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
    trip(probe, answer)
    probe_s = max(trip(probe, answer) - latency_s, 1e-6)
    fits = int(_PROBE_BYTES / probe_s * _BUDGET_S / _MESSAGES)
    size = torch.tensor([_power_of_two(min(max(fits, _LEAST_BYTES), _MOST_BYTES))], device=device)
    trip(size, answer)  # the source says how much follows
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    trip(data, answer)
    fastest_s = min(trip(data, answer) for _ in range(_MESSAGES))  # whatever else is at work only makes it slower
    if not is_source:
        return None
    transfer_s = max(fastest_s - latency_s, 1e-9)  # the answer's way back
    return Pair(source=source, target=target, bytes=len(data), latency_s=latency_s, bandwidth=len(data) / transfer_s)


def _power_of_two(value: int) -> int:
    """The largest that is not above it."""
    return 1 << (value.bit_length() - 1)
