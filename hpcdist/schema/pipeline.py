"""A ResNet cut into stages (`trainer: pipeline`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcdist.schema.checks import check


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """A ResNet cut into as many stages as `roles.stage` says, each on a rank of its own."""

    cut: list[str] = field(default_factory=list)
    """What each stage but the last ends with, `[layer2]` or `[layer1.2, layer3.0]`; empty: two stages are cut after
    layer2, more of them by what each block is measured to take. The result is the same wherever the cuts are."""
    micro_batches: int | str = 4
    """Into how many equal parts a batch is cut. Each is normalised by itself, as a batch of its own would be, so the
    number counts for the result. `auto` tries 1, 2, 4, … before the first step, without training, and takes the
    fastest; a resumed run keeps it, but the same run started anew may choose another one."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of the micro-batches; `1f1b` needs less memory, the result is the same."""
    activation_checkpointing: bool = False
    """Keep the blocks' inputs alone for the backward pass and compute the rest again: a third more work, less memory.
    The result is the same."""
    engine: Literal["rpc", "pipelining"] = "rpc"
    """What moves activations: `rpc`, straight from stage to stage, or torch.distributed.pipelining, with the same
    stages over the process group."""

    def __post_init__(self) -> None:
        number = self.micro_batches
        is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 1
        wrong = [] if is_number or number == "auto" else [f"micro_batches must be >= 1 or auto, got {number}"]
        check(wrong)
