"""The causes of the ledger: each second of an allocated GPU or core has exactly one of them."""

from __future__ import annotations

from typing import Literal, get_args

Cause = Literal[
    "start",
    "compile",
    "data",
    "compute",
    "communication",
    "checkpoint",
    "evaluation",
    "redone",
    "idle",
    "down",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
