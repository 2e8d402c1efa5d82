"""The measurements of a benchmark in their order: correctness, overlap with computation, pairs of ranks, RPC round
trips.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.bench import COMM_OPERATIONS, MAX_ITERATION_S, MEASURE_S, CommConfig, parse_bytes
from hpcdist.bench.operations import (
    DTYPES,
    OPERATIONS,
    PIECE_BYTES,
    REDUCTIONS,
    WORLD,
    Barrier,
    Operation,
    Reduction,
    RingAllReduce,
    Team,
    cuts,
    message,
    wait_for,
)
from hpcdist.bench.results import CheckResult, Overlap, Pair, RankPlace, Rpc
from hpcdist.errors import HpcdistError
from hpcdist.host.network import tournament
from hpcdist.rank.collective_check import Timing, synchronize
from hpcdist.rank.context import Context
from hpcdist.rank.process_group import Groups
from hpcdist.rank.rpc import RpcGroup, rpc_group

# Correctness of an operation's result on every rank, at sizes that do not divide evenly.

#: Error messages of torch and its backends for an unsupported operation, equal on every rank.
_UNSUPPORTED = re.compile(
    r"not support|unsupported|not implemented|invalid scalar type|no backend type associated|unhandled scalar",
    re.IGNORECASE,
)
#: Numbers of elements (of each rank's part, if there are parts): one, a few, and enough for several messages.
_COUNTS = (1, 7, 20_011)
#: Makes the ring send short data in several pieces, as it sends long data.
_SHORT_PIECE_BYTES = 512
_LATE_S = 0.02
#: Number of the check, equal on all ranks.
_serial = itertools.count()


@dataclass(frozen=True, kw_only=True)
class OperationVariant:
    """An operation, and for a reduction its operator."""

    kind: type[Operation]
    reduction: Reduction | None = None

    @property
    def title(self) -> str:
        """`all_reduce[sum]`"""
        return f"{self.kind.name}[{self.reduction}]" if self.reduction else self.kind.name

    def make(
        self, team: Team, count: int, dtype: torch.dtype, *, root: int = 0, piece_bytes: int = PIECE_BYTES
    ) -> Operation:
        """Create the operation for a team, with `count` elements per piece."""
        return self.kind(team, count, dtype, root=root, reduction=self.reduction or "sum", piece_bytes=piece_bytes)


def check(variant: OperationVariant, team: Team, dtype: str, groups: Groups, *, node: str) -> CheckResult:
    """Compare the result of an operation with the exact expected result. Call it on every rank.

    Args:
        variant: the operation.
        team: the group of this rank.
        dtype: data type, a key of `DTYPES`.
        groups: exchange the results of all ranks; their store counts the ranks in a barrier.
        node: node name of this rank, for the report.
    """
    wrong, unsupported, serial = "", "", next(_serial)
    if team.size >= max(variant.kind.least_ranks, 1 if team.name == "world" else 2):
        try:
            # All cases, also after a wrong result, because the other ranks continue with the next case.
            found = [_compare(operation, groups, serial) for operation in _cases(variant, team, DTYPES[dtype])]
            wrong = next(filter(None, found), "")
        except (RuntimeError, ValueError) as error:
            if not _UNSUPPORTED.search(str(error)):
                raise
            unsupported = " ".join(str(error).split())[:200]
    errors = groups.all_gather(f"rank {dist.get_rank()} on {node}: {wrong}" if wrong else "")
    reasons = list(filter(None, groups.all_gather(unsupported)))
    ok: bool | None = True
    text = ""
    if sentences := list(filter(None, errors)):
        ok, text = False, sentences[0]
        if len(sentences) > 1:
            text += f"; {len(sentences) - 1} more of {len(errors)} ranks have wrong results"
    elif reasons:
        ok, text = None, f"{team.backend} does not support {variant.title} of {dtype}: {reasons[0]}"
    elif team.largest < variant.kind.least_ranks:
        ok, text = None, f"{variant.title} needs {variant.kind.least_ranks} ranks"
    return CheckResult(operation=variant.title, group=team.name, dtype=dtype, ok=ok, error=text)


def _cases(variant: OperationVariant, team: Team, dtype: torch.dtype) -> Iterator[Operation]:
    for count in _COUNTS[:1] if variant.kind is Barrier else _COUNTS:
        # The total does not grow with the world size: checks of a thousand ranks would take minutes.
        whole = max(1, count // team.size) * team.size if variant.kind.has_parts else count
        for root in {0, team.size - 1} if variant.kind.has_root else {0}:
            yield variant.make(team, whole, dtype, root=root)
        if issubclass(variant.kind, RingAllReduce):
            yield variant.make(team, whole, dtype, piece_bytes=_SHORT_PIECE_BYTES)


def _compare(operation: Operation, groups: Groups, serial: int) -> str:
    """Return a description of a wrong result of the blocking or the asynchronous call; empty if both are correct."""
    if isinstance(operation, Barrier):
        return _compare_barrier(operation, groups, serial)
    found = []
    for async_op in (False, True) if operation.can_overlap else (False,):
        operation.fill()
        wait_for(operation.call(async_op=async_op))
        found.append(_difference(operation))
    return next(filter(None, found), "")


def _difference(operation: Operation) -> str:
    if not len(operation.result):
        return ""
    got, expected = operation.result.cpu(), operation.expected()
    if got.dtype == expected.dtype and torch.equal(got, expected):
        return ""
    places = torch.nonzero(got != expected).flatten()
    index = int(places[0])
    title = f"{operation.title} of {len(got)} x {str(got.dtype).removeprefix('torch.')}"
    title += f" (root is rank {operation.group_root})" if operation.has_root else ""
    group = "" if operation.team.name == "world" else f" among ranks {', '.join(map(str, operation.team.ranks))}"
    return (
        f"{title}{group} is wrong: at index {index} expected {expected[index].item():g}, got {got[index].item():g}"
        f" ({len(places)} of {len(got)} differ)"
    )


def _compare_barrier(operation: Barrier, groups: Groups, serial: int) -> str:
    """Let one rank arrive late; no rank may leave the barrier before it."""
    team = operation.team
    for late in (0, team.size - 1):
        key = f"comm/barrier/{serial}/{team.ranks[0]}/{late}"
        if team.index == late:
            time.sleep(_LATE_S)
        groups.store.add(key, 1)
        operation.run()
        synchronize(team.device)
        if (num_arrived := groups.store.add(key, 0)) < team.size:
            return f"a rank left the barrier of {team.size} ranks when {num_arrived} had arrived"
    return ""


# Overlap of an operation with a computation of the same duration.
#
#     hidden = (compute + communication - together) / min(compute, communication)
#
# 1 if the shorter one is hidden completely behind the longer one, 0 if they run one after the other.

#: Operations that training can overlap, at sizes of gradient buckets.
OVERLAPPED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "isend_irecv")
OVERLAP_SIZES = (1 << 20, 1 << 24)
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


# Latency and bandwidth between pairs of ranks; each node takes part in one measurement at a time.

#: Maximum world size for which all pairs are measured, one after the other.
MAX_ALL_PAIRS = 16
#: In larger runs the pairs of this many ranks of the first node are measured.
NUM_SAMPLED_RANKS = 8
_ROUND_TRIPS, _PINGS_BEFORE = 20, 3
_SMALL_BYTES = 8
_PROBE_BYTES = 1 << 18
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 23
_MESSAGES = 3
#: Duration of all messages of one bandwidth measurement, in seconds.
_BUDGET_S = 0.05
Link = tuple[int, int]


def pair_rounds(nodes: Sequence[str]) -> list[list[Link]]:
    """Return rounds of (source, target) pairs that are measured at the same time; a rank is in one pair of a round.

    With up to `MAX_ALL_PAIRS` ranks all pairs are measured individually. In larger runs the first ranks of the nodes
    are measured as a tournament, followed by individual pairs within the first node.

    Args:
        nodes: node name by rank.
    """
    if len(nodes) <= MAX_ALL_PAIRS:
        return [[link] for link in _all_links(range(len(nodes)))]
    firsts = [nodes.index(name) for name in dict.fromkeys(nodes)]
    within = [rank for rank, node in enumerate(nodes) if node == nodes[0]][:NUM_SAMPLED_RANKS]
    return tournament_links(firsts) + [[link] for link in _all_links(within)]


def _all_links(ranks: Sequence[int]) -> list[Link]:
    return [(source, target) for source in ranks for target in ranks if source != target]


def tournament_links(ranks: Sequence[int]) -> list[list[Link]]:
    """Return rounds in which each rank sends to each other rank once and takes part in one transfer at a time."""
    found = []
    for partners in tournament(len(ranks)):
        meetings = [
            (ranks[one], ranks[other]) for one, other in enumerate(partners) if other is not None and one < other
        ]
        found += [meetings, [(other, one) for one, other in meetings]]
    return [meetings for meetings in found if meetings]


def measure_round(links: Sequence[Link], world: Team) -> Pair | None:
    """Measure this rank's pair of a round, if any; return the result on the source."""
    me = dist.get_rank()
    for source, target in links:
        if me in (source, target):
            return _measure(source, target, world)
    return None


