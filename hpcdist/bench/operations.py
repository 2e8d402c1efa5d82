"""The operations that are checked and measured: test data, groups of ranks, buffers, calls and expected results."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.errors import ConfigError
from hpcdist.rank.collective_check import largest_exact

# Test data for exact checks of transport and reduction: whole numbers that depend on rank and index.
#
# All values, and all partial sums and products in any order, are exact in all dtypes, so that results can be compared
# without a tolerance.

Reduction = Literal["sum", "product", "max", "min"]
REDUCTIONS: tuple[Reduction, ...] = ("sum", "product", "max", "min")
COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
DTYPES = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
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


def contribution(reduction: Reduction, rank: int, num_ranks: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the contribution of a rank to a reduction."""
    return _contribution(reduction, rank, num_ranks, count, dtype).to(dtype)


@functools.lru_cache(maxsize=128)
def reduced(reduction: Reduction, num_ranks: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the result of a reduction; cached, because it is slow for a thousand ranks and used by many operations."""
    given = (_contribution(reduction, rank, num_ranks, count, dtype) for rank in range(num_ranks))
    return functools.reduce(COMBINE[reduction], given).to(dtype)


def _contribution(reduction: Reduction, rank: int, num_ranks: int, count: int, dtype: torch.dtype) -> Tensor:
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


# Groups of ranks: all ranks, and partitions of them into groups that communicate at the same time.

WORLD = "world"


@dataclass(frozen=True, kw_only=True)
class Team:
    """The group of this rank in one partition of all ranks.

    Attributes:
        name: name of the partition, such as `world` or `halves`; its groups communicate at the same time.
        ranks: global ranks of this group.
        largest: number of ranks in the largest group of the partition.
        group: the process group; None if this rank is alone in its group.
        device: device of the tensors.
        backend: backend of the process group.
    """

    name: str
    ranks: tuple[int, ...]
    largest: int
    group: dist.ProcessGroup | None
    device: torch.device
    backend: str

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """Index of this rank in its group."""
        return self.ranks.index(dist.get_rank())

    def neighbour(self, steps: int) -> int:
        """Return the global rank that is `steps` positions to the right in the ring of the group."""
        return self.ranks[(self.index + steps) % self.size]


def cuts(nodes: Sequence[str]) -> dict[str, list[list[int]]]:
    """Return partitions of all ranks by name. Each has at least two groups, and each rank is in exactly one group.

    Args:
        nodes: node name by rank.
    """
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


def choose_backend(wanted: str, device: torch.device) -> tuple[str, torch.device]:
    """Return the backend to measure and the device of its tensors: this rank's device for NCCL, otherwise the CPU.

    Args:
        wanted: name of the backend, or `auto` for that of the default group.
        device: device of this rank.

    Raises ConfigError if the backend is not available.
    """
    backend = dist.get_backend() if wanted == "auto" else wanted
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError(["comm.backend=nccl needs GPUs, and none is visible here: use comm.backend=gloo"])
    if backend == "mpi" and not dist.is_mpi_available():
        raise ConfigError(
            ["comm.backend=mpi needs a torch that was built with MPI, and this one was not: use comm.backend=gloo"]
        )
    return backend, device if backend == "nccl" else torch.device("cpu")


def make_teams(
    nodes: Sequence[str], backend: str, device: torch.device, timeout: timedelta, *, with_groups: bool
) -> dict[str, Team]:
    """Create the process groups and return this rank's team of each partition. Call it on every rank.

    Raises ConfigError if MPI has a different number of ranks.
    """
    rank, everyone = dist.get_rank(), list(range(len(nodes)))

    def make(ranks: list[int]) -> dist.ProcessGroup | None:
        # `new_group` must be called on every rank for every group.
        made = dist.new_group(ranks, backend=backend, timeout=timeout)
        return made if isinstance(made, dist.ProcessGroup) else None

    world = dist.group.WORLD if dist.get_backend() == backend else make(everyone)
    if backend == "mpi" and dist.get_world_size(world) != len(everyone):
        raise ConfigError(
            [
                f"comm.backend=mpi: MPI sees {dist.get_world_size(world)} of {len(everyone)} ranks: submit the run to"
                " a Slurm whose srun starts MPI programs (srun --mpi=list), or use comm.backend=gloo"
            ]
        )
    teams = {}
    for name, groups in ({WORLD: [everyone]} | (cuts(nodes) if with_groups else {})).items():
        made = [world if name == WORLD else (make(ranks) if len(ranks) > 1 else None) for ranks in groups]
        mine = next(index for index, ranks in enumerate(groups) if rank in ranks)
        teams[name] = Team(
            name=name,
            ranks=tuple(groups[mine]),
            largest=max(map(len, groups)),
            group=made[mine],
            device=device,
            backend=backend,
        )
    return teams


# Ring all-reduce implemented with isend and irecv.
#
# The data of each rank is divided into one segment for each rank. In the reduce-scatter phase the segments circulate
# and each rank adds its own values, so that after n - 1 steps each rank holds the sum of one segment. In the all-gather
# phase the sums circulate. Each rank sends 2 (n - 1) / n of the data, the minimum. Reference: Patarasuk and Yuan,
# https://doi.org/10.1016/j.jpdc.2008.09.002.
#
# Segments are sent in pieces. A rank forwards a piece as soon as it is reduced, independently of the steps of other
# ranks, so that computation and communication overlap. Each segment is reduced in one order and then copied, so all
# ranks have bit-identical results.

#: Large enough to make the cost per message small, small enough to overlap the reduction of one piece with the sending
#: of the next. With four ranks on two cores, 256 KiB needed 25 % more processor time.
PIECE_BYTES = 1 << 20
#: Number of receives that are posted in advance.
AHEAD = 4


@dataclass(frozen=True)
class _Arrival:
    """A piece received from the left neighbour."""

    data: Tensor  #: its destination
    is_partial: bool  #: whether it is combined with the destination, otherwise it replaces it
    goes_on: bool  #: whether it is forwarded to the right neighbour


class Ring:
    """In-place all-reduce of one flat tensor; `run` may be called repeatedly.

    Args:
        team: the group of this rank.
        data: contiguous tensor of one dimension and any length, also shorter than the ring.
        reduction: operator of the reduction.
        piece_bytes: size of a message, for backends with simultaneous messages.
    """

    def __init__(self, team: Team, data: Tensor, reduction: Reduction, piece_bytes: int = PIECE_BYTES) -> None:
        self._team, self._combine = team, COMBINE[reduction]
        n, me = team.size, team.index
        ends = [len(data) * i // n for i in range(n + 1)]
        self._segments = [data[ends[i] : ends[i + 1]] for i in range(n)]
        piece = max(1, piece_bytes // data.element_size())
        pieces = [segment.split(piece) if len(segment) else () for segment in self._segments]
        self._first = pieces[me]
        self._arrivals = [
            *(_Arrival(one, is_partial=True, goes_on=True) for s in range(n - 1) for one in pieces[(me - s - 1) % n]),
            *(_Arrival(one, is_partial=False, goes_on=s < n - 2) for s in range(n - 1) for one in pieces[(me - s) % n]),
        ]
        longest = max(len(segment) for segment in self._segments)
        in_steps = team.backend == "nccl"
        length, number = (longest, 1) if in_steps else (min(longest, piece), AHEAD)
        self._buffers = [data.new_empty(length) for _ in range(number)]
        self._run = self._run_in_steps if in_steps else self._run_in_pieces

    def run(self) -> None:
        """Reduce the data over all ranks, in place."""
        if self._team.size > 1:
            self._run()

    def _run_in_pieces(self) -> None:
        right, left, group = self._team.neighbour(1), self._team.neighbour(-1), self._team.group
        sent: dict[int, dist.Work] = {}  # by address
        posted: list[tuple[dist.Work, Tensor]] = []

        def send(data: Tensor) -> None:
            sent[data.data_ptr()] = _begun(dist.isend(data, right, group))

        for data in self._first:
            send(data)
        for done, arrival in enumerate(self._arrivals):
            while len(posted) < min(done + AHEAD, len(self._arrivals)):
                coming = self._arrivals[len(posted)]
                into = coming.data
                if coming.is_partial:
                    into = self._buffers[len(posted) % AHEAD][: len(into)]
                elif into.data_ptr() in sent:
                    sent.pop(into.data_ptr()).wait()  # the destination must have been sent before it is overwritten
                else:
                    break  # its sending has not started
                posted.append((_begun(dist.irecv(into, left, group)), into))
            work, arrived = posted[done]
            work.wait()
            if arrival.is_partial:
                self._combine(arrival.data, arrived, out=arrival.data)
            if arrival.goes_on:
                send(arrival.data)
        for work in sent.values():
            work.wait()

    def _run_in_steps(self) -> None:
        """Send and receive one message at a time in a batch, because NCCL runs messages on a stream one by one."""
        n, me = self._team.size, self._team.index
        for s in range(n - 1):
            mine = self._segments[(me - s - 1) % n]
            arrived = self._buffers[0][: len(mine)]
            self._exchange(self._segments[(me - s) % n], arrived)
            self._combine(mine, arrived, out=mine)
        for s in range(n - 1):
            self._exchange(self._segments[(me + 1 - s) % n], self._segments[(me - s) % n])

    def _exchange(self, leaving: Tensor, arriving: Tensor) -> None:
        right, left, group = self._team.neighbour(1), self._team.neighbour(-1), self._team.group
        both = [dist.P2POp(dist.isend, leaving, right, group), dist.P2POp(dist.irecv, arriving, left, group)]
        if both := [one for one in both if len(one.tensor)]:
            for work in dist.batch_isend_irecv(both):
                work.wait()


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


# Base class of the operations that are checked and measured: buffers, call and expected result on this rank.
#
# The size of an operation is that of all data, the parts of all ranks together, as in nccl-tests.

Works = list[dist.Work | None]


class Operation(ABC):
    """One operation with its buffers.

    Args:
        team: the group of this rank.
        count: number of elements of all data; a multiple of the group's size if the operation `has_parts`.
        dtype: data type of the elements.
        root: index in the group of the rank that sends or receives all data.
        reduction: operator of a reduction.
        piece_bytes: message size of hpcdist's ring all-reduce.

    Attributes:
        source: input buffer, empty on ranks without input.
        result: output buffer, empty on ranks without a result; may be the input buffer.
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
    #: Whether several calls may be in progress at the same time.
    can_overlap: ClassVar[bool] = True
    least_ranks: ClassVar[int] = 1

    def __init__(
        self,
        team: Team,
        count: int,
        dtype: torch.dtype,
        *,
        root: int = 0,
        reduction: Reduction = "sum",
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.team, self.count, self.dtype, self.root = team, count, dtype, root
        self.reduction, self.piece_bytes = reduction, piece_bytes
        self.part = count // team.size
        self.is_root = team.index == root
        self.group_root = team.ranks[root]
        self.source, self.result = self.buffers()
        self.source.zero_()  # zeros do not overflow in repeated sums; writing also allocates the pages

    @staticmethod
    def hops(n: int) -> int:
        """Return the number of consecutive operations in one call, by which its time is divided."""
        return 1

    @property
    def title(self) -> str:
        """Name in reports, with the reduction if there is one."""
        return f"{self.name}[{self.reduction}]" if self.reduces else self.name

    @abstractmethod
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Allocate and return `source` and `result`."""

    @abstractmethod
    def call(self, *, async_op: bool) -> Works:
        """Run the operation, or start it and return the work to wait for."""

    def input(self) -> Tensor:
        """Return the input of this rank, on the CPU."""
        return message(self.team.index, self.count, self.dtype)

    def expected(self) -> Tensor:
        """Return the expected result, on the CPU."""
        return message(self.root, self.count, self.dtype)

    def fill(self) -> None:
        """Overwrite the result with values that no correct result contains, and write the input pattern."""
        self.result.fill_(NEVER)
        if len(self.source):
            self.source.copy_(self.input())

    def run(self) -> None:
        """Run the operation and wait for it."""
        self.call(async_op=False)

    def empty(self, count: int) -> Tensor:
        """Return a buffer of `count` elements on the team's device."""
        return torch.empty(count, dtype=self.dtype, device=self.team.device)

    def parts_of(self, pattern: Callable[[int], Tensor]) -> Tensor:
        """Concatenate the patterns of all ranks of the group."""
        return torch.cat([pattern(rank) for rank in range(self.team.size)])


def wait_for(works: Works) -> None:
    """Wait until all of the operations have ended; None stands for one that had nothing to do."""
    for work in works:
        if work is not None:
            work.wait()


def run_together(operations: Sequence[Operation]) -> None:
    """Run one operation, or several at the same time; nothing on a rank without operations."""
    if len(operations) == 1:
        operations[0].run()
    else:
        wait_for([work for operation in operations for work in operation.call(async_op=True)])


# The operations: point-to-point messages, data movement, reductions and the barrier.

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


# --- data movement


class Broadcast(Operation):
    name, has_root, is_one_way = "broadcast", True, True

    def buffers(self) -> tuple[Tensor, Tensor]:
        data = self.empty(self.count)
        return data if self.is_root else data[:0], data

    def call(self, *, async_op: bool) -> Works:
        return [dist.broadcast(self.result, self.group_root, self.team.group, async_op=async_op)]


class SendRecv(Broadcast):
    """Pass a message around the ring of all ranks with blocking calls; the time is that of one hop."""

    name, is_one_way, can_overlap, least_ranks = "send_recv", False, False, 2

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
        works: Works
        if self.team.backend == "nccl":  # NCCL would run the two calls one after the other
            both = [dist.P2POp(dist.isend, self.source, right, group), dist.P2POp(dist.irecv, self.result, left, group)]
            works = list(dist.batch_isend_irecv(both))
        else:
            works = [dist.irecv(self.result, left, group), dist.isend(self.source, right, group)]
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
    """Barrier of all ranks. It is checked by a counter in the store, see `bench/measurement_plan.py`."""

    name, can_overlap = "barrier", False

    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.empty(0), self.empty(0)

    def call(self, *, async_op: bool) -> Works:
        return [dist.barrier(self.team.group, async_op=async_op)]


# --- reductions


class AllReduce(Operation):
    name, reduces = "all_reduce", True

    def buffers(self) -> tuple[Tensor, Tensor]:
        data = self.empty(self.count)
        return data, data

    def input(self) -> Tensor:
        return contribution(self.reduction, self.team.index, self.team.size, self.count, self.dtype)

    def expected(self) -> Tensor:
        return reduced(self.reduction, self.team.size, self.count, self.dtype)

    def call(self, *, async_op: bool) -> Works:
        return [dist.all_reduce(self.source, _REDUCE_OPS[self.reduction], self.team.group, async_op=async_op)]


class RingAllReduce(AllReduce):
    """All-reduce implemented with isend and irecv."""

    name, can_overlap = "ring_all_reduce", False

    def buffers(self) -> tuple[Tensor, Tensor]:
        data = self.empty(self.count)
        self._ring = Ring(self.team, data, self.reduction, self.piece_bytes)
        return data, data

    def call(self, *, async_op: bool) -> Works:
        self._ring.run()
        return []


class Reduce(AllReduce):
    name, has_root, is_one_way = "reduce", True, True

    def buffers(self) -> tuple[Tensor, Tensor]:
        data = self.empty(self.count)
        return data, data if self.is_root else data[:0]

    def call(self, *, async_op: bool) -> Works:
        operator, group = _REDUCE_OPS[self.reduction], self.team.group
        return [dist.reduce(self.source, self.group_root, operator, group, async_op=async_op)]


class ReduceScatter(AllReduce):
    name, has_parts = "reduce_scatter", True

    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.empty(self.count), self.empty(self.part)

    def expected(self) -> Tensor:
        return super().expected()[self.team.index * self.part :][: self.part]

    def call(self, *, async_op: bool) -> Works:
        operator, group = _REDUCE_OPS[self.reduction], self.team.group
        return [dist.reduce_scatter_tensor(self.result, self.source, operator, group, async_op=async_op)]


#: All operations by their names in a config.
OPERATIONS: dict[str, type[Operation]] = {
    kind.name: kind
    for kind in (
        SendRecv,
        IsendIrecv,
        RingAllReduce,
        AllReduce,
        Reduce,
        Broadcast,
        Scatter,
        Gather,
        AllGather,
        ReduceScatter,
        AllToAll,
        Barrier,
    )
}
