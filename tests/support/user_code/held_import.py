"""A trainer that holds the ranks of the first attempt during its import, before the process group exists."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

HOLD_AT_MOST_S = 600.0


def _hold() -> None:
    attempt = Path(sys.orig_argv[-1]) / "attempts" / "001"
    (attempt / f"held-{os.environ['SLURM_PROCID']}").write_text(str(os.getpid()))
    end = time.monotonic() + HOLD_AT_MOST_S
    while not (attempt / "release").exists():
        if time.monotonic() > end:
            raise TimeoutError("the test did not release this rank")
        time.sleep(0.01)


if os.environ["HPCDIST_ATTEMPT"] == "1":
    _hold()


def train(ctx: Any, cfg: Any) -> None:
    """Train like `ddp`."""
    from hpcdist.trainers.ddp import train as ddp

    ddp.train(ctx, cfg)
