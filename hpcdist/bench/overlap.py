"""Overlap of an operation with a computation of the same duration.

    hidden = (compute + communication - together) / min(compute, communication)

1 if the shorter one is hidden completely behind the longer one, 0 if they run one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hpcdist.bench.operation import Operation, wait_for
from hpcdist.bench.results import Overlap
from hpcdist.rank.network.collective_timing import Timing, synchronize
from hpcdist.rank.network.process_group import Groups

#: Operations that training can overlap, at sizes of gradient buckets.
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "isend_irecv")
SIZES = (1 << 20, 1 << 24)
_MOST_ITERATIONS = 5
#: Side of square matrices; their product takes about 0.2 ms on a CPU core and on a GPU.
_SIDE = {"cpu": 192, "cuda": 2048}


def measure_overlap(operation: Operation, groups: Groups, *, longest_s: float) -> Overlap:
    """Time the operation, a computation of the same duration, and both together. Call it on every rank.

    Args:
        operation: the operation.
        groups: exchange the times of all ranks.
        longest_s: limit for the duration of all iterations, in seconds.
    """
    device = operation.team.device
    matrix = torch.ones(_SIDE[device.type], _SIDE[device.type], device=device)
    product = torch.empty_like(matrix)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=product)

    def together(times: int) -> None:
        works = operation.call(async_op=True)
        compute(times)
        wait_for(works)

    def seconds(call: Callable[[], None]) -> float:
        synchronize(device)
        groups.barrier()
        began = time.perf_counter()
        call()
        synchronize(device)
        return time.perf_counter() - began

    compute(10)
    (first_s,) = groups.max([seconds(operation.run)])
    iterations = min(max(1, int(longest_s / first_s)), _MOST_ITERATIONS)
    communication_s, ten_s = groups.max(
        [min(seconds(call) for _ in range(iterations)) for call in (operation.run, lambda: compute(10))]
    )
    times = max(1, round(10 * communication_s / ten_s))
    found: list[list[float]] = [[], [], []]
    for _ in range(iterations):  # alternating, so that a disturbance affects all three
        for kind, call in enumerate((lambda: compute(times), operation.run, lambda: together(times))):
            found[kind].append(seconds(call))
    compute_s, communication_s, together_s = (Timing.of(groups.max(one)).median_s for one in found)
    hidden = (compute_s + communication_s - together_s) / min(compute_s, communication_s)
    return Overlap(
        operation=operation.name,
        bytes=operation.count * operation.dtype.itemsize,
        compute_s=compute_s,
        communication_s=communication_s,
        together_s=together_s,
        hidden=min(max(hidden, 0.0), 1.0),
    )
