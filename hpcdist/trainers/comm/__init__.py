"""Trainer `comm`: checks and measures the communication between ranks (`hpcdist bench comm`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hpcdist.config.removed import REMOVED_VALUES
from hpcdist.config.section import ConfigSection
from hpcdist.config.trainer_declaration import Trainer
from hpcdist.errors import suggestion

COMM_OPERATIONS = (
    *("send_recv", "isend_irecv", "all_reduce", "reduce", "broadcast", "scatter", "gather"),
    *("all_gather", "reduce_scatter", "all_to_all", "barrier"),
)
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(value: int | str) -> int:
    """Return the bytes in a number or a text such as `64K`, `256M` or `1.5 GiB` (K is 1024, with and without `iB`).

    Raises ValueError for any other value, and for less than one byte.
    """
    size = 0.0
    match = _SIZE.fullmatch(str(value).strip())
    if match is not None and not isinstance(value, bool):
        number, unit = match.groups()
        size = float(number) * _UNITS[unit.lower()]
    if size < 1 or size != int(size):
        raise ValueError(f"{value!r} is not a number of bytes: write for example 65536, 64K, 256M or 1G")
    return int(size)


@dataclass(frozen=True, kw_only=True)
class CommConfig(ConfigSection):
    """A benchmark of the collectives: correctness and speed of every operation on all ranks (`trainer: comm`)."""

    operations: list[str] = field(default_factory=lambda: [*COMM_OPERATIONS])
    """Operations to check and measure."""
    max_bytes: int | str = "256M"
    """Largest message; all powers of two from one element up are measured (K, M and G are powers of 1024)."""

    def problems(self) -> list[str]:
        """Return a message for each invalid value of this section."""
        problems: list[str] = []
        try:
            parse_bytes(self.max_bytes)
        except ValueError as error:
            problems.append(f"max_bytes: {error}")
        known = ", ".join(COMM_OPERATIONS)
        if not self.operations:
            problems.append(f"operations must name at least one of {known}")
        for name in self.operations:
            if name in COMM_OPERATIONS:
                continue
            instead = REMOVED_VALUES.get(("comm.operations", str(name)))
            if instead is not None:
                problems.append(f"operations={name} was removed: {instead}")
            else:
                hint = suggestion(str(name), COMM_OPERATIONS, f"known are {known}")
                problems.append(f"operations: {name!r} is unknown: {hint}")
        return problems


TRAINER = Trainer(section=CommConfig, is_benchmark=True)
