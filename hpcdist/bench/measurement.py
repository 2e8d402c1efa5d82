"""Measure the time of an operation.

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

from hpcdist.bench.groups import ControlGroup, Team
from hpcdist.bench.operation import Operation, wait_for

MIN_ITERATIONS, MAX_ITERATIONS = 3, 1000
#: Number of warm-up iterations of fast operations.
WARM_UP = 5


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Statistics of the iteration times of the slowest rank, in seconds."""

    iterations: int
    median_s: float
    p99_s: float
    min_s: float

    @classmethod
    def of(cls, seconds: Sequence[float], divided_by: int = 1) -> Timing:
        ordered = sorted(one / divided_by for one in seconds)
        return cls(
            iterations=len(ordered),
            median_s=quantile(ordered, 0.5),
            p99_s=quantile(ordered, 0.99),
            min_s=ordered[0],
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of the sorted values that at least this share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Stopwatch:
    """Times calls by CUDA events if work is queued on a stream, otherwise by the clock."""

    def __init__(self, team: Team) -> None:
        self._device = team.device
        self._queued = team.device.type == "cuda" and team.backend == "nccl"

    def time(self, run: Callable[[], None], iterations: int, before: Callable[[], None] | None = None) -> list[float]:
        """Return the seconds of each iteration; `before` is called before each iteration and not timed."""
        if self._queued:
            return self._time_queued(run, iterations, before)
        seconds = []
        self.finish()
        for _ in range(iterations):
            if before is not None:
                before()
            began = time.perf_counter()
            run()
            self.finish()
            seconds.append(time.perf_counter() - began)
        return seconds

    def _time_queued(self, run: Callable[[], None], iterations: int, before: Callable[[], None] | None) -> list[float]:
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(iterations)
        ]
        for began, ended in events:
            if before is not None:
                self.finish()
                before()
            began.record()
            run()
            ended.record()
        self.finish()
        return [began.elapsed_time(ended) / 1e3 for began, ended in events]

    def finish(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(
    run: Callable[[], None],
    watch: Stopwatch,
    control: ControlGroup,
    *,
    budget_s: float,
    longest_s: float,
    after_barrier: bool = False,
    divided_by: int = 1,
) -> Timing:
    """Time a call. Every rank makes the same number of iterations, derived from the slowest rank.

    Args:
        run: the call.
        watch: the stopwatch.
        control: exchanges the times of all ranks.
        budget_s: approximate duration of the measurement in seconds, but at least three iterations.
        longest_s: no iteration starts after this time, even if there were fewer than three.
        after_barrier: call a barrier before each iteration.
        divided_by: number of operations in one call.
    """
    before = control.barrier if after_barrier else None

    def seconds(iterations: int) -> list[float]:
        control.barrier()
        return control.max(watch.time(run, iterations, before))

    (first_s,) = seconds(1)  # connections and memory
    if first_s * WARM_UP < budget_s:
        seconds(WARM_UP)
    found = seconds(1)
    # The number of iterations is re-estimated repeatedly, because a single iteration may have been disturbed.
    while sum(found) < (longest_s if len(found) < MIN_ITERATIONS else budget_s) and len(found) < MAX_ITERATIONS:
        left = int((budget_s - sum(found)) / max(Timing.of(found).median_s, 1e-7))
        found += seconds(min(max(1, left), MAX_ITERATIONS - len(found)))
    return Timing.of(found, divided_by)


def caller(operations: Sequence[Operation]) -> Callable[[], None]:
    """Return a function that runs one operation, or several at the same time, or none on a rank without operations."""
    if not operations:
        return lambda: None
    if len(operations) == 1:
        return operations[0].run

    def run() -> None:
        wait_for([work for operation in operations for work in operation.call(async_op=True)])

    return run
