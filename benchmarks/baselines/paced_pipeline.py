"""Our pipeline trainer, whose steps `benchmarks/pipeline.py` asks for one by one: `trainer: paced_pipeline:train`.

Set-up and step are the trainer's own, in ranks that `hpcdist run` has started. Rank 0 reads lines from the named pipe
`params.commands` and answers each with numbers in `params.answers`:

    step N      seconds of one step in N micro-batches
    alone N     seconds that each stage takes for one of N micro-batches while the others rest
    together N  the same while all of them compute
    update      seconds of each stage's optimizer step
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context
from hpcdist.trainers.pipeline import train as pipeline
from hpcdist.trainers.pipeline.train import Meter, Training


def train(ctx: Context, cfg: Config) -> None:
    with pipeline._set_up(ctx, cfg) as (run, _, meter):
        if not ctx.is_main:
            while (command := _shared(None)) != "":
                _measure(run, meter, command)
            return
        with open(cfg.params["commands"]) as commands, open(cfg.params["answers"], "w", buffering=1) as answers:
            answers.write("ready\n")
            for line in commands:
                answers.write(" ".join(map(str, _measure(run, meter, _shared(line.strip())))) + "\n")
        _shared("")


def _shared(command: str | None) -> str:
    box = [command]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]


def _measure(run: Training, meter: Meter, command: str) -> list[float]:
    ctx = run.ctx
    what, _, number = command.partition(" ")
    ctx.barrier()
    if what == "step":
        from dataclasses import replace

        images, labels = _batch(run)
        ctx.barrier()
        began = time.perf_counter()
        pipeline._step(replace(run, num_micro_batches=int(number)), 0, images, labels, meter)
        ctx.barrier()
        return [time.perf_counter() - began]
    mine = [0.0] * ctx.world_size
    if what == "together":
        mine[ctx.rank] = _one_micro_batch(run, int(number))
    for rank in range(ctx.world_size):
        ctx.barrier()
        if rank == ctx.rank and what == "alone":
            mine[rank] = _one_micro_batch(run, int(number))
        if rank == ctx.rank and what == "update":
            mine[rank] = _update(run)
    ctx.barrier()
    return ctx.sum_over_ranks(mine)


def _batch(run: Training) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not hasattr(_batch, "found"):
        _batch.found = next(pipeline._batches(run, epoch=0, start=0))  # type: ignore[attr-defined]
    return _batch.found  # type: ignore[attr-defined, no-any-return]


def _one_micro_batch(run: Training, number: int) -> float:
    """Mean seconds, forward and backward, of as many micro-batches as a step has."""
    size = run.cfg.data.batch_size // number
    side = run.cfg.data.image_size or 0
    shape = (size, 3, side, side) if run.is_first else (size, 512, side // 8, side // 8)
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    seconds = []
    for _ in range(number + 1):
        part = x.clone().requires_grad_(not run.is_first)
        began = time.perf_counter()
        y = run.stage(part)
        y.backward(torch.ones_like(y))
        seconds.append(time.perf_counter() - began)
    run.optimizer.zero_grad()
    return sum(seconds[1:]) / number  # the first one makes the gradients that the others are added to


def _update(run: Training) -> float:
    for parameter in run.stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    began = time.perf_counter()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return time.perf_counter() - began
