"""The pipeline trainer, which executes single steps on command of `benchmarks/pipeline.py`.

Set-up and step are the trainer's own, in ranks of `hpcdist run`. Rank 0 reads commands from the named pipe
`params.commands` and writes numbers to `params.answers`:

    step N      seconds of one step with N micro-batches
    alone N     seconds of each stage for one of N micro-batches while the other stages are idle
    together N  the same while all stages compute
    update      seconds of each stage's optimizer step
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context
from hpcdist.trainers.pipeline.train import StageSetup, set_up_stage, step_batches, train_step


def train(ctx: Context, cfg: Config) -> None:
    setup = set_up_stage(ctx, cfg)
    batch = next(step_batches(ctx, cfg, setup, epoch=0, start=0))
    if not ctx.is_main:
        while (command := _broadcast(None)) != "":
            _measure(ctx, cfg, setup, batch, command)
        return
    with open(cfg.params["commands"]) as commands, open(cfg.params["answers"], "w", buffering=1) as answers:
        answers.write("ready\n")
        for line in commands:
            answers.write(" ".join(map(str, _measure(ctx, cfg, setup, batch, _broadcast(line.strip())))) + "\n")
    _broadcast("")


def _broadcast(command: str | None) -> str:
    box = [command]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]


def _measure(
    ctx: Context,
    cfg: Config,
    setup: StageSetup,
    batch: tuple[torch.Tensor | None, torch.Tensor | None],
    command: str,
) -> list[float]:
    measurement, _, number = command.partition(" ")
    ctx.groups.barrier()
    if measurement == "step":
        images, labels = batch
        ctx.groups.barrier()
        began = time.perf_counter()
        train_step(cfg, setup, images, labels, int(number))
        ctx.groups.barrier()
        return [time.perf_counter() - began]
    mine = [0.0] * ctx.world_size
    if measurement == "together":
        mine[ctx.rank] = _one_micro_batch(ctx, cfg, setup, int(number))
    for rank in range(ctx.world_size):
        ctx.groups.barrier()
        if rank == ctx.rank and measurement == "alone":
            mine[rank] = _one_micro_batch(ctx, cfg, setup, int(number))
        if rank == ctx.rank and measurement == "update":
            mine[rank] = _update(setup)
    ctx.groups.barrier()
    return ctx.groups.sum(mine)


def _one_micro_batch(ctx: Context, cfg: Config, setup: StageSetup, number: int) -> float:
    """Return the mean seconds of forward and backward pass of the micro-batches of one step."""
    size = cfg.data.batch_size // number
    side = cfg.data.image_size or 0
    shape = (size, 3, side, side) if ctx.rank == 0 else (size, 512, side // 8, side // 8)
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    seconds = []
    for _ in range(number + 1):
        part = x.clone().requires_grad_(ctx.rank > 0)
        began = time.perf_counter()
        y = setup.engine.stage(part)
        y.backward(torch.ones_like(y))
        seconds.append(time.perf_counter() - began)
    setup.optimizer.zero_grad()
    return sum(seconds[1:]) / number  # without the first one, which allocates the gradients


def _update(setup: StageSetup) -> float:
    for parameter in setup.engine.stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    began = time.perf_counter()
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    return time.perf_counter() - began