def _measure(source: int, target: int, world: Team) -> Pair | None:
    is_source = dist.get_rank() == source
    peer, device = (target if is_source else source), world.device

    def trip(leaving: torch.Tensor, returning: torch.Tensor) -> float:
        """Return the seconds of a round trip, measured at the source."""
        began = time.perf_counter()
        if is_source:
            dist.send(leaving, peer, world.group)
            dist.recv(returning, peer, world.group)
        else:
            dist.recv(leaving, peer, world.group)
            dist.send(returning, peer, world.group)
        synchronize(device)
        return time.perf_counter() - began

    small = torch.zeros(_SMALL_BYTES, dtype=torch.uint8, device=device)
    answer = torch.zeros_like(small)
    seconds = [trip(small, answer) for _ in range(_PINGS_BEFORE + _ROUND_TRIPS)][_PINGS_BEFORE:]
    latency_s = Timing.of(seconds).median_s / 2
    # The first message is slower or faster than later ones: buffers are allocated, a rate limiter allows a burst.
    probe = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
    trip(probe, answer)
    probe_s = max(trip(probe, answer) - latency_s, 1e-6)
    fits = int(_PROBE_BYTES / probe_s * _BUDGET_S / _MESSAGES)
    size = torch.tensor([_power_of_two(min(max(fits, _LEAST_BYTES), _MOST_BYTES))], device=device)
    trip(size, answer)  # the source announces the size
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    trip(data, answer)
    fastest_s = min(trip(data, answer) for _ in range(_MESSAGES))  # other load only increases the time
    if not is_source:
        return None
    transfer_s = max(fastest_s - latency_s, 1e-9)  # without the latency of the answer
    return Pair(source=source, target=target, bytes=len(data), latency_s=latency_s, bandwidth=len(data) / transfer_s)


