"""Operations that move data without changing it, and the barrier."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from hpcdist.bench.operation import Operation, Works
from hpcdist.bench.patterns import message


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
    """Barrier of all ranks. It is checked by a counter in the store, see `correctness.py`."""

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
