"""RPC from rank 0 to others: a tensor there and back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import rpc

from hpcdist.bench.comm_config import CommConfig, parse_bytes
from hpcdist.bench.measurement import Timing
from hpcdist.bench.patterns import message
from hpcdist.bench.results import Place, Rpc
from hpcdist.errors import HpcdistError
from hpcdist.rank.context import Context
from hpcdist.rank.network.rpc import remote, rpc_group

SIZES = (4, 1 << 12, 1 << 20, 1 << 24)
#: Ranks that are called: one of each node first, then others.
MOST_TARGETS = 8
IN_FLIGHT = 8
_MOST_CALLS = 200
#: Calls that take a time in proportion to their size.
_LONG = 1 << 20


@remote
def echo(tensor: Tensor) -> Tensor:
    """Back to the caller as it is."""
    return tensor


def targets(nodes: Sequence[str]) -> list[int]:
    """The ranks that rank 0 calls, at most `MOST_TARGETS`: those that are the first of their node come first."""
    others = range(1, len(nodes))
    return sorted(sorted(others, key=lambda rank: (nodes.index(nodes[rank]) != rank, rank))[:MOST_TARGETS])


def measure_calls(ctx: Context, places: Sequence[Place], gpus: Sequence[int | None], *, cfg: CommConfig) -> list[Rpc]:
    """Time calls to some ranks; call it on every rank, the result is rank 0's. Raises HpcdistError for a wrong answer.

    Args:
        gpus: each rank's, by its number on its node; with them tensors on GPUs are sent too.
    """
    here = gpus[ctx.rank]
    maps = {
        ctx.roles.name_of(rank): {torch.device("cuda", here): torch.device("cuda", gpu)}
        for rank, gpu in enumerate(gpus)
        if rank != ctx.rank and here is not None and gpu is not None
    }
    found: list[Rpc] = []
    with rpc_group(ctx, device_maps=maps or None) as group:
        if not ctx.is_main:
            group.serve({})
            return found
        for rank in targets([place.node for place in places]):
            devices = [torch.device("cpu"), ctx.device] if ctx.roles.name_of(rank) in maps else [torch.device("cpu")]
            for device in devices:
                byte_s = 0.0
                for size in SIZES:
                    if size > parse_bytes(cfg.max_bytes) or size * byte_s > cfg.max_iteration_s:
                        break
                    ctx.alive()
                    timing, calls_s = _measure(ctx.roles.name_of(rank), size, device, cfg.measure_s)
                    byte_s = timing.median_s / size if size >= _LONG else 0.0
                    found.append(
                        Rpc(
                            source=f"{places[0].node}/0",
                            target=f"{places[rank].node}/{rank}",
                            bytes=size,
                            device=device.type,
                            latency_s=timing.median_s,
                            p99_s=timing.p99_s,
                            calls_per_s=1 / calls_s,
                            in_flight=IN_FLIGHT,
                            bandwidth=2 * size / calls_s,
                        )
                    )
    return found


def _measure(name: str, size: int, device: torch.device, budget_s: float) -> tuple[Timing, float]:
    """Of one call at a time; and seconds per call with several under way."""
    sent = message(0, size, torch.uint8).to(device)

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def one() -> float:
        began = time.perf_counter()
        rpc.rpc_sync(name, echo, (sent,))
        finish()
        return time.perf_counter() - began

    answer = rpc.rpc_sync(name, echo, (sent,))
    if answer.device != device or not torch.equal(answer, sent):
        raise HpcdistError(f"RPC to {name}: {size} bytes on {device} came back wrong")
    first_s = one()
    calls = min(max(3, int(budget_s / first_s)), _MOST_CALLS)
    timing = Timing.of([one() for _ in range(calls)])
    window = IN_FLIGHT * max(1, min(calls, int(budget_s / (IN_FLIGHT * timing.median_s))))
    began = time.perf_counter()
    waiting: deque[torch.futures.Future[Tensor]] = deque()
    for _ in range(window):
        if len(waiting) == IN_FLIGHT:
            waiting.popleft().wait()
        waiting.append(rpc.rpc_async(name, echo, (sent,)))
    for future in waiting:
        future.wait()
    finish()
    return timing, (time.perf_counter() - began) / window
