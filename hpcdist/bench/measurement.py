"""How long an operation takes.

The time of an iteration is that of the slowest rank, since all of them wait for it in training (nccl-tests shows the
mean over ranks). An operation that no rank can end before all have begun keeps the ranks in step by itself: its
iterations follow each other without a pause, so no barrier's skew is in them. One-way operations (broadcast, reduce,
scatter, gather) would run ahead and be measured as a stream; before each there is a barrier, which is not timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hpcdist.bench.groups import Team, Words
from hpcdist.bench.operation import Operation, wait_for

LEAST_ITERATIONS, MOST_ITERATIONS = 3, 1000
#: What is cheap is tried this often before it is timed.
WARM_UP = 5


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Of one iteration, in seconds, by the slowest rank."""

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
    """The smallest of the (sorted) values that at least this share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Stopwatch:
    """Times calls as the device sees them: by CUDA's events where work is queued, else by the clock."""

    def __init__(self, team: Team) -> None:
        self._device = team.device
        self._queued = team.device.type == "cuda" and team.backend == "nccl"

    def time(self, run: Callable[[], None], iterations: int, before: Callable[[], None] | None = None) -> list[float]:
        """Seconds of each iteration; `before` is called ahead of each and not timed."""
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
    words: Words,
    *,
    budget_s: float,
    longest_s: float,
    after_barrier: bool = False,
    divided_by: int = 1,
) -> Timing:
    """Time a call; every rank makes as many, a number that follows from the slowest rank's warm-up.

    Args:
        budget_s: about how long to measure, for three iterations at least.
        longest_s: where three take longer than this, so many as begin before it is over.
        after_barrier: begin each iteration together.
        divided_by: operations in one call.
    """
    before = words.barrier if after_barrier else None

    def seconds(iterations: int) -> list[float]:
        words.barrier()
        return words.largest(watch.time(run, iterations, before))

    (first_s,) = seconds(1)  # connections and memory
    if first_s * WARM_UP < budget_s:
        seconds(WARM_UP)
    found = seconds(1)
    # By what was measured so far, again and again: one iteration that was disturbed must not stand for all.
    while sum(found) < (longest_s if len(found) < LEAST_ITERATIONS else budget_s) and len(found) < MOST_ITERATIONS:
        left = int((budget_s - sum(found)) / max(Timing.of(found).median_s, 1e-7))
        found += seconds(min(max(1, left), MOST_ITERATIONS - len(found)))
    return Timing.of(found, divided_by)


def caller(operations: Sequence[Operation]) -> Callable[[], None]:
    """What does one operation; or begins several and waits for them; or nothing, where a rank has no part in any."""
    if not operations:
        return lambda: None
    if len(operations) == 1:
        return operations[0].run

    def run() -> None:
        wait_for([work for operation in operations for work in operation.call(async_op=True)])

    return run
