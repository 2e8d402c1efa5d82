"""The measurements of a benchmark in their order: correctness, pairs of ranks, then every operation over its sizes."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpcdist.host.network import tournament
from hpcdist.rank.collective_check import Timing, synchronize
from hpcdist.rank.process_group import Groups
from hpcdist.trainers.comm import COMM_OPERATIONS, CommConfig, parse_bytes
from hpcdist.trainers.comm.operations import (
    DTYPES,
    OPERATIONS,
    REDUCTIONS,
    WORLD,
    Barrier,
    Operation,
    Reduction,
    Team,
    cuts,
    wait_for,
)
from hpcdist.trainers.comm.results import CheckResult, Pair

# Correctness of an operation's result on every rank, at sizes that do not divide evenly.

#: Error messages of torch and its backends for an unsupported operation, equal on every rank.
_UNSUPPORTED = re.compile(
    r"not support|unsupported|not implemented|invalid scalar type|no backend type associated|unhandled scalar",
    re.IGNORECASE,
)
#: Numbers of elements (of each rank's part, if there are parts): one, a few, and enough for several messages.
_COUNTS = (1, 7, 20_011)
_LATE_S = 0.02
#: Number of the check, equal on all ranks.
_serial = itertools.count()


def check(
    kind: type[Operation], reduction: Reduction | None, team: Team, dtype: str, groups: Groups, *, node: str
) -> CheckResult:
    """Compare the result of an operation with the exact expected result. Call it on every rank.

    Args:
        kind: the operation.
        reduction: the operator of a reduction.
        team: the group of this rank.
        dtype: data type, a key of `DTYPES`.
        groups: exchange the results of all ranks; their store counts the ranks in a barrier.
        node: node name of this rank, for the report.
    """
    wrong, unsupported, serial, title = "", "", next(_serial), kind.title(reduction)
    if team.size >= max(kind.least_ranks, 1 if team.name == WORLD else 2):
        try:
            # All cases, also after a wrong result, because the other ranks continue with the next case.
            cases = _cases(kind, reduction or "sum", team, DTYPES[dtype])
            found = [_compare(operation, groups, serial) for operation in cases]
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
        ok, text = None, f"{team.backend} does not support {title} of {dtype}: {reasons[0]}"
    elif team.largest < kind.least_ranks:
        ok, text = None, f"{title} needs {kind.least_ranks} ranks"
    return CheckResult(operation=title, group=team.name, dtype=dtype, ok=ok, error=text)


def _cases(kind: type[Operation], reduction: Reduction, team: Team, dtype: torch.dtype) -> Iterator[Operation]:
    for count in _COUNTS[:1] if kind is Barrier else _COUNTS:
        # The total does not grow with the world size: checks of a thousand ranks would take minutes.
        whole = max(1, count // team.size) * team.size if kind.has_parts else count
        for root in {0, team.size - 1} if kind.has_root else {0}:
            yield kind(team, whole, dtype, root=root, reduction=reduction)


def _compare(operation: Operation, groups: Groups, serial: int) -> str:
    """Return a description of a wrong result of the blocking or the asynchronous call; empty if both are correct."""
    if isinstance(operation, Barrier):
        return _compare_barrier(operation, groups, serial)
    found = []
    for async_op in (False, True) if operation.has_async else (False,):
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
    title = operation.title(operation.reduction if operation.reduces else None)
    title += f" of {len(got)} x {str(got.dtype).removeprefix('torch.')}"
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
    source, target = next((link for link in links if me in link), (None, None))
    if source is None or target is None:
        return None
    is_source = me == source
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
    size = torch.tensor([min(max(fits, _LEAST_BYTES), _MOST_BYTES)], device=device)
    trip(size, answer)  # the source announces the size
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    trip(data, answer)
    fastest_s = min(trip(data, answer) for _ in range(_MESSAGES))  # other load only increases the time
    if not is_source:
        return None
    transfer_s = max(fastest_s - latency_s, 1e-9)  # without the latency of the answer
    return Pair(source=source, target=target, bytes=len(data), latency_s=latency_s, bandwidth=len(data) / transfer_s)


# The points of a benchmark in their order: a function of the config and of the nodes of the ranks.

#: Data type of operations that only move data.
BYTES = "uint8"
#: Sizes in sub-groups: every fourth power of two, up to a size at which the bandwidth is constant.
_SPARSE, _SETTLED = 4, 1 << 24
#: Operations that are measured in sub-groups; the others are only checked there.
_IN_GROUPS = ("all_reduce", "all_gather", "all_to_all", "broadcast")


@dataclass(frozen=True, kw_only=True)
class CorrectnessCheck:
    """A check of one operation in one partition of the ranks, in all dtypes."""

    operation: str
    reduction: Reduction | None
    team: str
    dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """An operation, for a reduction the sum, at one of its sizes."""

    operation: str
    team: str
    dtype: str
    size: int
    is_last: bool  #: whether it has the largest size


@dataclass(frozen=True, kw_only=True)
class PairRound:
    """Pairs of ranks that are measured at the same time."""

    links: tuple[Link, ...]
    is_last: bool


Point = CorrectnessCheck | Measurement | PairRound


def points(cfg: CommConfig, nodes: Sequence[str]) -> list[Point]:
    """Return all points in order: first the checks, then the pairs of ranks, then the other measurements.

    Args:
        cfg: the section `comm`.
        nodes: node name by rank.
    """
    named = [name for name in COMM_OPERATIONS if name in cfg.operations]
    teams = [WORLD, *cuts(nodes)] if "groups" in cfg.operations else [WORLD]
    found: list[Point] = []
    for team in teams:
        # All dtypes for the world. In sub-groups, which can only confuse ranks, the dtypes that are measured.
        dtypes = tuple(DTYPES) if team == WORLD else tuple(dict.fromkeys([BYTES, *cfg.dtypes]))
        for name in named:
            of = (BYTES,) if name == "barrier" else dtypes
            reductions = REDUCTIONS if OPERATIONS[name].reduces else (None,)
            found += [CorrectnessCheck(operation=name, reduction=one, team=team, dtypes=of) for one in reductions]
    if "pairs" in cfg.operations:
        rounds = pair_rounds(nodes)
        found += [PairRound(links=tuple(links), is_last=index == len(rounds) - 1) for index, links in enumerate(rounds)]
    dense = sizes(parse_bytes(cfg.max_bytes))
    sparse = [size for size in dense[::_SPARSE] if size <= _SETTLED]
    for name in named:
        for dtype in cfg.dtypes if OPERATIONS[name].reduces else [BYTES]:
            for team in teams if name in _IN_GROUPS else [WORLD]:
                least = DTYPES[dtype].itemsize
                some = [size for size in (dense if team == WORLD else sparse) if size >= least]
                some = [0] if name == "barrier" else some
                found += [
                    Measurement(operation=name, team=team, dtype=dtype, size=size, is_last=size == some[-1])
                    for size in some
                ]
    return found


def sizes(max_bytes: int) -> list[int]:
    """Return the powers of two from 1 to `max_bytes`."""
    return [1 << power for power in range(max_bytes.bit_length())]


def elements(size: int, dtype: str, num_parts: int) -> int:
    """Return the number of elements of a size in bytes, rounded up to equal parts."""
    count = max(1, size // DTYPES[dtype].itemsize)
    return -(-count // num_parts) * num_parts
