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
# iterations follow each other without a barrier, whose skew would add to the time. Before one-way operations
# (broadcast, reduce, scatter, gather), in which a rank could run ahead, there is a barrier that is not timed.

MIN_ITERATIONS, MAX_ITERATIONS = 3, 1000
WARM_UP = 5  #: iterations, of fast operations


@dataclass(frozen=True, kw_only=True)
class Timing:
    iterations: int
    median_s: float
    p99_s: float
    min_s: float

    @classmethod
    def of(cls, seconds: Sequence[float], divided_by: int = 1) -> Self:
        """Return the statistics; the quantiles are measured values."""
        ordered = sorted(one / divided_by for one in seconds)
        median_s, p99_s = (ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.99))
        return cls(iterations=len(ordered), median_s=median_s, p99_s=p99_s, min_s=ordered[0])


def synchronize(device: torch.device) -> None:
    """Wait for the work that is queued on a GPU; the CPU has none."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Stopwatch:
    """Times calls by events if a backend queues work on a stream, otherwise by the clock."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self._device = device
        self._queued = device.type != "cpu" and backend != "gloo"

    def time(self, run: Callable[[], object], iterations: int, before: Callable[[], None] | None = None) -> list[float]:
        """Return the seconds of each iteration; `before` is called before each iteration and not timed."""
        seconds, events = [], []
        synchronize(self._device)
        for number in range(iterations):
            if before is not None:
                if self._queued and number:
                    synchronize(self._device)
                before()
            if self._queued:
                began, ended = (torch.Event(self._device, enable_timing=True) for _ in range(2))
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
        return seconds or [began.elapsed_time(ended) / 1e3 for began, ended in events]


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

    The measurement takes about `budget_s`, but has at least three iterations, unless they take more than `longest_s`.
    `divided_by` is the number of operations in one call.
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
    if topology.local_rank != 0 or topology.num_nodes < 2 or env.get("NCCL_DEBUG") or env.get("NCCL_DEBUG_FILE"):
        return {}
    for port in sysfs.glob("*/ports/*"):
        try:
            active = "ACTIVE" in (port / "state").read_text()
            if active and (port / "link_layer").read_text().strip() == "InfiniBand":
                file = str(_nccl_log(attempt, topology))
                return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": file}
        except OSError:
            continue  # a virtual function that is being removed
    return {}


def uses_tcp(nccl_log: str) -> bool:
    """Return whether NCCL uses TCP between nodes: in its channels, or if its log has none, as the chosen network."""
    # `Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0`, `Using network Socket`
    return "Socket" in (re.findall(r"via NET/([A-Za-z]+)", nccl_log) or re.findall(r"Using network (\w+)", nccl_log))


log = logging.getLogger(__name__)
#: Messages of the timing: the first that is slow counts, else the last.
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
    # Gloo is checked on the CPU, because in a run with roles some ranks may have no GPU.
    device = torch.device("cpu") if backend == "gloo" else device
    late = PreflightError(
        f"the ranks are connected, but an all-reduce over {backend} did not finish within {timeout_s:g} s:"
        " does a firewall block ports between the nodes, or do they have several networks?"
        f" {backend.upper()}_SOCKET_IFNAME selects the interface"
    )
    with deadline(timeout_s, lambda: on_expiry(late)):
        check_sums(groups.control, "gloo", torch.device("cpu"), topology, groups)
        check_sums(None, backend, device, topology, groups)
        measured = measure_all_reduce(Stopwatch(device, backend), device, groups)
        nccl_log = _nccl_log(attempt, topology)
        is_slow = topology.local_rank == 0 and nccl_log.exists() and uses_tcp(nccl_log.read_text(errors="replace"))
        slow = list(filter(None, groups.gather(_node_name(topology) if is_slow else "")))
    if topology.rank != 0:
        return
    text = (
        f"all-reduce over {backend} of {topology.world_size} ranks on {topology.num_nodes} nodes is correct:"
        f" {1e3 * measured['latency_s']:.2f} ms, {measured['busbw_gb_per_s']:.3g} GB/s bus bandwidth at"
        f" {amount(measured['bytes'])} ({time.monotonic() - began:.1f} s)"
    )
    log.info("%s", text)
    warnings = [
        f"NCCL uses TCP sockets on {', '.join(slow)}, although InfiniBand is active there: check that libibverbs is in"
        " the image, /dev/infiniband is in the container, `ulimit -l` is unlimited and NCCL_IB_DISABLE is unset."
        " NCCL's log is nccl.node-*.log in the attempt's folder"
    ] * bool(slow)
    for line in warnings:
        log.warning("%s", line)
    found = {
        "text": text,
        "warnings": warnings,
        "backend": backend,
        "device": device.type,
        "ranks": topology.world_size,
        "nodes": topology.num_nodes,
        "all_reduce": measured,
    }
    try:
        write_json(attempt.network, found)
    except OSError as error:
        log.warning("%s cannot be written: %s", attempt.network, error.strerror)


