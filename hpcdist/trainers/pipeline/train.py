"""Pipeline parallelism: a ResNet split into stages, one per rank, that process the micro-batches of a step.

All ranks are stages (`roles: {stage: 2}`) and run the same loop. Stage 0 reads the images and, as rank 0, logs. The
last stage reads the labels, which follow from the epoch's order as the images do, so no label is sent. There is no
master: it would cost a process, and all tensors would pass through it.

The result is that of gradient accumulation in one process over the same micro-batches: each is normalised by its own
batch statistics, running statistics are updated once per micro-batch in order, gradients are summed in order, and all
stages step at the end. It does not depend on the split, the schedule, activation checkpointing or the number of stages
(bit by bit, if all have the same number of threads). It depends on the number of micro-batches, as normalisation does.

Steps are synchronous. In an asynchronous mode stages would work with weights of different steps, which saves the
bubble's time (logged as pipeline/bubble) at the price of stale gradients.

Source of the method: https://docs.pytorch.org/tutorials/intermediate/dist_pipeline_parallel_tutorial.html
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor, nn

from hpcdist.config.schema import Config
from hpcdist.data.loading import ImageData
from hpcdist.rank.context import Context
from hpcdist.rank.optimizer import lr_factor, set_lr
from hpcdist.rank.training_loop import Meter, run_epochs
from hpcdist.rank.training_position import TrainingPosition
from hpcdist.trainers.pipeline.schedules import ideal_bubble
from hpcdist.trainers.pipeline.schema import PipelineConfig
from hpcdist.trainers.pipeline.setup import StageSetup, build_whole_model, open_stage
from hpcdist.trainers.pipeline.stage_checkpoint import stage_shard
from hpcdist.trainers.pipeline.stages import Stage
from hpcdist.trainers.pipeline.tuning import choose_micro_batches


@dataclass(frozen=True)
class PipelineLoop:
    """State of the training loop of one stage."""

    ctx: Context
    cfg: Config
    setup: StageSetup
    num_micro_batches: int
    position: TrainingPosition
    meter: Meter


def train(ctx: Context, cfg: Config) -> None:
    """Train, evaluate after each epoch, save checkpoints and export the final model."""
    ctx.roles.require(stage=None)
    with open_stage(ctx, cfg) as setup:
        loop, data = make_loop(ctx, cfg, setup), setup.data
        ctx.end_reason = run_epochs(loop, train_epoch, interval_metrics, evaluate, save)
        whole = _gather_model(ctx, cfg, data, setup.stage) if ctx.end_reason else None
    # The export follows the end of RPC, which has a shorter time limit.
    if whole is not None:
        images, _ = next(data.test.batches(torch.arange(2), batch_size=2, device=ctx.device))
        ctx.export_model(whole, as_rgb(cfg, images))


def make_loop(ctx: Context, cfg: Config, setup: StageSetup) -> PipelineLoop:
    """Choose the number of micro-batches and the position to continue from; call it on every rank."""
    num_micro_batches = select_micro_batches(ctx, cfg, setup)
    saved, steps_per_epoch = setup.saved, len(setup.data.train) // cfg.data.batch_size
    position = TrainingPosition.resume(saved.trainer["position"] if saved else None, steps_per_epoch, cfg.stop)
    return PipelineLoop(ctx, cfg, setup, num_micro_batches, position, Meter(saved.local if saved else None, ctx.device))


def train_epoch(loop: PipelineLoop) -> Iterator[None]:
    """Do the remaining steps of the epoch with this rank's stage."""
    ctx, cfg, setup, position = loop.ctx, loop.cfg, loop.setup, loop.position
    setup.stage.train()
    for images, labels in step_batches(ctx, cfg, setup.data, epoch=position.epoch, start=position.step_in_epoch):
        set_lr(setup.optimizer, cfg.optim.lr * lr_factor(position.step, position.total_steps, cfg.schedule))
        idle_s = setup.engine.idle_s
        loss = train_step(cfg, setup, images, labels, loop.num_micro_batches)
        # The loss is that of the last stage, zero elsewhere.
        loop.meter.add(loss_sum=loss, num_steps=1, idle_s=setup.engine.idle_s - idle_s)
        yield


def interval_metrics(loop: PipelineLoop) -> dict[str, float]:
    """Return the training metrics since the last logged step, and the time that each stage has computed."""
    ctx, meter = loop.ctx, loop.meter
    elapsed_s, idle_s, num_steps = meter.elapsed_s, meter.sums["idle_s"], meter.sums["num_steps"]
    busy_s = [0.0] * ctx.world_size
    busy_s[ctx.rank] = elapsed_s - idle_s
    sums = ctx.sum_over_ranks([float(meter.sums["loss_sum"]), idle_s, elapsed_s, *busy_s])
    loss_sum, all_idle_s, all_elapsed_s, *busy_s = sums
    return {
        "train/loss": loss_sum / num_steps,
        "train/lr": loop.setup.optimizer.param_groups[0]["lr"],
        "train/epoch": loop.position.epochs,
        "train/samples_per_s": loop.cfg.data.batch_size * num_steps / elapsed_s,
        "samples": loop.position.count_samples(loop.cfg.data.batch_size * num_steps),
        "pipeline/bubble": all_idle_s / all_elapsed_s,
        "pipeline/bubble_in_theory": ideal_bubble(ctx.world_size, loop.num_micro_batches),
        **{f"pipeline/busy_s/stage_{index}": seconds / num_steps for index, seconds in enumerate(busy_s)},
    }


