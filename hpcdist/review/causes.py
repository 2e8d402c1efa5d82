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
#: One line for each cause; docs/concepts/ledger.md has the whole definitions.
MEANINGS: dict[Cause, str] = {
    "start": "from the allocation to the first step: preflight, imports, connection of the ranks, restore",
    "compile": "the first step of each attempt",
    "data": "waiting for the next batch",
    "compute": "training steps, or the whole running time of a script that reports none",
    "communication": "waiting for other ranks in training steps",
    "checkpoint": "training blocked by saves, and export of the model",
    "evaluation": "evaluation",
    "redone": "steps that were lost and done again",
    "idle": "ranks without work, after attempts that did not fail, and the end of the job",
    "down": "no running ranks after a failure",
}
