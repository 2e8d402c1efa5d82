"""The operations: point-to-point messages, data movement, reductions and the barrier."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from hpcdist.bench.operation import Operation, Works, wait_for
from hpcdist.bench.patterns import contribution, message, reduced
from hpcdist.bench.ring import Ring

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
    """Barrier of all ranks. It is checked by a counter in the store, see `correctness.py`."""

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
    """All-reduce implemented with isend and irecv, see `ring.py`."""

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
