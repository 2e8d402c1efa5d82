"""Trainer `comm`: checks and measures the communication between ranks (`hpcdist bench comm`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hpcdist.config.launch_schema import ConfigSection
from hpcdist.config.schema import Trainer
from hpcdist.errors import suggestion

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
#: Measurements besides the operations of all ranks.
COMM_PARTS = ("groups", "pairs")
#: Seconds per measurement after its warm-up; at least three iterations, if MAX_ITERATION_S allows them.
MEASURE_S = 0.02
#: Larger messages of an operation are skipped once one iteration would take longer than this.
MAX_ITERATION_S = 1.0
COMM_DTYPES = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(value: int | str) -> int:
    """Return the bytes in a number or a text such as `64K`, `256M` or `1.5 GiB` (K is 1024, with and without `iB`).

    Raises ValueError for any other value, and for less than one byte.
    """
    found = _SIZE.fullmatch(str(value).strip())
    size = float(found[1]) * _UNITS[found[2].lower()] if found and not isinstance(value, bool) else 0.0
    if size < 1 or size != int(size):
        raise ValueError(f"{value!r} is not a number of bytes: write for example 65536, 64K, 256M or 1G")
    return int(size)


@dataclass(frozen=True, kw_only=True)
class CommConfig(ConfigSection):
    """A benchmark of launch.backend: correctness and speed of every operation on all ranks (`trainer: comm`)."""

    operations: list[str] = field(default_factory=lambda: [*COMM_OPERATIONS, *COMM_PARTS])
    """Operations to check and measure; `groups`: also in groups of ranks; `pairs`: each pair of ranks."""
    max_bytes: int | str = "256M"
    """Largest message; all powers of two from 1 B up are measured (K, M and G are powers of 1024)."""
    dtypes: list[str] = field(default_factory=lambda: ["float32"])
    """Data types of reductions, each measured from one element up; other operations are measured in bytes."""

    def problems(self) -> list[str]:
        """Return the mistakes in the size, and the unknown names."""
        problems: list[str] = []
        try:
            parse_bytes(self.max_bytes)
        except ValueError as error:
            problems.append(f"max_bytes: {error}")
        problems += _unknown("operations", self.operations, (*COMM_OPERATIONS, *COMM_PARTS))
        return problems + _unknown("dtypes", self.dtypes, COMM_DTYPES)


def _unknown(key: str, values: list[str], known: tuple[str, ...]) -> list[str]:
    if not values:
        return [f"{key} must name at least one of {', '.join(known)}"]
    problems = []
    for value in values:
        if value not in known:
            hint = suggestion(str(value), known, f"known are {', '.join(known)}")
            problems.append(f"{key}: {value!r} is unknown: {hint}")
    return problems


TRAINER = Trainer(section=CommConfig, is_benchmark=True)
