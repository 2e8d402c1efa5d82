"""Check the sums and the speed of an all-reduce between the ranks before the training starts.

The check draws no random numbers and keeps no state, so it does not change the training.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.config.topology import Topology
from hpcdist.errors import PreflightError
from hpcdist.host.json_files import write_json
from hpcdist.host.network import amount, bandwidths
from hpcdist.rank.process_group import Groups, deadline
from hpcdist.run.folder import Attempt

# Measure the time of communication between the ranks.
#
# The time of an iteration is that of the slowest rank, because all ranks wait for it in training (nccl-tests shows the
# mean over ranks). Operations that end only after all ranks have begun synchronise the ranks themselves: their
# iterations follow each other without a barrier, because its skew would add to the time. Before one-way operations
# (broadcast, reduce, scatter, gather), in which a rank could run ahead, there is a barrier that is not timed.

MIN_ITERATIONS = 3
MAX_ITERATIONS = 1000
WARM_UP = 5  #: iterations, of fast operations
#: Lower bound of an iteration's time when the number of iterations is estimated: the clock may show 0 s.
_MIN_ITERATION_S = 1e-7


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Statistics of the duration of one operation, in seconds."""

    iterations: int
    median_s: float
    p99_s: float
    min_s: float

    @classmethod
    def of(cls, seconds: Sequence[float], divided_by: int = 1) -> Self:
        """Return the statistics of calls that took `seconds`, with `divided_by` operations each."""
        ordered = sorted(duration / divided_by for duration in seconds)
        return cls(
            iterations=len(ordered),
            median_s=_quantile(ordered, 0.5),
            p99_s=_quantile(ordered, 0.99),
            min_s=ordered[0],
        )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest measured value that at least this share of the values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def synchronize(device: torch.device) -> None:
    """Wait for the work that is queued on a GPU; the CPU has none."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Stopwatch:
    """Times calls by events if a backend queues work on a stream, otherwise by the clock."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self._device = device
        #: Whether calls return before their work is done.
        self._queued = device.type != "cpu" and backend != "gloo"

    def time(self, run: Callable[[], object], iterations: int, before: Callable[[], None] | None = None) -> list[float]:
        """Return the seconds of each iteration; `before` is called before each iteration and not timed."""
        seconds = []
        events = []
        synchronize(self._device)
        for number in range(iterations):
            if before is not None:
                if self._queued and number:
                    synchronize(self._device)
                before()
            if self._queued:
                began = torch.Event(self._device, enable_timing=True)
                ended = torch.Event(self._device, enable_timing=True)
                began.record()
                run()
                ended.record()
                events.append((began, ended))
            else:
                start = time.perf_counter()
                run()
                synchronize(self._device)
                seconds.append(time.perf_counter() - start)
        synchronize(self._device)
        if self._queued:
            seconds = [began.elapsed_time(ended) / 1e3 for began, ended in events]
        return seconds


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
        budget_s: time of the measurement, roughly.
        longest_s: time limit of the first MIN_ITERATIONS iterations, which are made even if they exceed the budget.
        after_barrier: whether there is a barrier before each iteration, which is not timed.
        divided_by: number of operations in one call.
    """
    before = None
    if after_barrier:
        before = groups.barrier

    def slowest(iterations: int) -> list[float]:
        """Return the seconds of each iteration on the slowest rank."""
        groups.barrier()
        return groups.max(watch.time(run, iterations, before))

    (first_s,) = slowest(1)  # it also opens connections and allocates memory
    if first_s * WARM_UP < budget_s:
        slowest(WARM_UP)
    seconds = slowest(1)
    # The number of iterations is re-estimated repeatedly, because a single iteration may have been disturbed.
    while len(seconds) < MAX_ITERATIONS:
        limit_s = longest_s if len(seconds) < MIN_ITERATIONS else budget_s
        if sum(seconds) >= limit_s:
            break
        left_s = budget_s - sum(seconds)
        num_affordable = int(left_s / max(Timing.of(seconds).median_s, _MIN_ITERATION_S))
        seconds += slowest(min(max(1, num_affordable), MAX_ITERATIONS - len(seconds)))
    return Timing.of(seconds, divided_by)


# Check by NCCL's log that NCCL uses InfiniBand on nodes that have it.
#
# NCCL silently falls back to TCP, at a tenth of the bandwidth, if the image lacks a library, the container lacks a
# device or the limit of locked memory is too low.

SYSFS = Path("/sys/class/infiniband")


def _nccl_log(attempt: Attempt, topology: Topology) -> Path:
    return attempt.path / f"nccl.node-{topology.node_rank:05d}.log"


def log_env(topology: Topology, attempt: Attempt, env: Mapping[str, str], sysfs: Path = SYSFS) -> dict[str, str]:
    """Return the variables that make NCCL write its log, if InfiniBand is active and they are not set already.

    RoCE devices do not count: not all sites use them.
    """
    is_set = env.get("NCCL_DEBUG") or env.get("NCCL_DEBUG_FILE")
    if topology.local_rank != 0 or topology.num_nodes <= 1 or is_set:
        return {}
    for port in sysfs.glob("*/ports/*"):
        try:
            is_active = "ACTIVE" in (port / "state").read_text()
            if is_active and (port / "link_layer").read_text().strip() == "InfiniBand":
                file = str(_nccl_log(attempt, topology))
                return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": file}
        except OSError:
            continue  # the device is being removed, as virtual functions (SR-IOV) may be
    return {}


def uses_tcp(nccl_log: str) -> bool:
    """Return whether NCCL uses TCP between nodes.

    Its channels decide, such as `Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0`. If the log has none, the
    chosen network does: `Using network Socket`.
    """
    networks = re.findall(r"via NET/([A-Za-z]+)", nccl_log)
    if not networks:
        networks = re.findall(r"Using network (\w+)", nccl_log)
    return "Socket" in networks


log = logging.getLogger(__name__)
#: Message for the latency: one element.
_TINY_BYTES = 4
#: Messages of the bandwidth, in increasing order: the first that is slow counts, else the last.
MESSAGE_BYTES = (2**20, 2**23)
#: A message that takes longer is slow, and no larger one is sent.
_SLOW_S = 0.003


def check(
    topology: Topology,
    device: torch.device,
    backend: str,
    groups: Groups,
    attempt: Attempt,
    *,
    timeout_s: float,
    on_expiry: Callable[[PreflightError], None],
) -> None:
    """Check and time all-reduces between the ranks; rank 0 writes `Attempt.network`. A wrong sum raises on all ranks.

    `on_expiry` is called in another thread if the check takes more than `timeout_s`; it must report and exit.
    """
    assert groups.control is not None
    began = time.monotonic()
    if backend == "gloo":
        device = torch.device("cpu")  # in a run with roles some ranks may have no GPU
    late = PreflightError(
        f"the ranks are connected, but an all-reduce over {backend} did not finish within {timeout_s:g} s:"
        " does a firewall block ports between the nodes, or do they have several networks?"
        f" {backend.upper()}_SOCKET_IFNAME selects the interface"
    )
    with deadline(timeout_s, lambda: on_expiry(late)):
        check_sums(groups.control, "gloo", torch.device("cpu"), topology, groups)
        check_sums(None, backend, device, topology, groups)
        measured = measure_all_reduce(Stopwatch(device, backend), device, groups)
        names = groups.gather(_node_with_tcp(attempt, topology))
    if topology.rank != 0:
        return
    warnings = []
    tcp_nodes = [name for name in names if name]
    if tcp_nodes:
        warnings.append(
            f"NCCL uses TCP sockets on {', '.join(tcp_nodes)}, although InfiniBand is active there: check that"
            " libibverbs is in the image, /dev/infiniband is in the container, `ulimit -l` is unlimited and"
            " NCCL_IB_DISABLE is unset. NCCL's log is nccl.node-*.log in the attempt's folder"
        )
    text = (
        f"all-reduce over {backend} of {topology.world_size} ranks on {topology.num_nodes} nodes is correct:"
        f" {1e3 * measured['latency_s']:.2f} ms, {measured['busbw_gb_per_s']:.3g} GB/s bus bandwidth at"
        f" {amount(measured['bytes'])} ({time.monotonic() - began:.1f} s)"
    )
    log.info("%s", text)
    for warning in warnings:
        log.warning("%s", warning)
    result = {
        "text": text,
        "warnings": warnings,
        "backend": backend,
        "device": device.type,
        "ranks": topology.world_size,
        "nodes": topology.num_nodes,
        "all_reduce": measured,
    }
    try:
        write_json(attempt.network, result)
    except OSError as error:
        log.warning("%s cannot be written: %s", attempt.network, error.strerror)


def _node_with_tcp(attempt: Attempt, topology: Topology) -> str:
    """Return the name of this node if its first rank finds TCP in the log of NCCL, otherwise an empty string."""
    if topology.local_rank != 0:
        return ""
    nccl_log = _nccl_log(attempt, topology)
    if not nccl_log.exists() or not uses_tcp(nccl_log.read_text(errors="replace")):
        return ""
    return _node_name(topology)


def largest_exact(dtype: torch.dtype) -> int:
    """Return the largest whole number up to which a dtype represents all whole numbers exactly."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


