"""Whether the ranks' all-reduce gives right sums, and how fast, before anything is trained by it.

No random number is drawn and nothing is kept, so a run is the same with and without.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.errors import PreflightError
from hpcdist.files.atomic import write_json
from hpcdist.network import all_reduce_bus_factor
from hpcdist.rank.network.process_group import Groups, deadline
from hpcdist.rank.telemetry import nccl_log
from hpcdist.rank.topology import Topology
from hpcdist.run.attempt import Attempt

log = logging.getLogger(__name__)
#: Whole numbers up to here are exact, and so are sums that stay below.
_EXACT = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24}
_LATENCY_ROUNDS = 20
_SMALLEST_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is sent."""

    elements: int  #: of each sum that is checked, or two for each rank if that is more
    rounds: int  #: how often each is, where the budget allows more than one
    largest_bytes: int  #: of what is timed
    budget_s: float  #: for each, checks and timing; a link that is too slow for the largest message gets none


EFFORTS = {
    "quick": Effort(elements=2**13, rounds=1, largest_bytes=2**23, budget_s=0.3),
    "full": Effort(elements=2**20, rounds=20, largest_bytes=2**28, budget_s=10.0),
}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One size. Bandwidths as nccl-tests define them for an all-reduce: bytes / time, and that × 2 (n - 1) / n.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """

    bytes: int
    time_s: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float

    @classmethod
    def of(cls, num_bytes: int, time_s: float, num_ranks: int) -> Timing:
        algbw = num_bytes / time_s / 1e9
        return cls(
            bytes=num_bytes,
            time_s=time_s,
            algbw_gb_per_s=algbw,
            busbw_gb_per_s=algbw * all_reduce_bus_factor(num_ranks),
        )


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
    """Check and time the ranks' all-reduces; rank 0 writes what came of it (`Attempt.network`). Call it on every rank.

    Args:
        timeout_s: how long all of it may take.
        on_expiry: called in another thread when it takes longer; expected to report and end the process.

    Raises PreflightError, on all ranks alike, where a sum is wrong.
    """
    assert groups.control is not None
    began = time.monotonic()
    effort = EFFORTS[mode]
    # Gloo's sums are the host's; and where roles share it, some ranks have no GPU.
    device = device if backend == "nccl" else torch.device("cpu")

    def expired() -> None:
        on_expiry(
            PreflightError(
                f"the ranks have met, but an all-reduce over {backend} does not come to its end within {timeout_s:g} s:"
                " does a firewall close ports between the nodes, or do they have several networks?"
                f" {'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME names the interface to use"
            )
        )

    with deadline(timeout_s, expired):
        # Small words go through this group, whatever the effort.
        check_sums(groups.control, "gloo", torch.device("cpu"), topology, groups.control, EFFORTS["quick"])
        check_sums(None, backend, device, topology, groups.control, effort)
        latency_s, timings = measure(device, groups.control, effort)
        warnings = nccl_log.judge(nccl_log.gather(attempt, topology, groups.control), node_names(topology))
    if topology.rank == 0:
        best = timings[-1]
        text = (
            f"all-reduce over {backend} of {topology.world_size} ranks on {topology.num_nodes} nodes is right:"
            f" {1e3 * latency_s:.2f} ms, {best.busbw_gb_per_s:.3g} GB/s bus bandwidth at {_size(best.bytes)}"
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
            "all_reduce": [asdict(timing) for timing in timings],
        }
        _tell(found, attempt)


def _tell(found: dict[str, Any], attempt: Attempt) -> None:
    """Into the log, and into the attempt's folder for whoever looks later."""
    log.info("%s", found["text"])
    for line in found["warnings"]:
        log.warning("%s", line)
    try:
        write_json(attempt.network, found)
    except OSError as error:
        log.warning("%s cannot be written: %s", attempt.network, error.strerror)


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 2**20 else f"{num_bytes >> 10} KiB"


# --- are sums right


