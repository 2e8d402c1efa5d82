"""The section `preflight`: checks of the nodes before the ranks start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """`preflight: full` is short for `preflight: {mode: full}`."""

    mode: Literal["off", "quick", "full"] = "quick"
    """Extent of the checks of a Slurm run's nodes; runs on one machine are not checked."""
    on_failure: Literal["stop", "exclude"] = "stop"
    """Reaction to a failed node: end the run, or requeue its Slurm job without that node."""
