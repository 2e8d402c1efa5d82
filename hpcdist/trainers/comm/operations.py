"""The operations of the benchmark, the groups of ranks in which they run, and the checks of their results."""

from __future__ import annotations

import functools
import itertools
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal, get_args

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

Reduction = Literal["sum", "product", "max", "min"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
_COMBINE: dict[Reduction, Callable[..., Tensor]] = {
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
def reduced(reduction: Reduction, num_ranks: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the result of a reduction; cached, because it is slow for a thousand ranks and used by many operations."""
    given = (contribution(reduction, rank, num_ranks, count, dtype) for rank in range(num_ranks))
    return functools.reduce(_COMBINE[reduction], given).to(dtype)


def contribution(reduction: Reduction, rank: int, num_ranks: int, count: int, dtype: torch.dtype) -> Tensor:
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


@dataclass(frozen=True, kw_only=True)
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
    backend, everyone = dist.get_backend(), list(range(len(nodes)))

    def make(ranks: list[int]) -> dist.ProcessGroup | None:
        # `new_group` must be called on every rank for every group.
        made = dist.new_group(ranks, backend=backend, timeout=timeout) if len(ranks) > 1 else None
        return made if isinstance(made, dist.ProcessGroup) else None

    teams = {}
    for name, groups in ({WORLD: [everyone]} | (cuts(nodes) if with_groups else {})).items():
        made = [dist.group.WORLD if name == WORLD else make(ranks) for ranks in groups]
        mine = next(index for index, ranks in enumerate(groups) if dist.get_rank() in ranks)
        teams[name] = Team(
            name=name,
            ranks=tuple(groups[mine]),
            largest=max(map(len, groups)),
            group=made[mine],
            device=device,
            backend=backend,
        )
    return teams


class Operation(ABC):
    """An operation that is checked and measured: buffers, call and expected result on this rank.

    Args:
        count: number of elements of all data, the parts of all ranks together as in nccl-tests; a multiple of the
            group's size if the operation `has_parts`.
        root: index in the group of the rank that sends or receives all data.
    """

    name: ClassVar[str]
    #: Whether the data consist of one equal part for each rank.
    has_parts: ClassVar[bool] = False
    #: Whether a rank may finish before others have begun, so that ranks could run ahead.
    is_one_way: ClassVar[bool] = False
    #: Whether a single rank sends or receives all data.
    has_root: ClassVar[bool] = False
    #: Whether values are combined, so that the dtype matters.
    reduces: ClassVar[bool] = False
    #: Whether it may be started without waiting for its end.
    has_async: ClassVar[bool] = True
    least_ranks: ClassVar[int] = 1

    def __init__(
        self, team: Team, count: int, dtype: torch.dtype, *, root: int = 0, reduction: Reduction = "sum"
    ) -> None:
        self.team, self.count, self.dtype, self.root, self.reduction = team, count, dtype, root, reduction
        self.part = count // team.size
        self.is_root = team.index == root
        self.group_root = team.ranks[root]
        self.source, self.result = self.buffers()
        self.source.zero_()  # zeros do not overflow in repeated sums; writing also allocates the pages

    @staticmethod
    def hops(n: int) -> int:
        """Return the number of consecutive operations in one call."""
        return 1

    @classmethod
    def title(cls, reduction: Reduction | None) -> str:
        return f"{cls.name}[{reduction}]" if reduction else cls.name

    @abstractmethod
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Allocate input and output, empty on ranks without one; they may be the same buffer."""

    @abstractmethod
    def call(self, *, async_op: bool) -> Works:
        """Run the operation, or start it and return the work to wait for."""

    def input(self) -> Tensor:  # on the CPU, like the expected result
        return message(self.team.index, self.count, self.dtype)

    def expected(self) -> Tensor:
        return message(self.root, self.count, self.dtype)

    def fill(self) -> None:
        """Overwrite the result with values that no correct result contains, and write the input pattern."""
        self.result.fill_(NEVER)
        if len(self.source):
            self.source.copy_(self.input())

    def run(self) -> None:
        self.call(async_op=False)

    def empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=self.dtype, device=self.team.device)

    def parts_of(self, pattern: Callable[[int], Tensor]) -> Tensor:
        return torch.cat([pattern(rank) for rank in range(self.team.size)])


def wait_for(works: Works) -> None:
    """Wait until all of the operations have ended; None stands for one that had nothing to do."""
    for work in works:
        if work is not None:
            work.wait()


# The operations: point-to-point messages, data movement, the barrier, and reductions.


class Broadcast(Operation):
    name, has_root, is_one_way = "broadcast", True, True

    def buffers(self) -> tuple[Tensor, Tensor]:
        data = self.empty(self.count)
        return data if self.is_root else data[:0], data

    def call(self, *, async_op: bool) -> Works:
        return [dist.broadcast(self.result, self.group_root, self.team.group, async_op=async_op)]


class SendRecv(Broadcast):
    """Pass a message around the ring of all ranks with blocking calls; the time is that of one hop."""

    name, is_one_way, has_async, least_ranks = "send_recv", False, False, 2

    @staticmethod
    def hops(n: int) -> int:
        return n

    def call(self, *, async_op: bool) -> Works:
        right, left, group = self.team.neighbour(1), self.team.neighbour(-1), self.team.group
        if self.is_root:
            dist.send(self.result, right, group)
            dist.recv(self.result, left, group)
        else:
            dist.recv(self.result, left, group)
            dist.send(self.result, right, group)
        return []


class IsendIrecv(Operation):
    """Send to the right neighbour and receive from the left one at the same time, as in nccl-tests."""

    name, least_ranks = "isend_irecv", 2

    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.empty(self.count), self.empty(self.count)

    def expected(self) -> Tensor:
        return message((self.team.index - 1) % self.team.size, self.count, self.dtype)

    def call(self, *, async_op: bool) -> Works:
        right, left, group = self.team.neighbour(1), self.team.neighbour(-1), self.team.group
        both = [dist.P2POp(dist.isend, self.source, right, group), dist.P2POp(dist.irecv, self.result, left, group)]
        works: Works = list(dist.batch_isend_irecv(both))
        if async_op:
            return works
        wait_for(works)
        return []  # a second wait blocks forever in gloo


class Scatter(Operation):
    name, has_parts, has_root, is_one_way = "scatter", True, True, True

    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.empty(self.count if self.is_root else 0), self.empty(self.part)

    def input(self) -> Tensor:
        return self.parts_of(lambda rank: message(rank, self.part, self.dtype))

    def expected(self) -> Tensor:
        return message(self.team.index, self.part, self.dtype)

    def call(self, *, async_op: bool) -> Works:
        parts = list(self.source.chunk(self.team.size)) if self.is_root else None
        return [dist.scatter(self.result, parts, self.group_root, self.team.group, async_op=async_op)]


class Gather(Operation):
    name, has_parts, has_root, is_one_way = "gather", True, True, True

    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.empty(self.part), self.empty(self.count if self.is_root else 0)

    def input(self) -> Tensor:
        return message(self.team.index, self.part, self.dtype)

    def expected(self) -> Tensor:
        return self.parts_of(lambda rank: message(rank, self.part, self.dtype))

    def call(self, *, async_op: bool) -> Works:
        parts = list(self.result.chunk(self.team.size)) if self.is_root else None
        return [dist.gather(self.source, parts, self.group_root, self.team.group, async_op=async_op)]


class AllGather(Gather):
    name, has_root, is_one_way = "all_gather", False, False

    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.empty(self.part), self.empty(self.count)

    def call(self, *, async_op: bool) -> Works:
        return [dist.all_gather_into_tensor(self.result, self.source, self.team.group, async_op=async_op)]


class AllToAll(Operation):
    name, has_parts = "all_to_all", True

    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.empty(self.count), self.empty(self.count)

    def input(self) -> Tensor:
        return self.parts_of(lambda target: self._letter(self.team.index, target))

    def expected(self) -> Tensor:
        return self.parts_of(lambda sender: self._letter(sender, self.team.index))

    def _letter(self, sender: int, target: int) -> Tensor:
        return message(sender * self.team.size + target, self.part, self.dtype)

    def call(self, *, async_op: bool) -> Works:
        return [dist.all_to_all_single(self.result, self.source, group=self.team.group, async_op=async_op)]


class Barrier(Operation):
    """Barrier of all ranks. It is checked by a counter in the store, see `_compare`."""

    name, has_async = "barrier", False

    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.empty(0), self.empty(0)

    def call(self, *, async_op: bool) -> Works:
        return [dist.barrier(self.team.group, async_op=async_op)]


class AllReduce(Operation):
    name, reduces = "all_reduce", True

    def buffers(self) -> tuple[Tensor, Tensor]:
        data = self.empty(self.count)
        return data, data

    @property
    def operator(self) -> Any:
        return getattr(dist.ReduceOp, self.reduction.upper())

    def input(self) -> Tensor:
        return contribution(self.reduction, self.team.index, self.team.size, self.count, self.dtype)

    def expected(self) -> Tensor:
        return reduced(self.reduction, self.team.size, self.count, self.dtype)

    def call(self, *, async_op: bool) -> Works:
        return [dist.all_reduce(self.source, self.operator, self.team.group, async_op=async_op)]


class Reduce(AllReduce):
    name, has_root, is_one_way = "reduce", True, True

    def buffers(self) -> tuple[Tensor, Tensor]:
        data = self.empty(self.count)
        return data, data if self.is_root else data[:0]

    def call(self, *, async_op: bool) -> Works:
        operator, group = self.operator, self.team.group
        return [dist.reduce(self.source, self.group_root, operator, group, async_op=async_op)]


class ReduceScatter(AllReduce):
    name, has_parts = "reduce_scatter", True

    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.empty(self.count), self.empty(self.part)

    def expected(self) -> Tensor:
        return super().expected()[self.team.index * self.part :][: self.part]

    def call(self, *, async_op: bool) -> Works:
        operator, group = self.operator, self.team.group
        return [dist.reduce_scatter_tensor(self.result, self.source, operator, group, async_op=async_op)]


#: All operations by their names in a config.
OPERATIONS: dict[str, type[Operation]] = {
    kind.name: kind
    for kind in (
        *(SendRecv, IsendIrecv, AllReduce, Reduce, Broadcast, Scatter, Gather),
        *(AllGather, ReduceScatter, AllToAll, Barrier),
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
    kind: type[Operation], reduction: Reduction | None, team: Team, dtype: str, groups: Groups, *, node: str
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


def _cases(kind: type[Operation], reduction: Reduction, team: Team, dtype: torch.dtype) -> Iterator[Operation]:
    for count in _COUNTS[:1] if kind is Barrier else _COUNTS:
        # The total does not grow with the world size: checks of a thousand ranks would take minutes.
        whole = max(1, count // team.size) * team.size if kind.has_parts else count
        for root in {0, team.size - 1} if kind.has_root else {0}:
            yield kind(team, whole, dtype, root=root, reduction=reduction)


def _compare(operation: Operation, groups: Groups, serial: int) -> str:
    """Return the error of the blocking or the asynchronous call, empty if both are correct."""
    found = []
    if isinstance(operation, Barrier):
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
    root = f" (root is rank {operation.group_root})" if operation.has_root else ""
    group = "" if operation.team.name == "world" else f" among ranks {', '.join(map(str, operation.team.ranks))}"
    return (
        f"{title} of {len(got)} x {str(got.dtype).removeprefix('torch.')}{root}{group} is wrong: at index {index}"
        f" expected {expected[index].item():g}, got {got[index].item():g} ({len(places)} of {len(got)} differ)"
    )
