"""The config section of trainer `pipeline`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.schema.checks import check


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """A ResNet split into `roles.stage` stages, each on its own rank (`trainer: pipeline`)."""

    split_points: list[str] = field(default_factory=list)
    """Last units of the stages: `[layer1.2, layer3.0]`, or `[measured]`; empty: `[layer2]` for two, else measured."""
    num_micro_batches: int | str = 4
    """Equal parts of a batch, each with its own batch statistics; `auto` measures the fastest number at the start."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of the micro-batches; the results are equal, and `1f1b` needs less memory."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time, equal results."""

    def __post_init__(self) -> None:
        number = self.num_micro_batches
        is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 1
        check([] if is_number or number == "auto" else [f"num_micro_batches must be >= 1 or auto, got {number}"])
