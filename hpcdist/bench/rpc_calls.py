"""RPC from rank 0 to other ranks: round trips of a tensor."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from hpcdist.bench.comm_config import MAX_ITERATION_S, MEASURE_S, CommConfig, parse_bytes
from hpcdist.bench.patterns import message
from hpcdist.bench.results import RankPlace, Rpc
from hpcdist.errors import HpcdistError
from hpcdist.rank.context import Context
from hpcdist.rank.network.collective_timing import Timing, synchronize
from hpcdist.rank.network.rpc import RpcGroup, rpc_group

SIZES = (4, 1 << 12, 1 << 20, 1 << 24)
#: Maximum number of ranks that are called: first one of each node, then others.
MAX_TARGETS = 8
IN_FLIGHT = 8
_MOST_CALLS = 200
#: Size from which on the time of a call is proportional to the size.
_LONG = 1 << 20


def targets(nodes: Sequence[str]) -> list[int]:
    """Return the ranks that rank 0 calls, at most `MAX_TARGETS`; the first ranks of nodes are preferred."""
    others = range(1, len(nodes))
    return sorted(sorted(others, key=lambda rank: (nodes.index(nodes[rank]) != rank, rank))[:MAX_TARGETS])


def measure_calls(
    ctx: Context, places: Sequence[RankPlace], gpus: Sequence[int | None], *, cfg: CommConfig
) -> list[Rpc]:
    """Time calls from rank 0 to some ranks. Call it on every rank.

    Args:
        ctx: the context of this rank.
        places: node and device by rank.
        gpus: CUDA device index by rank; ranks with a GPU also exchange tensors on GPUs.
        cfg: the section `comm`.

    Returns:
        The results on rank 0, an empty list on the other ranks.

    Raises HpcdistError if an answer is wrong.
    """
    found: list[Rpc] = []
    with rpc_group(ctx, {"echo": lambda tensor: tensor}) as group:
        if not ctx.is_main:
            group.serve({})
            return found
        for rank in targets([place.node for place in places]):
            devices = [torch.device("cpu"), ctx.device] if None not in (gpus[0], gpus[rank]) else [torch.device("cpu")]
            for device in devices:
                byte_s = 0.0
                for size in SIZES:
                    if size > parse_bytes(cfg.max_bytes) or size * byte_s > MAX_ITERATION_S:
                        break
                    ctx.alive()
                    timing, calls_s = _measure(group, rank, size, device, MEASURE_S)
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


def _measure(group: RpcGroup, rank: int, size: int, device: torch.device, budget_s: float) -> tuple[Timing, float]:
    """Return the timing of one call at a time, and the seconds per call with several simultaneous calls."""
    sent = message(0, size, torch.uint8).to(device)

    def one() -> float:
        began = time.perf_counter()
        group.call(rank, "echo", sent).result()
        synchronize(device)
        return time.perf_counter() - began

    answer = group.call(rank, "echo", sent).result()
    if answer.device != device or not torch.equal(answer, sent):
        raise HpcdistError(f"RPC to {group.names[rank]} returned wrong data ({size} bytes on {device})")
    first_s = one()
    calls = min(max(3, int(budget_s / first_s)), _MOST_CALLS)
    timing = Timing.of([one() for _ in range(calls)])
    window = IN_FLIGHT * max(1, min(calls, int(budget_s / (IN_FLIGHT * timing.median_s))))
    began = time.perf_counter()
    waiting: deque[Future[Tensor]] = deque()
    for _ in range(window):
        if len(waiting) == IN_FLIGHT:
            waiting.popleft().result()
        waiting.append(group.call(rank, "echo", sent))
    for future in waiting:
        future.result()
    synchronize(device)
    return timing, (time.perf_counter() - began) / window
