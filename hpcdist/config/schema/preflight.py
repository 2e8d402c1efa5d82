"""What is looked at on the machines of a run before its ranks start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """`preflight: full` is short for `preflight: {mode: full}`."""

    mode: Literal["off", "quick", "full"] = "quick"
    """How much is looked at on a run's nodes before its ranks start; runs on one machine are never looked at."""
    on_failure: Literal["stop", "exclude"] = "stop"
    """When a node fails: end the run, or queue its Slurm job again without that node."""