def save(loop: PipelineLoop, metrics: Mapping[str, float]) -> None:
    """Save a checkpoint, to which each stage adds its shard; call it on every rank."""
    loop.ctx.save(
        loop.position.step,
        model=None,
        trainer={
            "position": asdict(loop.position),
            "units": [list(names) for names in loop.setup.units],
            "num_micro_batches": loop.num_micro_batches,
        },
        local=loop.meter.sums,
        metrics=metrics,
        shard=stage_shard(loop.setup.stage, loop.setup.optimizer),
    )


def select_micro_batches(ctx: Context, cfg: Config, setup: StageSetup) -> int:
    """Return the configured number of micro-batches; for `auto` that of the checkpoint, or else the fastest."""
    number = cfg.section(PipelineConfig).num_micro_batches
    if isinstance(number, int):
        return number
    if setup.saved is not None:
        return int(setup.saved.trainer["num_micro_batches"])
    images, labels = next(step_batches(ctx, cfg, setup.data, epoch=0, start=0))
    return choose_micro_batches(ctx, setup.stage, lambda number: setup.engine.step(images, labels, number))


def step_batches(
    ctx: Context, cfg: Config, data: ImageData, *, epoch: int, start: int
) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Yield (images, labels) of each step of the epoch from `start` on: images in stage 0, labels in the last stage.

    All batches are full; the remaining samples are part of other epochs, which have another order.
    """
    size = cfg.data.batch_size
    generator = torch.Generator().manual_seed(cfg.seed + epoch)
    order = torch.randperm(len(data.train), generator=generator)[: len(data.train) // size * size]
    images = None
    if ctx.rank == 0:
        images = data.train.batches(
            order,
            batch_size=size,
            device=ctx.device,
            start_batch=start,
            epoch=epoch,
            channels_last=cfg.model.channels_last,
        )
    is_last = ctx.rank == ctx.world_size - 1
    for indices in order.split(size)[start:]:
        yield (
            None if images is None else as_rgb(cfg, next(images)[0]),
            data.train.labels[indices].to(ctx.device) if is_last else None,
        )


def as_rgb(cfg: Config, images: Tensor) -> Tensor:
    """Return images [B, 3, H, W]; a grey image becomes three equal channels."""
    if images.shape[1] == 3:
        return images
    memory_format = torch.channels_last if cfg.model.channels_last else torch.contiguous_format
    return images.expand(-1, 3, -1, -1).contiguous(memory_format=memory_format)


def train_step(
    cfg: Config, setup: StageSetup, images: Tensor | None, labels: Tensor | None, num_micro_batches: int
) -> Tensor:
    """Do one optimizer step of this stage; return the mean loss in the last stage, zero elsewhere."""
    loss = setup.engine.step(images, labels, num_micro_batches)
    if cfg.optim.max_grad_norm is not None:
        clip_gradients(setup, cfg.optim.max_grad_norm)
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    return loss


def clip_gradients(setup: StageSetup, max_norm: float) -> None:
    """Clip by the norm of the whole model's gradient, which does not depend on the split; call it on every rank."""
    gradients = [parameter.grad for parameter in setup.stage.parameters() if parameter.grad is not None]
    norms = torch.zeros(setup.num_parameters, device=gradients[0].device)
    norms[setup.parameter_slots.start : setup.parameter_slots.stop] = torch.stack(torch._foreach_norm(gradients))
    dist.all_reduce(norms)  # each element has one owner, the others add zeros
    factor = torch.clamp(max_norm / (norms.norm() + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, factor)


def evaluate(loop: PipelineLoop) -> dict[str, float]:
    """Return loss and accuracy over the test set, each sample counted once, equal on all ranks."""
    ctx, cfg, data, engine = loop.ctx, loop.cfg, loop.setup.data, loop.setup.engine
    size = cfg.data.eval_batch_size
    num_left = len(data.test)
    num_batches = math.ceil(num_left / size)
    # All batches have the same size; the samples that fill up the last one are not counted.
    indices = torch.arange(num_batches * size) % num_left

    def images() -> Iterator[Tensor | None]:
        if ctx.rank > 0:
            yield from [None] * num_batches
            return
        for batch, _ in data.test.batches(
            indices, batch_size=size, device=ctx.device, channels_last=cfg.model.channels_last
        ):
            yield as_rgb(cfg, batch)

    engine.stage.eval()
    loss_sum = torch.zeros((), device=ctx.device, dtype=torch.float64)
    num_correct = torch.zeros((), device=ctx.device, dtype=torch.int64)
    for logits, labels in zip(engine.infer(images()), data.test.labels[indices].split(size), strict=True):
        if logits is not None:
            num_counted = min(size, num_left)
            logits, labels = logits[:num_counted].float(), labels[:num_counted].to(ctx.device)
            loss_sum += F.cross_entropy(logits, labels, reduction="sum")
            num_correct += (logits.argmax(dim=1) == labels).sum()
        num_left -= size
        ctx.alive()
    engine.stage.train()
    loss, correct = ctx.sum_over_ranks([loss_sum.item(), num_correct.item()])
    return {"eval/loss": loss / len(data.test), "eval/accuracy": correct / len(data.test)}


def _gather_model(ctx: Context, cfg: Config, data: ImageData, stage: Stage) -> nn.Module | None:
    """Return the whole model on the CPU of rank 0, None elsewhere; call it on every rank."""
    parts: list[Any] = [None] * ctx.world_size
    state = {name: tensor.cpu() for name, tensor in stage.state_dict().items()}
    dist.gather_object(state, parts if ctx.is_main else None, dst=0)
    if not ctx.is_main:
        return None
    model = build_whole_model(cfg, data)
    model.load_state_dict({name: tensor for part in parts for name, tensor in part.items()})
    return model
