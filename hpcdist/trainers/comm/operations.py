"""The operations of the benchmark, the groups of ranks in which they run, and the checks of their results."""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.rank.collective_check import largest_exact, synchronize
from hpcdist.rank.process_group import Groups
from hpcdist.trainers.comm.results import CheckResult

# Test data for exact checks of transport and reduction: whole numbers that depend on rank and index.
#
# All values, and all partial sums and products in any order, are exact in all dtypes, so that results can be compared
# without a tolerance.

REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}
#: Limit of sums in dtypes that represent larger numbers exactly.
_ENOUGH = 1 << 20
#: A prime, so that data shifted by a power of two, such as a wrong chunk, differs.
_PERIOD = 113
#: A value that no message contains.
NEVER = 119
#: Number of ranks that contribute a factor 2 at each index, the others contribute 1: 2³ fits into every dtype.
_FACTORS = 3


def message(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the message of a rank: values from 0 to 112, different at each index for up to 113 ranks."""
    return ((37 * rank + _steps(count)) % _PERIOD).to(dtype)


def _steps(count: int) -> Tensor:
    place = torch.arange(count)
    return 7 * place + place // _PERIOD


@functools.lru_cache(maxsize=128)
def reduced(reduction: str, num_ranks: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the result of a reduction; cached, because it is slow for a thousand ranks and used by many operations."""
    given = (contribution(reduction, rank, num_ranks, count, dtype) for rank in range(num_ranks))
    return functools.reduce(REDUCTIONS[reduction], given).to(dtype)


def contribution(reduction: str, rank: int, num_ranks: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the contribution of a rank to a reduction, int64 numbers that `dtype` can represent."""
    place = torch.arange(count)
    # Multiplicative hashing: without it the sums over all ranks would be equal at every index.
    mixed = (2_654_435_761 * (place + 1) ^ 40_503 * (rank + 1)) * 2_246_822_519 % (1 << 32) >> 13
    if reduction in ("max", "min"):
        return _steps(count) % 97 + mixed % 16
    turn = (rank + place) % num_ranks  # which ranks contribute more than the neutral value varies by index
    if reduction == "product":
        return 1 + ((turn < _FACTORS) & (mixed % 3 > 0)).long()
    limit = min(largest_exact(dtype), _ENOUGH)
    values = min(_PERIOD, max(2, limit // num_ranks + 1))  # each contributes 0 to values - 1
    return (mixed % values) * (turn < limit // (values - 1))


Works = list[dist.Work | None]


# Groups of ranks: all ranks, and partitions of them into groups that communicate at the same time.

WORLD = "world"


@dataclass(frozen=True)
class Team:
    """The group of this rank in one partition of all ranks."""

    name: str  #: of the partition, such as `world` or `halves`; its groups communicate at the same time
    ranks: tuple[int, ...]  #: global ranks of this group
    largest: int  #: number of ranks in the largest group of the partition
    group: dist.ProcessGroup | None  #: None if this rank is alone in its group
    device: torch.device
    backend: str

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        return self.ranks.index(dist.get_rank())

    def neighbour(self, steps: int) -> int:
        """Return the global rank that is `steps` positions to the right in the ring of the group."""
        return self.ranks[(self.index + steps) % self.size]


def cuts(nodes: Sequence[str]) -> dict[str, list[list[int]]]:
    """Return partitions of all ranks by name, of at least two groups each, for node names by rank."""
    ranks = list(range(len(nodes)))
    by_node = {name: [rank for rank in ranks if nodes[rank] == name] for name in dict.fromkeys(nodes)}
    found = {}
    if len(by_node) > 1:
        found["within nodes"] = list(by_node.values())
        most = max(map(len, by_node.values()))
        # One rank of each node, as used by data parallelism over nodes and hybrid sharding.
        found["across nodes"] = [[part[i] for part in by_node.values() if i < len(part)] for i in range(most)]
    found["halves"] = [ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]]
    found["even and odd"] = [ranks[::2], ranks[1::2]]
    kept: dict[str, list[list[int]]] = {}
    for name, groups in found.items():
        groups = [group for group in groups if group]
        if 1 < len(groups) < len(ranks) and not any(sorted(groups) == sorted(other) for other in kept.values()):
            kept[name] = groups
    return kept


def make_teams(nodes: Sequence[str], device: torch.device, timeout: timedelta, *, with_groups: bool) -> dict[str, Team]:
    """Create the process groups and return this rank's team of each partition. Call it on every rank."""
    backend = dist.get_backend()
    teams = {WORLD: Team(WORLD, tuple(range(len(nodes))), len(nodes), dist.group.WORLD, device, backend)}
    for name, groups in (cuts(nodes) if with_groups else {}).items():
        for ranks in groups:
            # `new_group` must be called on every rank for every group.
            made = dist.new_group(ranks, backend=backend, timeout=timeout) if len(ranks) > 1 else None
            if dist.get_rank() in ranks:
                assert made is None or isinstance(made, dist.ProcessGroup)
                teams[name] = Team(name, tuple(ranks), max(map(len, groups)), made, device, backend)
    return teams


@dataclass(frozen=True)
class OperationKind:
    """An operation that is checked and measured.

    The two buffers have `all` data, the equal `part` of one rank, all data at the `root` only, or `none`.
    """

    name: str
    source: str
    result: str
    in_place: bool = False  #: both are the same buffer
    has_parts: bool = False  #: the data consist of one equal part for each rank
    is_one_way: bool = False  #: a rank may finish before others have begun, so that ranks could run ahead
    reduces: bool = False  #: values are combined, so that the dtype matters
    has_async: bool = True  #: it may be started without waiting for its end
    least_ranks: int = 1

    @property
    def has_root(self) -> bool:
        return "root" in (self.source, self.result)

    def hops(self, n: int) -> int:
        """Return the number of consecutive operations in one call."""
        return n if self.name == "send_recv" else 1

    def title(self, reduction: str | None) -> str:
        return f"{self.name}[{reduction}]" if reduction else self.name


class Operation:
    """One operation on this rank: buffers, call and expected result.

    `count` is the number of elements of all data, the parts of all ranks together; `root` is an index in the group.
    """

    def __init__(
        self,
        kind: OperationKind,
        team: Team,
        count: int,
        dtype: torch.dtype,
        *,
        root: int = 0,
        reduction: str = "sum",
    ) -> None:
        self.kind, self.team, self.count, self.dtype = kind, team, count, dtype
        self.root, self.reduction = root, reduction
        self.part, self.is_root, self.group_root = count // team.size, team.index == root, team.ranks[root]
        self.operator: Any = getattr(dist.ReduceOp, reduction.upper())
        lengths = {"all": count, "part": self.part, "root": count if self.is_root else 0, "none": 0}
        sent, received = lengths[kind.source], lengths[kind.result]
        data = torch.empty(count if kind.in_place else sent, dtype=dtype, device=team.device)
        self.source = data[:sent]
        self.result = data[:received] if kind.in_place else data.new_empty(received)
        self.source.zero_()  # zeros do not overflow in repeated sums; writing also allocates the pages

    def run(self) -> None:
        CALLS[self.kind.name](self, False)

    def fill(self) -> None:
        """Overwrite the result with values that no correct result contains, and write the input pattern."""
        self.result.fill_(NEVER)
        if len(self.source):
            self.source.copy_(self._input())

    def _input(self) -> Tensor:  # on the CPU, like the expected result
        here, size = self.team.index, self.team.size
        if self.kind.reduces:
            return contribution(self.reduction, here, size, self.count, self.dtype)
        match self.kind.name:
            case "scatter":
                return self._parts(range(size))
            case "gather" | "all_gather":
                return self._parts([here])
            case "all_to_all":  # a different part for each pair of ranks
                return self._parts(range(here * size, (here + 1) * size))
        return message(here, self.count, self.dtype)

    def expected(self) -> Tensor:
        here, size = self.team.index, self.team.size
        if self.kind.reduces:
            total = reduced(self.reduction, size, self.count, self.dtype)
            return total[here * self.part :][: self.part] if self.kind.has_parts else total
        match self.kind.name:
            case "scatter":
                return self._parts([here])
            case "gather" | "all_gather":
                return self._parts(range(size))
            case "all_to_all":
                return self._parts(range(here, size * size, size))
            case "isend_irecv":
                return message((here - 1) % size, self.count, self.dtype)
        return message(self.root, self.count, self.dtype)

    def _parts(self, numbers: Iterable[int]) -> Tensor:
        return torch.cat([message(number, self.part, self.dtype) for number in numbers])

    def chunks(self, data: Tensor) -> list[Tensor] | None:
        """Return the parts of all ranks at the root, None elsewhere."""
        return list(data.chunk(self.team.size)) if self.is_root else None


def wait_for(works: Works) -> None:
    """Wait until all of the operations have ended; None stands for one that had nothing to do."""
    for work in works:
        if work is not None:
            work.wait()


def _send_recv(op: Operation, _: bool) -> Works:
    """Pass a message around the ring of all ranks with blocking calls; the time is that of one hop."""
    right, left, group = op.team.neighbour(1), op.team.neighbour(-1), op.team.group
    if op.is_root:
        dist.send(op.result, right, group)
    dist.recv(op.result, left, group)
    if not op.is_root:
        dist.send(op.result, right, group)
    return []


def _isend_irecv(op: Operation, start: bool) -> Works:
    """Send to the right neighbour and receive from the left one at the same time, as in nccl-tests."""
    right, left, group = op.team.neighbour(1), op.team.neighbour(-1), op.team.group
    both = [dist.P2POp(dist.isend, op.source, right, group), dist.P2POp(dist.irecv, op.result, left, group)]
    works: Works = list(dist.batch_isend_irecv(both))
    if start:
        return works
    wait_for(works)
    return []  # a second wait blocks forever in gloo


#: Run an operation, or start it if the second argument is true and return the works to wait for.
CALLS: dict[str, Callable[[Operation, bool], Works]] = {
    "send_recv": _send_recv,
    "isend_irecv": _isend_irecv,
    "all_reduce": lambda op, start: [dist.all_reduce(op.source, op.operator, op.team.group, start)],
    "reduce": lambda op, start: [dist.reduce(op.source, op.group_root, op.operator, op.team.group, start)],
    "broadcast": lambda op, start: [dist.broadcast(op.result, op.group_root, op.team.group, start)],
    "scatter": lambda op, start: [dist.scatter(op.result, op.chunks(op.source), op.group_root, op.team.group, start)],
    "gather": lambda op, start: [dist.gather(op.source, op.chunks(op.result), op.group_root, op.team.group, start)],
    "all_gather": lambda op, start: [dist.all_gather_into_tensor(op.result, op.source, op.team.group, start)],
    "reduce_scatter": lambda op, start: [
        dist.reduce_scatter_tensor(op.result, op.source, op.operator, op.team.group, start)
    ],
    "all_to_all": lambda op, start: [dist.all_to_all_single(op.result, op.source, group=op.team.group, async_op=start)],
    "barrier": lambda op, start: [dist.barrier(op.team.group, start)],
}
#: All operations by their names in a config.
OPERATIONS = {
    kind.name: kind
    for kind in (
        OperationKind("send_recv", "root", "all", in_place=True, has_async=False, least_ranks=2),
        OperationKind("isend_irecv", "all", "all", least_ranks=2),
        OperationKind("all_reduce", "all", "all", in_place=True, reduces=True),
        OperationKind("reduce", "all", "root", in_place=True, reduces=True, is_one_way=True),
        OperationKind("broadcast", "root", "all", in_place=True, is_one_way=True),
        OperationKind("scatter", "root", "part", has_parts=True, is_one_way=True),
        OperationKind("gather", "part", "root", has_parts=True, is_one_way=True),
        OperationKind("all_gather", "part", "all", has_parts=True),
        OperationKind("reduce_scatter", "all", "part", has_parts=True, reduces=True),
        OperationKind("all_to_all", "all", "all", has_parts=True),
        OperationKind("barrier", "none", "none", has_async=False),
    )
}


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
    kind: OperationKind, reduction: str | None, team: Team, dtype: str, groups: Groups, *, node: str
) -> CheckResult:
    """Compare the result of an operation with the exact expected result. Call it on every rank; `node` is its node."""
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
    errors = list(filter(None, groups.all_gather(f"rank {dist.get_rank()} on {node}: {wrong}" if wrong else "")))
    reasons = list(filter(None, groups.all_gather(unsupported)))
    ok: bool | None = True
    text = ""
    if errors:
        more = f"; {len(errors) - 1} more of {dist.get_world_size()} ranks have wrong results"
        ok, text = False, errors[0] + (more if len(errors) > 1 else "")
    elif reasons:
        ok, text = None, f"{team.backend} does not support {title} of {dtype}: {reasons[0]}"
    elif team.largest < kind.least_ranks:
        ok, text = None, f"{title} needs {kind.least_ranks} ranks"
    return CheckResult(operation=title, group=team.name, dtype=dtype, ok=ok, error=text)


def _cases(kind: OperationKind, reduction: str, team: Team, dtype: torch.dtype) -> Iterator[Operation]:
    for count in _COUNTS[:1] if kind.name == "barrier" else _COUNTS:
        # The total does not grow with the world size: checks of a thousand ranks would take minutes.
        whole = max(1, count // team.size) * team.size if kind.has_parts else count
        for root in {0, team.size - 1} if kind.has_root else {0}:
            yield Operation(kind, team, whole, dtype, root=root, reduction=reduction)


def _compare(operation: Operation, groups: Groups, serial: int) -> str:
    """Return the error of the blocking or the asynchronous call, empty if both are correct."""
    found = []
    if operation.kind.name == "barrier":
        # One rank arrives late; no rank may leave the barrier before it.
        team = operation.team
        for late in (0, team.size - 1):
            key = f"comm/barrier/{serial}/{team.ranks[0]}/{late}"
            if team.index == late:
                time.sleep(_LATE_S)
            groups.store.add(key, 1)
            operation.run()
            synchronize(team.device)
            if (num_arrived := groups.store.add(key, 0)) < team.size:
                found.append(f"a rank left the barrier of {team.size} ranks when {num_arrived} had arrived")
    else:
        for async_op in (False, True) if operation.kind.has_async else (False,):
            operation.fill()
            wait_for(CALLS[operation.kind.name](operation, async_op))
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
    title = operation.kind.title(operation.reduction if operation.kind.reduces else None)
    root = f" (root is rank {operation.group_root})" if operation.kind.has_root else ""
    group = "" if operation.team.name == "world" else f" among ranks {', '.join(map(str, operation.team.ranks))}"
    return (
        f"{title} of {len(got)} x {str(got.dtype).removeprefix('torch.')}{root}{group} is wrong: at index {index}"
        f" expected {expected[index].item():g}, got {got[index].item():g} ({len(places)} of {len(got)} differ)"
    )
