"""Data whose transport and reduction can be told to be right exactly: whole numbers that depend on rank and place.

Every value, and every partial sum or product in whatever order, is exact in all dtypes that are used, so a result
is either equal or wrong.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["sum", "product", "max", "min"]
REDUCTIONS: tuple[Reduction, ...] = ("sum", "product", "max", "min")
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
#: Whole numbers up to here are exact; for all others up to more than is needed.
_EXACT = {torch.uint8: 127, torch.int8: 127, torch.bfloat16: 256, torch.float16: 2048}
_ENOUGH = 1 << 20
#: A prime, so that what lies a power of two away, as a wrong chunk does, looks different.
_PERIOD = 113
#: In no message.
NEVER = 119
#: So many ranks give a 2 at each place, the others a 1: 2³ fits everything.
_FACTORS = 3


def message(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a rank sends: values from 0 to 112, no two ranks' alike anywhere, up to 113 ranks."""
    return ((37 * rank + _steps(count)) % _PERIOD).to(dtype)


def _steps(count: int) -> Tensor:
    place = torch.arange(count)
    return 7 * place + place // _PERIOD


def contribution(reduction: Reduction, rank: int, num_ranks: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a rank gives to a reduction."""
    return _contribution(reduction, rank, num_ranks, count, dtype).to(dtype)


@functools.lru_cache(maxsize=128)
def reduced(reduction: Reduction, num_ranks: int, count: int, dtype: torch.dtype) -> Tensor:
    """What must come of all contributions; kept, since a thousand ranks' take a while and many operations need them."""
    total = _contribution(reduction, 0, num_ranks, count, dtype)
    for rank in range(1, num_ranks):
        one = _contribution(reduction, rank, num_ranks, count, dtype)
        if reduction == "sum":
            total += one
        elif reduction == "product":
            total *= one
        elif reduction == "max":
            total = torch.maximum(total, one)
        else:
            total = torch.minimum(total, one)
    return total.to(dtype)


def _contribution(reduction: Reduction, rank: int, num_ranks: int, count: int, dtype: torch.dtype) -> Tensor:
    place = torch.arange(count)
    # Multiplicative hashing: without it the ranks' values would add up to the same everywhere.
    mixed = (2_654_435_761 * (place + 1) ^ 40_503 * (rank + 1)) * 2_246_822_519 % (1 << 32) >> 13
    if reduction in ("max", "min"):
        return _steps(count) % 97 + mixed % 16
    turn = (rank + place) % num_ranks  # whose turn it is to give more than nothing changes from place to place
    if reduction == "product":
        return 1 + ((turn < _FACTORS) & (mixed % 3 > 0)).long()
    limit = _EXACT.get(dtype, _ENOUGH)
    values = min(_PERIOD, max(2, limit // num_ranks + 1))  # each gives 0 to values - 1
    return (mixed % values) * (turn < limit // (values - 1))
