"""Click logs in shares of the samples, whose number stays when a run is resumed with fewer trainers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hpcdist.errors import DataError
from hpcdist.rank.checkpointing import Restored
from hpcdist.rank.context import Context
from hpcdist.trainers.hybrid.click_logs import Clicks, SyntheticLog
from hpcdist.trainers.hybrid.schema import HybridConfig

log = logging.getLogger(__name__)


def load_clicks(cfg: HybridConfig, seed: int, *, shares: range, num_shares: int) -> tuple[Clicks, Clicks]:
    """Return the training samples and the test samples of consecutive shares.

    Training shares have equal size, so up to `num_shares` - 1 samples are left out; test shares have each test sample
    once. Raises DataError for a file that is missing, damaged or does not match the config.
    """
    if cfg.file:
        from hpcdist.trainers.hybrid.click_files import FileLog  # pyarrow takes 0.3 s

        source: FileLog | SyntheticLog = FileLog(cfg)
    else:
        source = SyntheticLog(cfg, seed)
    num_test = max(1, round(len(source) * cfg.eval_fraction))
    num_train = (len(source) - num_test) // num_shares
    if num_train < 1:
        raise DataError(
            f"{cfg.file or 'the synthetic log'} has {len(source)} samples: too few for {num_shares} trainers"
        )
    first_test = len(source) - num_test
    bounds = [first_test + num_test * number // num_shares for number in (shares.start, shares.stop)]
    return source.read(shares.start * num_train, shares.stop * num_train), source.read(bounds[0], bounds[1])


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
