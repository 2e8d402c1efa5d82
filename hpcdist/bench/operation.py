"""Interface of an operation that is checked and measured: buffers, call, and expected result on this rank.

Sizes and bandwidths are defined as in nccl-tests,
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: `algbw` is size / time, with the size of all data
(the parts of all ranks together). `busbw` is `algbw` times `bus_factor`, the rate of the busiest link, which can be
compared between operations and world sizes.
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
    """One operation with its buffers.

    Args:
        team: the group of this rank.
        count: number of elements of all data; a multiple of the group's size if the operation `has_parts`.
        dtype: data type of the elements.
        root: index in the group of the rank that sends or receives all data.
        reduction: operator of a reduction.
        piece_bytes: message size of hpcdist's ring all-reduce.
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
        self.prepare()
        if (data := self.source()) is not None:
            data.zero_()  # zeros do not overflow in repeated sums; writing also allocates the pages

    @staticmethod
    def bus_factor(n: int) -> float | None:
        """Return busbw / algbw for n ranks; None if no data is moved."""
        return 1.0

    @staticmethod
    def hops(n: int) -> int:
        """Return the number of consecutive operations in one call, by which its time is divided."""
        return 1

    @property
    def title(self) -> str:
        return f"{self.name}[{self.reduction}]" if self.reduces else self.name

    def prepare(self) -> None:
        """Allocate the buffers."""
        raise NotImplementedError

    def fill(self) -> None:
        """Write the input pattern, and overwrite the result with values that no correct result contains."""
        if (result := self.result()) is not None:
            result.fill_(NEVER)
        if (data := self.source()) is not None:
            data.copy_(self.input())

    def source(self) -> Tensor | None:
        """Return the input buffer of this rank, or None."""
        raise NotImplementedError

    def input(self) -> Tensor:
        """Return the input of this rank, on the CPU."""
        return message(self.team.index, self.count, self.dtype)

    def result(self) -> Tensor | None:
        """Return the output buffer, or None on ranks without a result."""
        raise NotImplementedError

    def expected(self) -> Tensor:
        """Return the expected result, on the CPU."""
        raise NotImplementedError

    def call(self, *, async_op: bool) -> Works:
        """Run the operation, or start it and return the work to wait for."""
        raise NotImplementedError

    def run(self) -> None:
        """Run the operation and wait for it."""
        self.call(async_op=False)

    def empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=self.dtype, device=self.team.device)

    def parts_of(self, pattern: Callable[[int], Tensor]) -> Tensor:
        """Concatenate the patterns of all ranks of the group."""
        return torch.cat([pattern(rank) for rank in range(self.team.size)])


def wait_for(works: Works) -> None:
    for work in works:
        if work is not None:
            work.wait()
