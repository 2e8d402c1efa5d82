"""Results of a communication benchmark on a healthy cluster, in which tests insert faults."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hpcdist.trainers.comm.results import CheckResult, Pair, RankPlace, Results, Row

LATENCY_S, BANDWIDTH = 50e-6, 1.2e9
#: Factor by which pairs within a node are faster.
NEARBY = 4
Factor = Callable[[str, str], float]


def sample(num_nodes: int = 4, per_node: int = 1, *, noise: float = 0.05, seed: int = 0, **changed: Any) -> Results:
    """Return results of nodes n1, n2, … with consecutive ranks.

    Args:
        noise: standard deviation of the logarithms of all measurements.
        seed: seed of the noise.
        **changed: fields of the results.
    """
    rng = random.Random(seed)
    ranks = [RankPlace(rank=i, node=f"n{i // per_node + 1}", device="cpu") for i in range(num_nodes * per_node)]
    results = Results(
        backend="gloo",
        device="cpu",
        world_size=len(ranks),
        torch="2.15.0",
        nccl=None,
        partition="main",
        nodes=[f"n{i + 1}" for i in range(num_nodes)],
        ranks=ranks,
        complete=True,
        checked=[
            CheckResult(operation="all_reduce[sum]", group="world", dtype="float32", ok=True),
            CheckResult(operation="broadcast", group="world", dtype="int32", ok=True),
        ],
        pairs=_pairs(ranks, rng, noise),
        rows=_rows(rng, noise),
    )
    return replace(results, **changed)


def _noisy(value: float, rng: random.Random, noise: float) -> float:
    return value * math.exp(rng.gauss(0, noise))


def _pairs(ranks: list[RankPlace], rng: random.Random, noise: float) -> list[Pair]:
    pairs = []
    for source in ranks:
        for target in ranks:
            factor = NEARBY if source.node == target.node else 1
            if source != target:
                pairs.append(
                    Pair(
                        source=source.rank,
                        target=target.rank,
                        bytes=2**22,
                        latency_s=_noisy(LATENCY_S / factor, rng, noise),
                        bandwidth=_noisy(BANDWIDTH * factor, rng, noise),
                    )
                )
    return pairs


def _rows(rng: random.Random, noise: float) -> list[Row]:
    """Return operations that take a start-up time plus size / speed, and a barrier."""
    rows = [
        row(operation, _noisy(start_s + size / speed, rng, noise), size)
        for operation, start_s, speed in (
            ("reduce", 4e-4, 3e8),
            ("all_reduce", 2e-4, 6e8),
            ("broadcast", 1e-4, 9e8),
        )
        for size in (2**power for power in range(29))
    ]
    return [*rows, row("barrier", 2e-4, 0, algbw=None, busbw=None)]


def row(operation: str, median_s: float, size: int, **changed: Any) -> Row:
    """Return a measurement with a p99 of twice the median."""
    found = Row(
        operation=operation,
        group="world",
        group_size=4,
        size=size,
        bytes=size,
        iterations=40,
        median_s=median_s,
        p99_s=2 * median_s,
        min_s=0.9 * median_s,
        algbw=size / median_s,
        busbw=1.5 * size / median_s,
    )
    return replace(found, **changed)


def with_links(results: Results, *, slower: Factor | None = None, later: Factor | None = None) -> Results:
    """Divide bandwidths by `slower` and multiply latencies by `later`, factors by source and target node."""
    node: Mapping[int, str] = {place.rank: place.node for place in results.ranks}

    def factor(found: Factor | None, pair: Pair) -> float:
        return found(node[pair.source], node[pair.target]) if found is not None else 1.0

    pairs = [
        replace(pair, bandwidth=pair.bandwidth / factor(slower, pair), latency_s=pair.latency_s * factor(later, pair))
        for pair in results.pairs
    ]
    return replace(results, pairs=pairs)
