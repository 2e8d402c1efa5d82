"""Point-to-point operations and reductions, and the table of all operations."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from hpcdist.bench.data_movement import AllGather, AllToAll, Barrier, Broadcast, Gather, Scatter
from hpcdist.bench.operation import Operation, Works, wait_for
from hpcdist.bench.patterns import contribution, message, reduced
from hpcdist.bench.ring import Ring
from hpcdist.network import all_reduce_bus_factor

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


# --- point to point


class SendRecv(Operation):
    """Pass a message around the ring of all ranks with blocking calls; the time is that of one hop."""

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
    """Send to the right neighbour and receive from the left one at the same time, as in nccl-tests."""

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
        if self.team.backend == "nccl":  # NCCL would run the two calls one after the other
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
        return []  # a second wait blocks forever in gloo


# --- reductions


class AllReduce(Operation):
    name, reduces = "all_reduce", True

    @staticmethod
    def bus_factor(n: int) -> float | None:
        return all_reduce_bus_factor(n)

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
    """All-reduce implemented with isend and irecv, see `ring.py`."""

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
