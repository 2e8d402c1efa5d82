"""Base class of the operations that are checked and measured: buffers, call and expected result on this rank.

The size of an operation is that of all data, the parts of all ranks together, as in nccl-tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.bench.groups import Team
from hpcdist.bench.patterns import NEVER, Reduction, message
from hpcdist.bench.ring import PIECE_BYTES

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
