"""Shipped trainers with an addition: ranks that are held at one step until a test releases them, and others.

`params` of `train`: `gated` is the trainer, ddp by default; `hold_at` is the step, in the first attempt only, or a list
with a step of each attempt; `grandchild` starts a child process of each rank; `pace_s` is the minimum duration of a
step in these attempts.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context
from hpcdist.rank.stopping import REQUEST_INTERVAL_S

#: Longer than tests wait for the last of several runs to be held.
HOLD_AT_MOST_S = 900.0


def train(ctx: Context, cfg: Config) -> None:
    """Train like the trainer; each rank that is held writes its process id to `held-<rank>`."""
    if cfg.params.get("grandchild"):
        subprocess.Popen(["sleep", "1000"])
    held_steps = cfg.params.get("hold_at")
    if not isinstance(held_steps, list):
        held_steps = [held_steps]
    if ctx.topology.attempt <= len(held_steps):
        hold_at = held_steps[ctx.topology.attempt - 1]
        ask_all = ctx.should_stop

        def should_stop(step: int, total_steps: int | None = None) -> bool:
            if step == hold_at:
                hold(ctx)
            time.sleep(cfg.params.get("pace_s", 0))
            return ask_all(step, total_steps)

        ctx.should_stop = should_stop  # type: ignore[method-assign]
    importlib.import_module(f"hpcdist.trainers.{cfg.params.get('gated', 'ddp')}.train").train(ctx, cfg)


def hold(ctx: Context) -> None:
    """Wait until `release` appears in the attempt's folder, or there is a request that `should_stop` will see.

    A request is a file, or a stop signal: with proctrack/cgroup, Slurm signals the ranks and not the supervisor.
    """
    began = time.monotonic()
    waiting = threading.Event()
    attempt = ctx.run.attempt(ctx.topology.attempt)
    partial = attempt.path / f"held-{ctx.rank}.partial"
    partial.write_text(str(os.getpid()))
    partial.rename(partial.with_suffix(""))
    while (now := time.monotonic()) < began + HOLD_AT_MOST_S:
        waiting.wait(0.01)
        if (attempt.path / "release").exists():
            return
        if ctx.roles.is_stop_signalled or (attempt.request.exists() and now > began + REQUEST_INTERVAL_S):
            return
    raise TimeoutError("the test did not release this rank")


def on_good_nodes(ctx: Context, cfg: Config) -> None:
    """Train like `ddp`; fail on nodes with the name of a file in the folder `params.broken`."""
    if (Path(cfg.params["broken"]) / socket.gethostname()).exists():
        raise RuntimeError("device lost")
    train(ctx, cfg)


def after_sum(ctx: Context, cfg: Config) -> None:
    """All-reduce a vector that is long enough to be sent in several pieces, then train like `ddp`."""
    indices = torch.arange(10_000, dtype=torch.float64)
    result = indices + ctx.rank
    dist.all_reduce(result)
    expected = ctx.world_size * indices + ctx.world_size * (ctx.world_size - 1) / 2
    assert torch.equal(result, expected), f"rank {ctx.rank}: {result[:3].tolist()}, not {expected[:3].tolist()}"
    ctx.log({"check/sum": float(result[0])}, 0)
    train(ctx, cfg)
