"""A stage's part of a checkpoint: weights, running statistics and optimizer states under the whole model's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpcdist.checkpoint.shards import Shard
from hpcdist.rank.checkpointing import Restored
from hpcdist.trainers.pipeline.stages import Stage


def stage_shard(stage: Stage, optimizer: torch.optim.Optimizer) -> Shard:
    """Return the shard that a stage saves."""
    names = [name for name, _ in stage.named_parameters()]
    states = optimizer.state_dict()["state"]
    return Shard(
        model=stage.state_dict(),
        trainer={"optimizer": {names[index]: state for index, state in states.items()}},
    )


def load_stage(
    stage: Stage, optimizer: torch.optim.Optimizer, saved: Restored, units: Sequence[Sequence[str]], rank: int
) -> None:
    """Load the part of a checkpoint that belongs to a stage. The checkpoint may be of other stages.

    Args:
        units: the units of every stage of this attempt.
        rank: the rank of `stage`.
    """
    is_same_split = saved.trainer["units"] == [list(names) for names in units]
    weights: dict[str, Tensor] = {}
    states: dict[str, Any] = {}
    for owner in [rank] if is_same_split else range(saved.world_size):
        shard = saved.shard(owner)
        assert shard is not None, "every stage owns parameters"
        weights |= shard["model"]
        states |= shard["trainer"]["optimizer"]
    stage.load_state_dict({name: weights[name] for name in stage.state_dict()})
    names = [name for name, _ in stage.named_parameters()]
    state_dict = optimizer.state_dict()
    state_dict["state"] = {index: states[name] for index, name in enumerate(names) if name in states}
    optimizer.load_state_dict(state_dict)
