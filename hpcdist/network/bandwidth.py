"""Algorithm and bus bandwidth, as nccl-tests defines them.

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations


def bandwidths(operation: str, num_bytes: int, time_s: float, num_ranks: int) -> tuple[float, float]:
    """Return the algorithm and the bus bandwidth of an operation, in bytes/s.

        algbw = size / time
        busbw = algbw * factor

    with n ranks and the factor

        2 (n - 1) / n    all_reduce, ring_all_reduce
        (n - 1) / n      all_gather, all_to_all, gather, reduce_scatter, scatter
        1                broadcast, reduce, send_recv, isend_irecv

    The size is that of all data, the parts of all ranks together. The bus bandwidth is the rate of the busiest link,
    which can be compared between operations and world sizes.
    """
    algbw = num_bytes / time_s
    share = (num_ranks - 1) / num_ranks
    if operation in ("all_reduce", "ring_all_reduce"):
        return algbw, algbw * 2 * share
    if operation in ("all_gather", "all_to_all", "gather", "reduce_scatter", "scatter"):
        return algbw, algbw * share
    return algbw, algbw
