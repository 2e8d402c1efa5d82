"""Shares of the samples, whose number stays when a run is resumed with fewer trainers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hpcdist.rank.checkpointing import Restored
from hpcdist.rank.context import Context

log = logging.getLogger(__name__)


def num_shares_of(saved: Restored | None, num_trainers: int) -> int:
    """Return the number of shares of the samples: that of the checkpoint, unless there are more trainers."""
    num_shares = num_trainers if saved is None else int(saved.trainer.get("num_shares", num_trainers))
    if num_trainers <= num_shares:
        return num_shares
    log.warning(
        "%d trainers continue a run with %d shares of the samples, which are divided anew: sample order and joint batch"
        " differ from here on",
        num_trainers,
        num_shares,
    )
    return num_trainers


def saved_sums(ctx: Context, saved: Restored | None) -> Mapping[str, Any] | None:
    """Return the sums of this trainer's meter; after a change of their number, trainer 0 has those of all trainers."""
    if saved is None or saved.local is not None or not ctx.is_main:
        return saved.local if saved is not None else None
    whole: dict[str, Any] = {}
    for sums in saved.local_by_rank[: saved.trainer.get("num_trainers", 0)]:
        for name, value in (sums or {}).items():
            whole[name] = whole.get(name, 0.0) + value
    return whole
