"""Results of a communication benchmark as a healthy cluster gives them, for tests to break."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hpcdist.bench.results import CheckResult, Overlap, Pair, RankPlace, Results, Row, Rpc

LATENCY_S, BANDWIDTH = 50e-6, 1.2e9
#: Within a node everything is so many times faster.
NEARBY = 4
Factor = Callable[[str, str], float]


def sample(num_nodes: int = 4, per_node: int = 1, *, noise: float = 0.05, seed: int = 0, **changed: Any) -> Results:
    """Nodes n1, n2, … with ranks in their order; `noise` is the standard deviation of all logarithms."""
    chance = random.Random(seed)
    ranks = [RankPlace(rank=i, node=f"n{i // per_node + 1}", device="cpu") for i in range(num_nodes * per_node)]

    def about(value: float) -> float:
        return value * math.exp(chance.gauss(0, noise))

    pairs = []
    for source in ranks:
        for target in ranks:
            near = NEARBY if source.node == target.node else 1
            if source != target:
                pairs.append(
                    Pair(
                        source=source.rank,
                        target=target.rank,
                        bytes=2**22,
                        latency_s=about(LATENCY_S / near),
                        bandwidth=about(BANDWIDTH * near),
                    )
                )
    found = Results(
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
        rows=[
            row(operation, variant, mode, about(time_s), size)
            for operation, variant, start_s, speed in (
                ("ring_all_reduce", "", 4e-4, 3e8),
                ("all_reduce", "sum", 2e-4, 6e8),
                ("broadcast", "", 1e-4, 9e8),
            )
            for mode in ("blocking", "async")
            for size in (2**power for power in range(29))
            for time_s in (start_s + size / speed,)
        ],
        pairs=pairs,
        overlap=[
            Overlap(
                operation="all_reduce[sum]",
                bytes=2**20,
                compute_s=0.002,
                communication_s=0.002,
                together_s=0.0025,
                hidden=0.75,
            )
        ],
        rpc=[
            Rpc(
                source="n1/0",
                target=f"{place.node}/{place.rank}",
                bytes=size,
                device="cpu",
                latency_s=5e-4 * (3 if place.node == "n3" else 1),
                p99_s=1e-3,
                calls_per_s=4000.0,
                in_flight=8,
                bandwidth=size * 8000.0,
            )
            for place in ranks[1:]
            for size in (8, 2**20)
        ],
    )
    found.rows.append(replace(row("barrier", "", "blocking", 2e-4, 0), dtype="", algbw=None, busbw=None))
    return replace(found, **changed)


def row(operation: str, variant: str, mode: Any, median_s: float, size: int, **changed: Any) -> Row:
    """One point whose p99 is twice its median."""
    found = Row(
        operation=operation,
        variant=variant,
        mode=mode,
        depth=1 if mode == "blocking" else 8,
        group="world",
        group_size=4,
        dtype="float32",
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
    """The same with pairs slowed by a factor of the nodes that they go from and to."""
    node: Mapping[int, str] = {place.rank: place.node for place in results.ranks}

    def factor(found: Factor | None, pair: Pair) -> float:
        return found(node[pair.source], node[pair.target]) if found is not None else 1.0

    pairs = [
        replace(pair, bandwidth=pair.bandwidth / factor(slower, pair), latency_s=pair.latency_s * factor(later, pair))
        for pair in results.pairs
    ]
    return replace(results, pairs=pairs)
