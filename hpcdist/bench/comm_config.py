"""A communication benchmark (`trainer: comm`)."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.schema.checks import above, at_least, check

COMM_OPERATIONS = (
    "send_recv",
    "isend_irecv",
    "ring_all_reduce",
    "all_reduce",
    "reduce",
    "broadcast",
    "scatter",
    "gather",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
#: Further measurements besides the operations of all ranks.
COMM_PARTS = ("async", "groups", "pairs", "overlap", "rpc")
COMM_DTYPES = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(value: int | str) -> int:
    """Return a number of bytes from a number or a text such as `64K`, `256M` or `1.5 GiB` (K is 1024).

    Raises ValueError for any other text and for less than one byte.
    """
    found = _SIZE.fullmatch(str(value).strip())
    size = float(found[1]) * _UNITS[found[2].lower()] if found and not isinstance(value, bool) else 0.0
    if size < 1 or size != int(size):
        raise ValueError(f"{value!r} is not a number of bytes: write for example 65536, 64K, 256M or 1G")
    return int(size)


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """A benchmark of the communication between all ranks: correctness and speed of each operation."""

    operations: list[str] = field(default_factory=lambda: [*COMM_OPERATIONS, *COMM_PARTS])
    """Operations to check and measure; `async`, `groups` and `overlap` add measurements of the listed operations."""
    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    """Backend to measure; `auto` is that of the run (launch.backend); nccl uses GPU tensors, the others CPU tensors."""
    max_bytes: int | str = "256M"
    """Largest size in bytes; all powers of two from 1 on are measured (K, M and G are powers of 1024)."""
    dtypes: list[str] = field(default_factory=lambda: ["float32"])
    """Data types of reductions. Operations that only move data are measured in bytes."""
    budget_s: float = 0.02
    """Duration of the measurement of each point in seconds, but at least three iterations within longest_s."""
    longest_s: float = 1.0
    """Larger sizes of an operation are skipped if one iteration would take longer than this number of seconds."""

    def __post_init__(self) -> None:
        problems = above(self, 0, "longest_s") + at_least(self, 0, "budget_s")
        try:
            parse_bytes(self.max_bytes)
        except ValueError as error:
            problems.append(f"max_bytes: {error}")
        problems += _unknown("operations", self.operations, (*COMM_OPERATIONS, *COMM_PARTS))
        problems += _unknown("dtypes", self.dtypes, COMM_DTYPES)
        check(problems)


def _unknown(key: str, values: list[str], known: tuple[str, ...]) -> list[str]:
    if not values:
        return [f"{key} must name at least one of {', '.join(known)}"]
    problems = []
    for value in values:
        if value not in known:
            near = difflib.get_close_matches(str(value), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            problems.append(f"{key}: {value!r} is unknown: {hint}")
    return problems
