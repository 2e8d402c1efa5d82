"""The trainer `ddp` with a record of the samples of each step; a rank can be held at a chosen moment.

`params.pace_s` is the minimum duration of a step, or a list with that of each attempt, whose last one also counts for
later attempts. The variable HOLD_AT is `moment:attempt:rank`. The rank writes `held` to the folder of the attempt and
waits for its end:

- `rendezvous`: before it meets the other ranks
- `restore`: before it reads the checkpoint
- `save`: after it has written half of the checkpoint of step 10
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Longer than a test waits for the rank.
HOLD_AT_MOST_S = 900.0


def hold(moment: str) -> None:
    """Hold this rank if its moment has come."""
    if os.environ.get("HOLD_AT") != f"{moment}:{os.environ['HPCDIST_ATTEMPT']}:{_rank()}":
        return
    attempt = Path(sys.orig_argv[-1]) / "attempts" / f"{int(os.environ['HPCDIST_ATTEMPT']):03}"
    (attempt / "held").touch()
    time.sleep(HOLD_AT_MOST_S)
    raise TimeoutError("the test did not end this rank")


def _rank() -> str:
    return os.environ.get("HPCDIST_RANK") or os.environ["SLURM_PROCID"]


hold("rendezvous")

from hpcdist.checkpoint import store  # noqa: E402
from hpcdist.config.schema import Config  # noqa: E402
from hpcdist.rank.context import Context  # noqa: E402
from hpcdist.trainers.ddp import train as ddp  # noqa: E402


def train(ctx: Context, cfg: Config) -> None:
    """Train like `ddp`, and write a line for each micro-batch: step, number, samples."""
    ask_all, batches = ctx.should_stop, ctx.elastic.micro_batches
    load, save_file = store.CheckpointStore.load, store.save_file
    paces = cfg.params["pace_s"]
    if not isinstance(paces, list):
        paces = [paces]
    pace_s = paces[min(ctx.topology.attempt, len(paces)) - 1]

    def should_stop(step: int, total_steps: int | None = None) -> bool:
        time.sleep(pace_s)
        return ask_all(step, total_steps)

    def micro_batches(model: Any, step: int, num_samples: int) -> Iterator[Any]:
        for micro in batches(model, step, num_samples):
            audit.write(json.dumps([step, micro.number, micro.indices.tolist()]) + "\n")
            yield micro

    def load_held(*args: Any, **options: Any) -> Any:
        hold("restore")
        return load(*args, **options)

    def save_half(content: Any, path: Path) -> Any:
        record = save_file(content, path)
        if "00000010" in path.parent.name:
            path.write_bytes(path.read_bytes()[: record.size_bytes // 2])
            hold("save")
        return record

    ctx.should_stop, ctx.elastic.micro_batches = should_stop, micro_batches  # type: ignore[method-assign]
    store.CheckpointStore.load = load_held  # type: ignore[method-assign]
    if os.environ.get("HOLD_AT", "").startswith(f"save:{ctx.topology.attempt}:"):
        store.save_file = save_half
    with open(ctx.run.attempt(ctx.topology.attempt).path / f"samples-{ctx.rank}.jsonl", "a", buffering=1) as audit:
        ddp.train(ctx, cfg)