def _power_of_two(value: int) -> int:
    """Return the largest power of two that does not exceed the value."""
    return 1 << (value.bit_length() - 1)


# The points of a benchmark in their order: a function of the config and of the nodes of the ranks.

#: Data type of operations that only move data.
BYTES = "uint8"
#: Sizes of secondary series: every fourth power of two, up to a size at which the bandwidth is constant.
_SPARSE, _SETTLED = 4, 1 << 24
#: Number of simultaneous operations in the mode `async`.
DEPTH = 4
#: Operations that are measured in sub-groups; the others are only checked there.
_IN_GROUPS = ("all_reduce", "all_gather", "all_to_all", "broadcast")


@dataclass(frozen=True, kw_only=True)
class CorrectnessCheck:
    """A check of one operation in one partition of the ranks, in all dtypes."""

    variant: OperationVariant
    team: str
    dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Series:
    """An operation over all its sizes, one line of a plot."""

    variant: OperationVariant
    mode: Literal["blocking", "async"]
    team: str
    dtype: str

    @property
    def title(self) -> str:
        """Name of the series in reports."""
        parts = [
            self.variant.title,
            self.dtype if self.variant.kind.reduces else "",
            self.mode * (self.mode == "async"),
        ]
        return ", ".join([*filter(None, parts), *([self.team] if self.team != WORLD else [])])


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One point of a series."""

    series: Series
    size: int
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class PairRound:
    """Pairs of ranks that are measured at the same time."""

    links: tuple[Link, ...]
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class OverlapPoint:
    """An operation overlapped with a computation."""

    variant: OperationVariant
    size: int


@dataclass(frozen=True, kw_only=True)
class RpcPoint:
    """All measurements of RPC."""


Point = CorrectnessCheck | Measurement | PairRound | OverlapPoint | RpcPoint


def points(cfg: CommConfig, nodes: Sequence[str]) -> list[Point]:
    """Return all points in order: first the checks, then the pairs of ranks, then the other measurements.

    Args:
        cfg: the section `comm`.
        nodes: node name by rank.
    """
    named = [name for name in COMM_OPERATIONS if name in cfg.operations]
    teams = [WORLD, *cuts(nodes)] if "groups" in cfg.operations else [WORLD]
    found: list[Point] = [*_checks(cfg, named, teams)]
    several = len(nodes) > 1
    if "pairs" in cfg.operations and several:
        rounds = pair_rounds(nodes)
        found += [PairRound(links=tuple(links), is_last=index == len(rounds) - 1) for index, links in enumerate(rounds)]
    for series, sizes in _all_series(cfg, named, teams):
        found += [Measurement(series=series, size=size, is_last=size == sizes[-1]) for size in sizes]
    if "overlap" in cfg.operations and several:
        found += [
            OverlapPoint(variant=variant, size=size)
            for name in named
            if name in OVERLAPPED
            for variant in _variants(name)[:1]
            for size in OVERLAP_SIZES
            if size <= parse_bytes(cfg.max_bytes)
        ]
    if "rpc" in cfg.operations and several:
        found.append(RpcPoint())
    return found


def _variants(name: str) -> list[OperationVariant]:
    kind = OPERATIONS[name]
    return (
        [OperationVariant(kind=kind, reduction=one) for one in REDUCTIONS]
        if kind.reduces
        else [OperationVariant(kind=kind)]
    )


def _checks(cfg: CommConfig, named: Sequence[str], teams: Sequence[str]) -> Iterator[CorrectnessCheck]:
    for team in teams:
        # All dtypes for the world. In sub-groups, which can only confuse ranks, the dtypes that are measured.
        dtypes = tuple(DTYPES) if team == WORLD else tuple(dict.fromkeys([BYTES, *cfg.dtypes]))
        for name in named:
            for variant in _variants(name):
                yield CorrectnessCheck(variant=variant, team=team, dtypes=(BYTES,) if name == "barrier" else dtypes)


def _all_series(cfg: CommConfig, named: Sequence[str], teams: Sequence[str]) -> Iterator[tuple[Series, list[int]]]:
    dense = sizes(parse_bytes(cfg.max_bytes))
    sparse = [size for size in dense[::_SPARSE] if size <= _SETTLED]
    for name in named:
        for variant in _variants(name):
            kind = variant.kind
            for dtype in cfg.dtypes if kind.reduces else [BYTES]:
                wanted = [size for size in dense if size >= DTYPES[dtype].itemsize]
                few = [size for size in sparse if size >= DTYPES[dtype].itemsize]
                is_main = variant.reduction in (None, "sum")
                here = wanted if is_main else few
                yield (
                    Series(variant=variant, mode="blocking", team=WORLD, dtype=dtype),
                    here if name != "barrier" else [0],
                )
                if is_main and kind.can_overlap and "async" in cfg.operations:
                    yield Series(variant=variant, mode="async", team=WORLD, dtype=dtype), few
                for team in teams[1:] if is_main and name in _IN_GROUPS else ():
                    yield Series(variant=variant, mode="blocking", team=team, dtype=dtype), few


def sizes(max_bytes: int) -> list[int]:
    """Return the powers of two from 1 to `max_bytes`."""
    return [1 << power for power in range(max_bytes.bit_length())]


def elements(size: int, dtype: str, num_parts: int) -> int:
    """Return the number of elements of a size in bytes, rounded up to equal parts."""
    count = max(1, size // DTYPES[dtype].itemsize)
    return -(-count // num_parts) * num_parts


# RPC from rank 0 to other ranks: round trips of a tensor.

RPC_SIZES = (4, 1 << 12, 1 << 20, 1 << 24)
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
                for size in RPC_SIZES:
                    if size > parse_bytes(cfg.max_bytes) or size * byte_s > MAX_ITERATION_S:
                        break
                    ctx.alive()
                    timing, calls_s = _measure_calls(group, rank, size, device, MEASURE_S)
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


def _measure_calls(
    group: RpcGroup, rank: int, size: int, device: torch.device, budget_s: float
) -> tuple[Timing, float]:
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
