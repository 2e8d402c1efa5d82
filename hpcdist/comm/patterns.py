"""Data whose transport and reduction can be told to be right exactly: whole numbers that depend on rank and place.

Every value, and every partial sum or product in whatever order, is exact in all dtypes that are used, so a result
is either equal or wrong.
"""

from __future__ import annotations

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


def _mixed(rank: int, count: int) -> Tensor:
    """A number for each place, int64; neighbours in rank and place differ."""
    place = torch.arange(count)
    return 37 * rank + 7 * place + place // _PERIOD


def message(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a rank sends: values from 0 to 112."""
    return (_mixed(rank, count) % _PERIOD).to(dtype)


def contribution(reduction: Reduction, rank: int, num_ranks: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a rank gives to a reduction."""
    return _contribution(reduction, rank, num_ranks, count, dtype).to(dtype)


def reduced(reduction: Reduction, num_ranks: int, count: int, dtype: torch.dtype) -> Tensor:
    """What must come of all contributions."""
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
    mixed = _mixed(rank, count)
    if reduction in ("max", "min"):
        return mixed % _PERIOD
    turn = (rank + torch.arange(count)) % num_ranks  # whose turn it is changes from place to place
    if reduction == "product":
        return 1 + ((turn < _FACTORS) & (mixed % 3 > 0)).long()
    limit = _EXACT.get(dtype, _ENOUGH)
    values = min(_PERIOD, max(2, limit // num_ranks + 1))  # each gives 0 to values - 1
    return (mixed % values) * (turn < limit // (values - 1))
