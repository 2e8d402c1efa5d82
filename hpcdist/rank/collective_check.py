"""Check the sums and the speed of an all-reduce between the ranks before the training starts.

The check draws no random numbers and keeps no state, so it does not change the training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.errors import PreflightError
from hpcdist.files.atomic import write_json
from hpcdist.network.bandwidth import bandwidths
from hpcdist.network.units import amount
from hpcdist.rank.network.collective_timing import WARM_UP, Stopwatch, Timing, measure
from hpcdist.rank.network.process_group import Groups, deadline
from hpcdist.rank.telemetry import nccl_log
from hpcdist.rank.topology import Topology
from hpcdist.run.attempt import Attempt

log = logging.getLogger(__name__)
_SMALLEST_BYTES = 2**16
#: Duration of the measurement of one size.
_MEASURE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The amount of data to send."""

    elements: int  #: number of elements of each checked sum, but at least two for each rank
    rounds: int  #: maximum number of repetitions of each sum
    largest_bytes: int  #: largest message of the timing
    budget_s: float  #: time budget of the checks and of the timing each, in seconds


EFFORTS = {
    "quick": Effort(elements=2**13, rounds=1, largest_bytes=2**23, budget_s=0.3),
    "full": Effort(elements=2**20, rounds=20, largest_bytes=2**28, budget_s=10.0),
}


def check(
    mode: Literal["quick", "full"],
    topology: Topology,
    device: torch.device,
    backend: str,
    groups: Groups,
    attempt: Attempt,
    *,
    timeout_s: float,
    on_expiry: Callable[[PreflightError], None],
) -> None:
    """Check and time all-reduces between the ranks; rank 0 writes `Attempt.network`. Call it on every rank.

    Args:
        mode: amount of data, a key of `EFFORTS`.
        topology: the topology of this rank.
        device: device of this rank.
        backend: backend of the default group.
        groups: the process groups.
        attempt: folder of the attempt.
        timeout_s: time limit in seconds.
        on_expiry: called in another thread if the check exceeds the limit; it must report and exit.

    Raises PreflightError on all ranks if a sum is wrong.
    """
    assert groups.control is not None
    began = time.monotonic()
    effort = EFFORTS[mode]
    # Gloo is checked on the CPU, because in a run with roles some ranks may have no GPU.
    device = device if backend == "nccl" else torch.device("cpu")
    with deadline(timeout_s, lambda: on_expiry(_timeout_error(backend, timeout_s))):
        # The control group carries small messages only, so a quick check is sufficient.
        check_sums(groups.control, "gloo", torch.device("cpu"), topology, groups, EFFORTS["quick"])
        check_sums(None, backend, device, topology, groups, effort)
        latency_s, timings = measure_all_reduce(Stopwatch(device, backend), device, groups, effort)
        warnings = nccl_log.judge(nccl_log.gather(attempt, topology, groups.control), node_names(topology))
    if topology.rank == 0:
        best = timings[-1]
        text = (
            f"all-reduce over {backend} of {topology.world_size} ranks on {topology.num_nodes} nodes is correct:"
            f" {1e3 * latency_s:.2f} ms, {best['busbw_gb_per_s']:.3g} GB/s bus bandwidth at {amount(best['bytes'])}"
            f" ({time.monotonic() - began:.1f} s)"
        )
        found: dict[str, Any] = {
            "text": text,
            "warnings": warnings,
            "backend": backend,
            "device": device.type,
            "ranks": topology.world_size,
            "nodes": topology.num_nodes,
            "latency_s": latency_s,
            "all_reduce": timings,
        }
        _report(found, attempt)


def _timeout_error(backend: str, timeout_s: float) -> PreflightError:
    return PreflightError(
        f"the ranks are connected, but an all-reduce over {backend} did not finish within {timeout_s:g} s:"
        " does a firewall block ports between the nodes, or do they have several networks?"
        f" {'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME selects the interface"
    )


def _report(found: dict[str, Any], attempt: Attempt) -> None:
    """Write the result to the log and to the attempt's folder."""
    log.info("%s", found["text"])
    for line in found["warnings"]:
        log.warning("%s", line)
    try:
        write_json(attempt.network, found)
    except OSError as error:
        log.warning("%s cannot be written: %s", attempt.network, error.strerror)


# --- correctness