#: Largest contribution in the second row of `terms`, to which all ranks contribute.
_LARGEST_JOINT_TERM = 7
#: Types of gradients, metrics and agreements, in the order of the check; gloo has no sums of bfloat16.
_GLOO_DTYPES = (torch.float32, torch.float64, torch.int64, torch.float16)
_DTYPES = (*_GLOO_DTYPES, torch.bfloat16)


def terms(rank: int, num_ranks: int, elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the contribution of a rank to a sum, and the sum: small whole numbers, [2, elements] each.

    In the first row each element has a non-zero contribution of one rank only, so that a wrong element identifies the
    rank. In the second row all ranks contribute, if the dtype represents the sums exactly.
    """
    index = torch.arange(elements)
    single = 1 + index // num_ranks % 100
    joint = torch.zeros_like(index)
    if _LARGEST_JOINT_TERM * num_ranks <= largest_exact(dtype):
        joint = 1 + index % _LARGEST_JOINT_TERM
    term = torch.stack([torch.where(index % num_ranks == rank, single, 0), joint])
    sums = torch.stack([single, num_ranks * joint])
    return term.to(dtype), sums.to(dtype)


def check_sums(
    group: dist.ProcessGroup | None, backend: str, device: torch.device, topology: Topology, groups: Groups
) -> None:
    """Compare sums of a group, by default the default group, with the expected ones; name the faulty rank."""
    rank = topology.rank
    num_ranks = topology.world_size
    elements = max(2**13, 2 * num_ranks)  # of each sum: at least two for each rank
    dtypes = _GLOO_DTYPES if backend == "gloo" else _DTYPES
    # For each dtype and rank: the number of ranks at which its contribution is wrong, and whether its own sum is wrong.
    faults = torch.zeros((len(dtypes), 2, num_ranks), dtype=torch.int64)
    for number, dtype in enumerate(dtypes):
        term, expected = terms(rank, num_ranks, elements, dtype)
        sums = term.to(device)
        dist.all_reduce(sums, group=group)
        wrong = (sums != expected.to(device)).cpu()
        faults[number, 0, wrong[0].nonzero().flatten() % num_ranks] = 1
        faults[number, 1, rank] = int(wrong.any())
    dist.all_reduce(faults, group=groups.control)
    for dtype, (culprits, finders) in zip(dtypes, faults, strict=True):
        if finders.any():
            names = groups.all_gather(f"rank {rank} on {_node_name(topology)}")
            kind = str(dtype).removeprefix("torch.")
            raise PreflightError(blame(backend, kind, culprits.tolist(), finders.tolist(), names))


def _node_name(topology: Topology) -> str:
    """Return the host name of this node, or its number, since torchrun provides no names."""
    if topology.hosts:
        return topology.hosts[topology.node_rank]
    return f"node {topology.node_rank}"


def blame(backend: str, dtype: str, culprits: Sequence[int], finders: Sequence[int], names: Sequence[str]) -> str:
    """Describe wrong sums in a message that names the faulty rank, if there is a single one.

    Args:
        culprits: by rank: the number of ranks at which its contribution is wrong.
        finders: by rank: 1 if its own sum is wrong, else 0.
        names: by rank: its number and node.
    """
    start = f"an all-reduce of {dtype} over {backend} gives wrong sums"
    fix = "have the node's memory, GPUs and network card tested, and leave it out by cluster.exclude until then"
    blamed = [rank for rank, count in enumerate(culprits) if count]
    if len(blamed) == 1:
        (rank,) = blamed
        return f"{start}: the values of {names[rank]} arrive wrong at {culprits[rank]} of {len(names)} ranks; {fix}"
    if sum(finders) == 1:
        return f"{start} at {names[finders.index(1)]} alone; {fix}"
    where = f"{sum(finders)} of {len(names)} ranks"
    return f"{start} at {where}, by no single rank's fault; have the network between the nodes tested"


def measure_all_reduce(watch: Stopwatch, device: torch.device, groups: Groups) -> dict[str, Any]:
    """Time all-reduces in the default group.

    Returns `latency_s` of a tiny message, and `bytes`, `time_s` and `busbw_gb_per_s` of the first slow message of
    MESSAGE_BYTES, or of the last one.
    """

    def median_s(num_bytes: int) -> float:
        run = partial(dist.all_reduce, torch.zeros(num_bytes // torch.float32.itemsize, device=device))
        return measure(run, watch, groups, budget_s=0.02, longest_s=0.04).median_s

    latency_s = median_s(_TINY_BYTES)
    for num_bytes in MESSAGE_BYTES:
        time_s = median_s(num_bytes)
        if time_s > _SLOW_S:
            break
    _, busbw = bandwidths("all_reduce", num_bytes, time_s, dist.get_world_size())
    return {"latency_s": latency_s, "bytes": num_bytes, "time_s": time_s, "busbw_gb_per_s": busbw / 1e9}
