"""A ResNet cut into stages (`trainer: pipeline`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.schema.checks import check


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """A ResNet cut into as many stages as `roles.stage` says, each on a rank of its own."""

    cut: list[str] = field(default_factory=list)
    """Ends of stages: `[layer2]`, `[layer1.2, layer3.0]`, `[measured]`; empty: `[layer2]` for two, else measured."""
    micro_batches: int | str = 4
    """Equal parts of a batch, each normalised by itself; `auto` measures before the first step which number is best."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of the micro-batches, equal in result; `1f1b` needs less memory."""
    activation_checkpointing: bool = False
    """Keep blocks' inputs alone and compute the rest again in the backward pass, equal in result: time for memory."""
    engine: Literal["rpc", "pipelining"] = "rpc"
    """What moves activations: `rpc`, straight from stage to stage, or torch.distributed.pipelining."""

    def __post_init__(self) -> None:
        number = self.micro_batches
        is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 1
        wrong = [] if is_number or number == "auto" else [f"micro_batches must be >= 1 or auto, got {number}"]
        check(wrong)