def largest_exact(dtype: torch.dtype) -> int:
    """Return the largest whole number up to which a dtype represents all whole numbers exactly."""
    return round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def contribution(rank: int, num_ranks: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Return the contribution of a rank to a sum: small whole numbers of shape (2, elements), equal in all runs.

    In the first row each element has a non-zero contribution of one rank only, so that a wrong element identifies the
    rank. In the second row all ranks contribute, if the dtype represents the sums exactly.
    """
    index = torch.arange(elements)
    own = torch.where(index % num_ranks == rank, 1 + index // num_ranks % 100, 0)
    joint = (rank + index) % 8 if 7 * num_ranks <= largest_exact(dtype) else torch.zeros_like(index)
    return torch.stack([own, joint]).to(dtype)


def expected(num_ranks: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Return the sum of all contributions; shape (2, elements)."""
    index = torch.arange(elements)
    joint = torch.zeros_like(index)
    if 7 * num_ranks <= largest_exact(dtype):
        # The contributions of 8 consecutive ranks are 0 to 7 in some order.
        joint += num_ranks // 8 * 28
        for rank in range(num_ranks % 8):
            joint += (rank + index) % 8
    return torch.stack([1 + index // num_ranks % 100, joint]).to(dtype)


def dtypes_of(backend: str) -> list[torch.dtype]:
    """Return the dtypes of gradients, metrics and agreements."""
    return [torch.float32, torch.float64, torch.int64, torch.float16, torch.bfloat16][: 5 if backend == "nccl" else 4]


def check_sums(
    group: dist.ProcessGroup | None,
    backend: str,
    device: torch.device,
    topology: Topology,
    groups: Groups,
    effort: Effort,
) -> None:
    """Compare a group's sums with the expected ones. Raises PreflightError on all ranks, which names the faulty rank.

    Args:
        group: the group to check; None for the default group.
        backend: backend of the group.
        device: device of the tensors.
        topology: the topology of this rank.
        groups: exchange the results of the ranks.
        effort: the amount of data.
    """
    rank, num_ranks = topology.rank, topology.world_size
    elements = max(effort.elements, 2 * num_ranks)
    dtypes = dtypes_of(backend)
    # For each dtype and rank: the number of ranks at which its contribution is wrong, and whether its own sum is wrong.
    found = torch.zeros((len(dtypes), 2, num_ranks), dtype=torch.int64)
    for number, dtype in enumerate(dtypes):
        want = expected(num_ranks, elements, dtype).to(device)
        mine = contribution(rank, num_ranks, elements, dtype).to(device)
        began = time.perf_counter()
        for left in reversed(range(effort.rounds)):
            sums = mine.clone()
            dist.all_reduce(sums, group=group)
            wrong = (sums != want).cpu()
            found[number, 0, wrong[0].nonzero().flatten() % num_ranks] = 1
            found[number, 1, rank] |= int(wrong.any())
            if left and groups.max([time.perf_counter() - began])[0] > effort.budget_s / len(dtypes):
                break
    dist.all_reduce(found, group=groups.control)
    for dtype, (culprits, finders) in zip(dtypes, found, strict=True):
        if finders.any():
            names = groups.all_gather(f"rank {rank} on {node_names(topology)[topology.node_rank]}")
            kind = str(dtype).removeprefix("torch.")
            raise PreflightError(blame(backend, kind, culprits.tolist(), finders.tolist(), names))


def node_names(topology: Topology) -> Sequence[str]:
    """Return the names of the nodes in node order; torchrun provides no names."""
    return topology.hosts or [f"node {number}" for number in range(topology.num_nodes)]


def blame(backend: str, dtype: str, culprits: Sequence[int], finders: Sequence[int], names: Sequence[str]) -> str:
    """Return one sentence that describes wrong sums.

    Args:
        backend: backend of the group.
        dtype: name of the dtype.
        culprits: for each rank, the number of ranks at which its contribution is wrong.
        finders: for each rank, whether (1) its sum is wrong.
        names: for each rank, its name in the message.
    """
    start = f"an all-reduce of {dtype} over {backend} gives wrong sums"
    fix = "have the node's memory, GPUs and network card tested, and leave it out by cluster.exclude until then"
    blamed = [rank for rank, count in enumerate(culprits) if count]
    if len(blamed) == 1:
        (rank,) = blamed
        return f"{start}: what {names[rank]} adds arrives wrong at {culprits[rank]} of {len(names)} ranks; {fix}"
    if sum(finders) == 1:
        return f"{start} at {names[finders.index(1)]} alone; {fix}"
    return f"{start} at {sum(finders)} of {len(names)} ranks, by no single rank's fault; try another launch.backend"


# --- speed


def measure_all_reduce(
    watch: Stopwatch, device: torch.device, groups: Groups, effort: Effort
) -> tuple[float, list[dict[str, Any]]]:
    """Return the seconds of a tiny all-reduce, and the timings of growing ones within the budget, in the default group.

    The timings have `bytes`, `time_s`, and the bandwidths `algbw_gb_per_s` and `busbw_gb_per_s` (see `bandwidths`).
    They are equal on all ranks, so that all make the same decisions.
    """

    def measured(num_bytes: int) -> Timing:
        values = torch.zeros(num_bytes // 4, device=device)
        return measure(
            lambda: dist.all_reduce(values), watch, groups, budget_s=_MEASURE_S, longest_s=effort.budget_s / 8
        )

    latency_s = measured(4).median_s
    timings: list[dict[str, Any]] = []
    spent_s, num_bytes = 0.0, _SMALLEST_BYTES
    while True:
        timing = measured(num_bytes)
        algbw, busbw = bandwidths("all_reduce", num_bytes, timing.median_s, dist.get_world_size())
        timings.append(
            {
                "bytes": num_bytes,
                "time_s": timing.median_s,
                "algbw_gb_per_s": algbw / 1e9,
                "busbw_gb_per_s": busbw / 1e9,
            }
        )
        # `measure` omits the warm-up of operations for which it would take longer than _MEASURE_S.
        spent_s += (1 + timing.iterations) * timing.median_s + min(WARM_UP * timing.median_s, _MEASURE_S)
        num_bytes *= 4
        if num_bytes > effort.largest_bytes or spent_s + 2 * 4 * timing.median_s > effort.budget_s:
            return latency_s, timings
