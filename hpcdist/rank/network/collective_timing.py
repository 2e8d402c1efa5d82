"""Measure the time of communication between the ranks.

The time of an iteration is that of the slowest rank, because all ranks wait for it in training (nccl-tests shows the
mean over ranks). Operations that end only after all ranks have begun synchronise the ranks themselves: their iterations
follow each other without a barrier, whose skew would add to the time. Before one-way operations (broadcast, reduce,
scatter, gather), in which a rank could run ahead, there is a barrier that is not timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hpcdist.rank.network.process_group import Groups

MIN_ITERATIONS, MAX_ITERATIONS = 3, 1000
#: Number of warm-up iterations of fast operations.
WARM_UP = 5


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Statistics of iteration times, in seconds."""

    iterations: int
    median_s: float
    p99_s: float
    min_s: float

    @classmethod
    def of(cls, seconds: Sequence[float], divided_by: int = 1) -> Timing:
        """Return the statistics; the quantiles are measured values."""
        ordered = sorted(one / divided_by for one in seconds)

        def quantile(share: float) -> float:
            return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

        return cls(iterations=len(ordered), median_s=quantile(0.5), p99_s=quantile(0.99), min_s=ordered[0])


def synchronize(device: torch.device) -> None:
    """Wait for the work that is queued on a GPU; the CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Times calls by CUDA events if work is queued on a stream, otherwise by the clock.

    Args:
        device: device of the tensors.
        backend: backend of the process group.
    """

    def __init__(self, device: torch.device, backend: str) -> None:
        self._device = device
        self._queued = device.type == "cuda" and backend == "nccl"

    def time(self, run: Callable[[], object], iterations: int, before: Callable[[], None] | None = None) -> list[float]:
        """Return the seconds of each iteration; `before` is called before each iteration and not timed."""
        if self._queued:
            return self._time_queued(run, iterations, before)
        seconds = []
        synchronize(self._device)
        for _ in range(iterations):
            if before is not None:
                before()
            began = time.perf_counter()
            run()
            synchronize(self._device)
            seconds.append(time.perf_counter() - began)
        return seconds

    def _time_queued(
        self, run: Callable[[], object], iterations: int, before: Callable[[], None] | None
    ) -> list[float]:
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(iterations)
        ]
        for began, ended in events:
            if before is not None:
                synchronize(self._device)
                before()
            began.record()
            run()
            ended.record()
        synchronize(self._device)
        return [began.elapsed_time(ended) / 1e3 for began, ended in events]


def measure(
    run: Callable[[], object],
    watch: Stopwatch,
    groups: Groups,
    *,
    budget_s: float,
    longest_s: float,
    after_barrier: bool = False,
    divided_by: int = 1,
) -> Timing:
    """Time a call on the slowest rank. Every rank makes the same number of iterations and returns the same result.

    Args:
        run: the call.
        watch: the stopwatch.
        groups: exchange the times of all ranks.
        budget_s: approximate duration of the measurement in seconds, but at least three iterations.
        longest_s: no iteration starts after this time, even if there were fewer than three.
        after_barrier: call a barrier before each iteration.
        divided_by: number of operations in one call.
    """
    before = groups.barrier if after_barrier else None

    def seconds(iterations: int) -> list[float]:
        groups.barrier()
        return groups.max(watch.time(run, iterations, before))

    (first_s,) = seconds(1)  # connections and memory
    if first_s * WARM_UP < budget_s:
        seconds(WARM_UP)
    found = seconds(1)
    # The number of iterations is re-estimated repeatedly, because a single iteration may have been disturbed.
    while sum(found) < (longest_s if len(found) < MIN_ITERATIONS else budget_s) and len(found) < MAX_ITERATIONS:
        left = int((budget_s - sum(found)) / max(Timing.of(found).median_s, 1e-7))
        found += seconds(min(max(1, left), MAX_ITERATIONS - len(found)))
    return Timing.of(found, divided_by)
