"""The section `elastic`: a run that may start, restart and resume on different numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcdist.config.schema.checks import at_least, check


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """`data.global_batch_size` makes a run elastic; the keys of this section determine its details."""

    min_ranks: int | None = None
    """Smallest number of ranks of the run; then fewer visible GPUs than launch.num_ranks suffice on this machine."""
    micro_batches: int | None = None
    """Equal parts of the global batch that are computed one by one; null: the largest number of ranks of the config."""
    exact: bool = False
    """Sum gradients in an order that does not depend on the number of ranks: bit-equal weights on CPUs, slower."""
    grow: Literal["restart", "never"] = "restart"
    """When nodes return to an allocation: restart on them after the next checkpoint, or only at a requeue."""

    def __post_init__(self) -> None:
        check(at_least(self, 1, "min_ranks", "micro_batches"))


def division_problems(global_batch_size: int, num_micro_batches: int) -> list[str]:
    """Return the mistake in a global batch that cannot be divided into equal micro-batches."""
    if global_batch_size % num_micro_batches == 0:
        return []
    nearest = max(1, round(global_batch_size / num_micro_batches)) * num_micro_batches
    return [
        f"data.global_batch_size={global_batch_size} cannot be divided into {num_micro_batches} equal micro-batches:"
        f" use {nearest}, or set elastic.micro_batches to a divisor that is not less than the number of ranks"
    ]