def contribution(rank: int, num_ranks: int, elements: int, dtype: torch.dtype) -> Tensor:
    """What a rank adds to a sum: shape (2, elements), small whole numbers, and equal in all runs.

    In the first row each element is one rank's alone, in turn, so that a wrong one tells whose it is. In the second
    all ranks add up, where the dtype holds such sums exactly.
    """
    index = torch.arange(elements)
    own = torch.where(index % num_ranks == rank, 1 + index // num_ranks % 100, 0)
    joint = (rank + index) % 8 if 7 * num_ranks <= _EXACT.get(dtype, 2**31) else torch.zeros_like(index)
    return torch.stack([own, joint]).to(dtype)


def expected(num_ranks: int, elements: int, dtype: torch.dtype) -> Tensor:
    """The sum of all contributions; shape (2, elements)."""
    index = torch.arange(elements)
    joint = torch.zeros_like(index)
    if 7 * num_ranks <= _EXACT.get(dtype, 2**31):
        # Over 8 neighbouring ranks the values are those from 0 to 7, in some order.
        joint += num_ranks // 8 * 28
        for rank in range(num_ranks % 8):
            joint += (rank + index) % 8
    return torch.stack([1 + index // num_ranks % 100, joint]).to(dtype)


def dtypes_of(backend: str) -> list[torch.dtype]:
    """What gradients, metrics and agreements are summed up in."""
    return [torch.float32, torch.float64, torch.int64, torch.float16, torch.bfloat16][: 5 if backend == "nccl" else 4]


def check_sums(
    group: dist.ProcessGroup | None,
    backend: str,
    device: torch.device,
    topology: Topology,
    control: dist.ProcessGroup,
    effort: Effort,
) -> None:
    """Compare a group's sums with what they must be. Raises PreflightError, on all ranks, with the rank to blame.

    Args:
        group: whose all-reduce is checked; None for the default group.
        control: through which ranks tell each other what they have found.
    """
    rank, num_ranks = topology.rank, topology.world_size
    elements = max(effort.elements, 2 * num_ranks)
    dtypes = dtypes_of(backend)
    # For each dtype: at how many ranks did a rank's contribution arrive wrong; and which rank has found anything wrong?
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
            if left and _slowest(time.perf_counter() - began, control) > effort.budget_s / len(dtypes):
                break
    dist.all_reduce(found, group=control)
    for dtype, (culprits, finders) in zip(dtypes, found, strict=True):
        if finders.any():
            where = torch.zeros(num_ranks, dtype=torch.int64)
            where[rank] = topology.node_rank
            dist.all_reduce(where, group=control)
            names = [f"rank {at} on {node_names(topology)[node]}" for at, node in enumerate(where.tolist())]
            kind = str(dtype).removeprefix("torch.")
            raise PreflightError(blame(backend, kind, culprits.tolist(), finders.tolist(), names))


def node_names(topology: Topology) -> Sequence[str]:
    """Names of the run's nodes in their order; torchrun tells none."""
    return topology.hosts or [f"node {number}" for number in range(topology.num_nodes)]


def blame(backend: str, dtype: str, culprits: Sequence[int], finders: Sequence[int], names: Sequence[str]) -> str:
    """One sentence on sums that are wrong.

    Args:
        culprits: by rank, at how many ranks its contribution has arrived wrong.
        finders: by rank, whether (1) its sum is wrong.
        names: by rank, for people.
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


# --- how fast


def measure(device: torch.device, control: dist.ProcessGroup, effort: Effort) -> tuple[float, list[Timing]]:
    """Time of a tiny all-reduce, and timings of larger and larger ones as far as the budget goes; in the default group.

    All ranks take the slowest one's times, so that all take the same decisions.
    """
    num_ranks = dist.get_world_size()
    tiny = torch.ones(1, device=device)
    dist.all_reduce(tiny)
    latency_s = _timed(tiny, _LATENCY_ROUNDS, control)
    timings: list[Timing] = []
    spent_s, num_bytes = 0.0, _SMALLEST_BYTES
    while True:
        values = torch.zeros(num_bytes // 4, device=device)
        first_s = _timed(values, 1, control)  # also what is set up for a size
        rounds = max(1, min(10, int(effort.budget_s / 8 / first_s)))
        time_s = _timed(values, rounds, control) if rounds > 1 else first_s
        timings.append(Timing.of(num_bytes, time_s, num_ranks))
        spent_s += first_s + (rounds * time_s if rounds > 1 else 0.0)
        num_bytes *= 4
        if num_bytes > effort.largest_bytes or spent_s + 2 * 4 * time_s > effort.budget_s:
            return latency_s, timings


def _timed(values: Tensor, rounds: int, control: dist.ProcessGroup) -> float:
    """Mean seconds of an all-reduce, by the slowest rank."""
    dist.barrier(group=control)
    _wait(values.device)
    began = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(values)
    _wait(values.device)
    return _slowest((time.perf_counter() - began) / rounds, control)


def _slowest(seconds: float, control: dist.ProcessGroup) -> float:
    """The largest of all ranks' values."""
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=control)
    return float(found.item())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
