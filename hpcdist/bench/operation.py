"""What every operation that is checked and measured has: its buffers, its call, and what must come of it on this rank.

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

from hpcdist.bench.groups import Team
from hpcdist.bench.patterns import NEVER, Reduction, message
from hpcdist.bench.ring import PIECE_BYTES

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


def wait_for(works: Works) -> None:
    for work in works:
        if work is not None:
            work.wait()
