"""Every operation that is checked and measured: its buffers, its call, and what must come of it on this rank.

Sizes and bandwidths are those of nccl-tests,
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: `algbw` is size / time, where the size is that of
the whole data (of all ranks' parts together where each has a part); `busbw` is algbw times `bus_factor`, which makes
it the rate of the busiest link, comparable between operations and numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.comm.patterns import NEVER, Reduction, contribution, message, reduced
from hpcdist.comm.ring import PIECE_BYTES, Ring
from hpcdist.comm.team import Team

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
Works = list[dist.Work | None]


class Operation:
    """One operation on buffers of its own.

    Args:
        count: elements of the whole data; a multiple of the group's size where it `has_parts`.
        root: number in the group of the rank that the data come from or go to.
        reduction: how values are combined, where they are.
        piece_bytes: of our ring's messages.
    """

    name: ClassVar[str]
    #: The data consist of one equal part for each rank.
    has_parts: ClassVar[bool] = False
    #: A rank may be done before others have begun, so that ranks would run away from each other.
    is_one_way: ClassVar[bool] = False
    #: The data come from one rank, or go to one.
    has_root: ClassVar[bool] = False
    #: Values are combined, so that the dtype counts; all others just move bytes.
    reduces: ClassVar[bool] = False
    #: Whether several may be under way at once.
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
        self.prepare()
        if (data := self.source()) is not None:
            data.zero_()  # stays what it is in any sum, and its pages are there

    @staticmethod
    def bus_factor(n: int) -> float | None:
        """busbw / algbw with n ranks; None where nothing is moved."""
        return 1.0

    @staticmethod
    def hops(n: int) -> int:
        """How many operations one call makes one after the other; its time is divided by it."""
        return 1

    @property
    def title(self) -> str:
        return f"{self.name}[{self.reduction}]" if self.reduces else self.name

    def prepare(self) -> None:
        """Make the buffers."""
        raise NotImplementedError

    def fill(self) -> None:
        """Write the pattern that `expected` follows from, and into the result what it must not be."""
        if (result := self.result()) is not None:
            result.fill_(NEVER)
        if (data := self.source()) is not None:
            data.copy_(self.input())

    def source(self) -> Tensor | None:
        """The buffer that this rank gives, or None."""
        raise NotImplementedError

    def input(self) -> Tensor:
        """What this rank gives, on the host."""
        return message(self.team.index, self.count, self.dtype)

    def result(self) -> Tensor | None:
        """Where the result lies after `call`, or None on ranks that get none."""
        raise NotImplementedError

    def expected(self) -> Tensor:
        """What `result` must be, on the host."""
        raise NotImplementedError

    def call(self, *, async_op: bool) -> Works:
        """Do it, or begin it and return what is to be waited for."""
        raise NotImplementedError

    def run(self) -> None:
        """Do it."""
        self.call(async_op=False)

    def empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=self.dtype, device=self.team.device)

    def parts_of(self, pattern: Callable[[int], Tensor]) -> Tensor:
        """One pattern for each rank of the group, one after the other."""
        return torch.cat([pattern(rank) for rank in range(self.team.size)])


# --- point to point


class SendRecv(Operation):
    """A message goes round all ranks with blocking calls; the time is that of one hop."""

    name, has_root, can_overlap, least_ranks = "send_recv", True, False, 2

    @staticmethod
    def hops(n: int) -> int:
        return n

    def prepare(self) -> None:
        self.data = self.empty(self.count)

    def source(self) -> Tensor | None:
        return self.data if self.is_root else None

    def result(self) -> Tensor | None:
        return self.data

    def expected(self) -> Tensor:
        return message(self.root, self.count, self.dtype)

    def call(self, *, async_op: bool) -> Works:
        right, left, group = self.team.neighbour(1), self.team.neighbour(-1), self.team.group
        if self.is_root:
            dist.send(self.data, right, group)
            dist.recv(self.data, left, group)
        else:
            dist.recv(self.data, left, group)
            dist.send(self.data, right, group)
        return []


class IsendIrecv(Operation):
    """Every rank sends to its right neighbour and receives from its left one at the same time, as in nccl-tests."""

    name, least_ranks = "isend_irecv", 2

    def prepare(self) -> None:
        self.leaving, self.arriving = self.empty(self.count), self.empty(self.count)

    def source(self) -> Tensor | None:
        return self.leaving

    def result(self) -> Tensor | None:
        return self.arriving

    def expected(self) -> Tensor:
        return message((self.team.index - 1) % self.team.size, self.count, self.dtype)

    def call(self, *, async_op: bool) -> Works:
        right, left, group = self.team.neighbour(1), self.team.neighbour(-1), self.team.group
        works: Works
        if self.team.backend == "nccl":  # which would make one wait for the other
            both = [
                dist.P2POp(dist.isend, self.leaving, right, group),
                dist.P2POp(dist.irecv, self.arriving, left, group),
            ]
            works = list(dist.batch_isend_irecv(both))
        else:
            works = [dist.irecv(self.arriving, left, group), dist.isend(self.leaving, right, group)]
        if async_op:
            return works
        wait_for(works)
        return []  # gloo never comes back from waiting twice


# --- reductions


class AllReduce(Operation):
    name, reduces = "all_reduce", True

    @staticmethod
    def bus_factor(n: int) -> float | None:
        return 2 * (n - 1) / n

    def prepare(self) -> None:
        self.data = self.empty(self.count)

    def source(self) -> Tensor | None:
        return self.data

    def input(self) -> Tensor:
        return contribution(self.reduction, self.team.index, self.team.size, self.count, self.dtype)

    def result(self) -> Tensor | None:
        return self.data

    def expected(self) -> Tensor:
        return reduced(self.reduction, self.team.size, self.count, self.dtype)

    def call(self, *, async_op: bool) -> Works:
        return [dist.all_reduce(self.data, _REDUCE_OPS[self.reduction], self.team.group, async_op=async_op)]


class RingAllReduce(AllReduce):
    """Ours, see `ring.py`."""

    name, can_overlap = "ring_all_reduce", False

    def prepare(self) -> None:
        super().prepare()
        self.ring = Ring(self.team, self.data, self.reduction, self.piece_bytes)

    def call(self, *, async_op: bool) -> Works:
        self.ring.run()
        return []


class Reduce(AllReduce):
    name, has_root, is_one_way = "reduce", True, True

    @staticmethod
    def bus_factor(n: int) -> float | None:
        return 1.0

    def result(self) -> Tensor | None:
        return self.data if self.is_root else None

    def call(self, *, async_op: bool) -> Works:
        operator, group = _REDUCE_OPS[self.reduction], self.team.group
        return [dist.reduce(self.data, self.group_root, operator, group, async_op=async_op)]


class ReduceScatter(AllReduce):
    name, has_parts = "reduce_scatter", True

    @staticmethod
    def bus_factor(n: int) -> float | None:
        return (n - 1) / n

    def prepare(self) -> None:
        self.data, self.output = self.empty(self.count), self.empty(self.part)

    def result(self) -> Tensor | None:
        return self.output

    def expected(self) -> Tensor:
        return super().expected()[self.team.index * self.part :][: self.part]

    def call(self, *, async_op: bool) -> Works:
        operator, group = _REDUCE_OPS[self.reduction], self.team.group
        return [dist.reduce_scatter_tensor(self.output, self.data, operator, group, async_op=async_op)]


# --- operations that move


class Broadcast(Operation):
    name, has_root, is_one_way = "broadcast", True, True

    def prepare(self) -> None:
        self.data = self.empty(self.count)

    def source(self) -> Tensor | None:
        return self.data if self.is_root else None

    def result(self) -> Tensor | None:
        return self.data

    def expected(self) -> Tensor:
        return message(self.root, self.count, self.dtype)

    def call(self, *, async_op: bool) -> Works:
        return [dist.broadcast(self.data, self.group_root, self.team.group, async_op=async_op)]


class Scatter(Operation):
    name, has_parts, has_root, is_one_way = "scatter", True, True, True

    @staticmethod
    def bus_factor(n: int) -> float | None:
        return (n - 1) / n

    def prepare(self) -> None:
        self.data = self.empty(self.count) if self.is_root else None
        self.output = self.empty(self.part)

    def source(self) -> Tensor | None:
        return self.data

    def input(self) -> Tensor:
        return self.parts_of(lambda rank: message(rank, self.part, self.dtype))

    def result(self) -> Tensor | None:
        return self.output

    def expected(self) -> Tensor:
        return message(self.team.index, self.part, self.dtype)

    def call(self, *, async_op: bool) -> Works:
        parts = None if self.data is None else list(self.data.chunk(self.team.size))
        return [dist.scatter(self.output, parts, self.group_root, self.team.group, async_op=async_op)]


class Gather(Operation):
    name, has_parts, has_root, is_one_way = "gather", True, True, True

    @staticmethod
    def bus_factor(n: int) -> float | None:
        return (n - 1) / n

    def prepare(self) -> None:
        self.data = self.empty(self.part)
        self.output = self.empty(self.count) if self.is_root else None

    def source(self) -> Tensor | None:
        return self.data

    def input(self) -> Tensor:
        return message(self.team.index, self.part, self.dtype)

    def result(self) -> Tensor | None:
        return self.output

    def expected(self) -> Tensor:
        return self.parts_of(lambda rank: message(rank, self.part, self.dtype))

    def call(self, *, async_op: bool) -> Works:
        parts = None if self.output is None else list(self.output.chunk(self.team.size))
        return [dist.gather(self.data, parts, self.group_root, self.team.group, async_op=async_op)]


class AllGather(Gather):
    name, has_root, is_one_way = "all_gather", False, False

    def prepare(self) -> None:
        self.data, self.output = self.empty(self.part), self.empty(self.count)

    def call(self, *, async_op: bool) -> Works:
        assert self.output is not None
        return [dist.all_gather_into_tensor(self.output, self.data, self.team.group, async_op=async_op)]


class AllToAll(Operation):
    name, has_parts = "all_to_all", True

    @staticmethod
    def bus_factor(n: int) -> float | None:
        return (n - 1) / n

    def prepare(self) -> None:
        self.data, self.output = self.empty(self.count), self.empty(self.count)

    def source(self) -> Tensor | None:
        return self.data

    def input(self) -> Tensor:
        return self.parts_of(lambda target: self._letter(self.team.index, target))

    def result(self) -> Tensor | None:
        return self.output

    def expected(self) -> Tensor:
        return self.parts_of(lambda sender: self._letter(sender, self.team.index))

    def _letter(self, sender: int, target: int) -> Tensor:
        return message(sender * self.team.size + target, self.part, self.dtype)

    def call(self, *, async_op: bool) -> Works:
        return [dist.all_to_all_single(self.output, self.data, group=self.team.group, async_op=async_op)]


class Barrier(Operation):
    """Nobody leaves before all are there. What is checked is a counter in the ranks' store, see `checking.py`."""

    name, can_overlap = "barrier", False

    @staticmethod
    def bus_factor(n: int) -> float | None:
        return None

    def prepare(self) -> None:
        pass

    def source(self) -> Tensor | None:
        return None

    def result(self) -> Tensor | None:
        return None

    def call(self, *, async_op: bool) -> Works:
        return [dist.barrier(self.team.group, async_op=async_op)]


def wait_for(works: Works) -> None:
    for work in works:
        if work is not None:
            work.wait()


#: By their names in a config.
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
