"""Test data for exact checks of transport and reduction: whole numbers that depend on rank and index.

All values, and all partial sums and products in any order, are exact in all dtypes, so that results can be compared
without a tolerance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from hpcdist.rank.collective_check import largest_exact

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