def largest_exact(dtype: torch.dtype) -> int:
    """Return the largest whole number up to which a dtype represents all whole numbers exactly."""
    return round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def terms(rank: int, num_ranks: int, elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the contribution of a rank to a sum, and the sum: small whole numbers, [2, elements] each.

    In the first row each element has a non-zero contribution of one rank only, so that a wrong element identifies the
    rank. In the second row all ranks contribute, if the dtype represents the sums exactly.
    """
    index = torch.arange(elements)
    single = 1 + index // num_ranks % 100
    joint = 1 + index % 7 if 7 * num_ranks <= largest_exact(dtype) else torch.zeros_like(index)
    own = torch.stack([torch.where(index % num_ranks == rank, single, 0), joint])
    return own.to(dtype), torch.stack([single, num_ranks * joint]).to(dtype)


def check_sums(
    group: dist.ProcessGroup | None, backend: str, device: torch.device, topology: Topology, groups: Groups
) -> None:
    """Compare sums of a group, by default the default group, with the expected ones; name the faulty rank."""
    rank, num_ranks = topology.rank, topology.world_size
    elements = max(2**13, 2 * num_ranks)  # of each sum: at least two for each rank
    # Those of gradients, metrics and agreements.
    dtypes = [torch.float32, torch.float64, torch.int64, torch.float16, torch.bfloat16][: 4 if backend == "gloo" else 5]
    # For each dtype and rank: the number of ranks at which its contribution is wrong, and whether its own sum is wrong.
    found = torch.zeros((len(dtypes), 2, num_ranks), dtype=torch.int64)
    for number, dtype in enumerate(dtypes):
        sums, want = (values.to(device) for values in terms(rank, num_ranks, elements, dtype))
        dist.all_reduce(sums, group=group)
        wrong = (sums != want).cpu()
        found[number, 0, wrong[0].nonzero().flatten() % num_ranks] = 1
        found[number, 1, rank] = int(wrong.any())
    dist.all_reduce(found, group=groups.control)
    for dtype, (culprits, finders) in zip(dtypes, found, strict=True):
        if finders.any():
            names = groups.all_gather(f"rank {rank} on {_node_name(topology)}")
            kind = str(dtype).removeprefix("torch.")
            raise PreflightError(blame(backend, kind, culprits.tolist(), finders.tolist(), names))


def _node_name(topology: Topology) -> str:
    """Return the name of this node; torchrun provides none."""
    return topology.hosts[topology.node_rank] if topology.hosts else f"node {topology.node_rank}"


def blame(backend: str, dtype: str, culprits: Sequence[int], finders: Sequence[int], names: Sequence[str]) -> str:
    """Describe wrong sums: by rank, at how many ranks its contribution, and whether (1) its own sum is wrong."""
    start = f"an all-reduce of {dtype} over {backend} gives wrong sums"
    fix = "have the node's memory, GPUs and network card tested, and leave it out by cluster.exclude until then"
    blamed = [rank for rank, count in enumerate(culprits) if count]
    if len(blamed) == 1:
        (rank,) = blamed
        return f"{start}: what {names[rank]} adds arrives wrong at {culprits[rank]} of {len(names)} ranks; {fix}"
    if sum(finders) == 1:
        return f"{start} at {names[finders.index(1)]} alone; {fix}"
    where = f"{sum(finders)} of {len(names)} ranks"
    return f"{start} at {where}, by no single rank's fault; have the network between the nodes tested"


def measure_all_reduce(watch: Stopwatch, device: torch.device, groups: Groups) -> dict[str, Any]:
    """Time an all-reduce in the default group: `latency_s` of a tiny message, `time_s` of the largest that is fast."""
    seconds = []
    for num_bytes in (4, *MESSAGE_BYTES):
        run = partial(dist.all_reduce, torch.zeros(num_bytes // 4, device=device))
        seconds.append(measure(run, watch, groups, budget_s=0.02, longest_s=0.04).median_s)
        if num_bytes > 4 and seconds[-1] > _SLOW_S:
            break
    _, busbw = bandwidths("all_reduce", num_bytes, seconds[-1], dist.get_world_size())
    return {"latency_s": seconds[0], "bytes": num_bytes, "time_s": seconds[-1], "busbw_gb_per_s": busbw / 1e9}
