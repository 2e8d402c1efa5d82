"""Image classification with DistributedDataParallel: each rank trains the whole model on its share of the data.

Source of the method: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from hpcdist.config.schema import Config
from hpcdist.data.download import prepare
from hpcdist.data.loading import Batch, ImageData, eval_indices, load_datasets, log_image_data
from hpcdist.data.models import build_model
from hpcdist.rank.checkpointing import Restored
from hpcdist.rank.context import Context
from hpcdist.rank.training_loop import (
    Meter,
    TrainingPosition,
    build_optimizer,
    lr_factor,
    run_epochs,
    set_lr,
    settle_buckets,
)
from hpcdist.review.figures import MAX_CLASSES, Matrix

# Figures of trainer `ddp` in the report of a run.


def confusion_matrix(counts: Sequence[float], class_names: Sequence[str] = ()) -> Matrix:
    """Return the confusion matrix of the test set.

    Args:
        counts: numbers of samples by true and predicted class, row by row, [num_classes × num_classes].
        class_names: names of the classes; their numbers by default.
    """
    size = math.isqrt(len(counts))
    return Matrix(
        title="confusion matrix of the test set",
        row_label="true class",
        column_label="predicted class",
        names=list(class_names) or [str(index) for index in range(size)],
        values=[list(counts[row * size : (row + 1) * size]) for row in range(size)],
    )


@dataclass(frozen=True)
class DdpLoop:
    """State of the training loop of one rank."""

    ctx: Context
    cfg: Config
    data: ImageData
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    position: TrainingPosition
    meter: Meter


def train(ctx: Context, cfg: Config) -> None:
    """Train, evaluate after each epoch, save checkpoints and export the final model."""
    loop = make_loop(ctx, cfg)
    ctx.end_reason = run_epochs(
        loop, train_epoch, interval_metrics, lambda _: evaluate(ctx, loop.model.module, loop.data, cfg), save
    )
    if ctx.end_reason:
        example, _ = next(loop.data.test.batches(torch.arange(2), batch_size=2, device=ctx.device))
        ctx.export_model(loop.model.module, example)


def make_loop(ctx: Context, cfg: Config) -> DdpLoop:
    """Load the dataset, build model and optimizer, and restore the newest checkpoint; call it on every rank."""
    if ctx.topology.local_rank == 0:
        prepare(cfg.data)
    ctx.barrier()  # the other ranks of the node wait for the download
    data = load_datasets(cfg.data, cfg.seed)
    log_image_data(ctx, cfg.data, data, cfg.seed)
    model = build_ddp_model(ctx, cfg, data)
    optimizer = build_optimizer(model.parameters(), cfg.optim)
    scaler = torch.amp.GradScaler(ctx.device.type, enabled=cfg.precision.dtype == "fp16")
    saved = ctx.restore()
    if saved is not None:
        model.module.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.trainer["optimizer"])
        scaler.load_state_dict(saved.trainer["scaler"])
    if cfg.data.global_batch_size is None:
        batches_per_epoch = math.ceil(math.ceil(len(data.train) / ctx.world_size) / cfg.data.batch_size)
        steps_per_epoch = math.ceil(batches_per_epoch / cfg.optim.grad_accum_steps)
    else:
        steps_per_epoch = ctx.division(len(data.train)).steps_per_epoch
    position = TrainingPosition.resume(saved.trainer["position"] if saved else None, steps_per_epoch, cfg.stop)
    meter = Meter(saved_sums(ctx, cfg, saved), ctx.device)
    return DdpLoop(ctx, cfg, data, model, optimizer, scaler, position, meter)


def train_epoch(loop: DdpLoop) -> Iterator[None]:
    """Do the remaining steps of the epoch."""
    ctx, cfg, position, optimizer = loop.ctx, loop.cfg, loop.position, loop.optimizer
    loop.model.train()
    if cfg.data.global_batch_size is not None:
        yield from train_elastic_epoch(loop)
        return
    batches = loop.data.train.batches(
        epoch_indices(ctx, cfg, loop.data, position.epoch),
        batch_size=cfg.data.batch_size,
        device=ctx.device,
        start_batch=position.step_in_epoch * cfg.optim.grad_accum_steps,
        epoch=position.epoch,
        channels_last=cfg.model.channels_last,
    )
    for micro_batches in grouped(batches, cfg.optim.grad_accum_steps):
        set_lr(optimizer, cfg.optim.lr * lr_factor(position.step, position.total_steps, cfg.schedule))
        loss = train_step(ctx, cfg, loop.model, optimizer, loop.scaler, micro_batches)
        loop.meter.add(loss_sum=loss, num_steps=1, num_samples=sum(len(labels) for _, labels in micro_batches))
        yield


def train_elastic_epoch(loop: DdpLoop) -> Iterator[None]:
    """Do the remaining steps of the epoch, each with this rank's micro-batches of a global batch."""
    ctx, cfg, position, optimizer = loop.ctx, loop.cfg, loop.position, loop.optimizer
    division = ctx.division(len(loop.data.train))
    samples = division.rank_samples(position.epoch, position.step_in_epoch)
    batches = loop.data.train.batches(
        torch.cat(samples) if samples else torch.empty(0, dtype=torch.int64),
        batch_size=[len(part) for part in samples],
        device=ctx.device,
        epoch=position.epoch,
        channels_last=cfg.model.channels_last,
    )
    # A scaler has no scale before its first call, and a rank without samples in its first step makes none.
    loop.scaler.scale(torch.zeros((), device=ctx.device))
    for _ in range(position.step_in_epoch, division.steps_per_epoch):
        set_lr(optimizer, cfg.optim.lr * lr_factor(position.step, position.total_steps, cfg.schedule))
        loss_sum = torch.zeros((), device=ctx.device, dtype=torch.float64)
        num_samples = 0
        for micro in ctx.micro_batches(loop.model, position.step, len(loop.data.train)):
            images, labels = next(batches)
            with autocast(ctx, cfg):
                loss = F.cross_entropy(loop.model(images), labels) * micro.weight
            loop.scaler.scale(loss).backward()
            loss_sum += loss.detach()
            num_samples += len(labels)
        update(cfg, loop.model, optimizer, loop.scaler)
        loop.meter.add(loss_sum=loss_sum, num_steps=1, num_samples=num_samples)
        yield


def saved_sums(ctx: Context, cfg: Config, saved: Restored | None) -> dict[str, Any] | None:
    """Return this rank's sums since the last logged step. After a change of the world size rank 0 takes those of all.

    Without `data.global_batch_size` they are lost then, as the sample order changes as well.
    """
    if saved is None or saved.local is not None or cfg.data.global_batch_size is None:
        return saved.local if saved else None
    by_rank = [sums for sums in saved.local_by_rank if sums]
    if not by_rank:
        return None
    share = {name: sum(sums[name] for sums in by_rank) if ctx.is_main else 0 for name in ("loss_sum", "num_samples")}
    return {**share, "num_steps": by_rank[0]["num_steps"]}


def interval_metrics(loop: DdpLoop) -> dict[str, float]:
    """Return the training metrics since the last logged step."""
    ctx, cfg, sums = loop.ctx, loop.cfg, loop.meter.sums
    # Reading the loss is the only place where a step waits for the device.
    loss_sum, num_steps, num_samples = ctx.sum_over_ranks(
        [float(sums["loss_sum"]), sums["num_steps"], sums.get("num_samples", 0)]
    )
    samples_per_step = cfg.data.batch_size * cfg.optim.grad_accum_steps * ctx.world_size
    if cfg.data.global_batch_size is not None:
        # The loss of a rank is its part of that of the global batch.
        samples_per_step, num_steps = cfg.data.global_batch_size, sums["num_steps"]
    return {
        "train/loss": loss_sum / num_steps,
        "train/lr": loop.optimizer.param_groups[0]["lr"],
        "train/epoch": loop.position.epochs,
        "train/samples_per_s": samples_per_step * sums["num_steps"] / loop.meter.elapsed_s,
        "samples": loop.position.count_samples(num_samples),
    }


def save(loop: DdpLoop, metrics: Mapping[str, float]) -> None:
    """Save a checkpoint; call it on every rank."""
    position, optimizer, scaler = loop.position, loop.optimizer.state_dict(), loop.scaler.state_dict()
    state = {"optimizer": optimizer, "scaler": scaler, "position": asdict(position)}
    loop.ctx.save(position.step, model=loop.model, trainer=state, local=loop.meter.sums, metrics=metrics)


def build_ddp_model(ctx: Context, cfg: Config, data: ImageData) -> DistributedDataParallel:
    """Return the model on this rank's device; call it on every rank.

    Without `data.global_batch_size`, ranks draw different random numbers from here on.
    """
    module = build_model(
        cfg.model.name,
        num_classes=data.num_classes,
        in_channels=data.in_channels,
        image_size=data.image_size,
    )
    if cfg.model.sync_batch_norm:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    if cfg.model.channels_last:
        module = module.to(memory_format=torch.channels_last)
    if cfg.model.compile:
        module.compile()  # in place: the state dict keeps its names
    # DDP supports no_sync() only without a static graph.
    options: dict[str, Any] = {"static_graph": cfg.optim.grad_accum_steps == 1}
    if ctx.device.type == "cpu":
        # DDP's default for all buckets but the first, which has 1 MB: on CPU a message costs more than it overlaps.
        options["bucket_cap_mb"] = 25
    model = ctx.wrap(module, **options)
    ctx.seed_per_rank()
    if ctx.world_size > 2 and not cfg.elastic.exact:  # the sum of two ranks does not depend on the order
        batch_size = cfg.data.batch_size
        if cfg.data.global_batch_size is not None:
            batch_size = max(1, cfg.data.global_batch_size // (cfg.elastic.micro_batches or ctx.world_size))
        indices = torch.arange(batch_size) % len(data.test)
        batches = data.test.batches(
            indices, batch_size=len(indices), device=ctx.device, channels_last=cfg.model.channels_last
        )
        images, labels = next(batches)

        def loss() -> Tensor:
            with autocast(ctx, cfg):
                return F.cross_entropy(model(images), labels)

        settle_buckets(model, loss)
    return model


def epoch_indices(ctx: Context, cfg: Config, data: ImageData, epoch: int) -> Tensor:
    """Return this rank's share of the training set in the epoch's order, int64 [n], padded to equal length."""
    sampler: DistributedSampler[Any] = DistributedSampler(
        data.train.labels,  # type: ignore[arg-type]  # the sampler reads its length only
        num_replicas=ctx.world_size,
        rank=ctx.rank,
        seed=cfg.seed,
    )
    sampler.set_epoch(epoch)
    return torch.tensor(list(sampler))


def grouped(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each optimizer step; the last group of an epoch may be smaller."""
    group: list[Batch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def train_step(
    ctx: Context,
    cfg: Config,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    micro_batches: list[Batch],
) -> Tensor:
    """Do one optimizer step over its micro-batches; return the mean loss, on the device."""
    loss_sum = torch.zeros((), device=ctx.device)
    for number, (images, labels) in enumerate(micro_batches, start=1):
        # Gradients are exchanged once per step, during the last micro-batch's backward pass.
        exchange: AbstractContextManager[Any] = nullcontext() if number == len(micro_batches) else model.no_sync()
        with exchange:
            with autocast(ctx, cfg):
                loss = F.cross_entropy(model(images), labels) / len(micro_batches)
            scaler.scale(loss).backward()
        loss_sum += loss.detach()
    update(cfg, model, optimizer, scaler)
    return loss_sum


def update(
    cfg: Config, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> None:
    """Update the weights by their gradients, after clipping."""
    if cfg.optim.max_grad_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.max_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def autocast(ctx: Context, cfg: Config) -> AbstractContextManager[Any]:
    """Return torch.autocast in the configured precision."""
    if cfg.precision.dtype == "fp32":
        return nullcontext()
    dtype = torch.bfloat16 if cfg.precision.dtype == "bf16" else torch.float16
    return torch.autocast(ctx.device.type, dtype=dtype)


@torch.no_grad()
def evaluate(ctx: Context, module: nn.Module, data: ImageData, cfg: Config) -> dict[str, float]:
    """Return loss and accuracy over the test set, each sample counted once, equal on all ranks.

    With at most MAX_CLASSES classes, the confusion matrix becomes a figure of the report.

    Args:
        module: the model without its DDP wrapper; it is left in training mode.
    """
    for buffer in module.buffers():
        # Running statistics differ between ranks unless the run is elastic; the checkpoint holds those of rank 0.
        if ctx.world_size > 1:
            dist.broadcast(buffer, src=0)
    module.eval()
    loss_sum = torch.zeros((), device=ctx.device, dtype=torch.float64)
    num_correct = torch.zeros((), device=ctx.device, dtype=torch.int64)
    num_cells = data.num_classes**2 if data.num_classes <= MAX_CLASSES else 0
    confusion = torch.zeros(num_cells, device=ctx.device, dtype=torch.int64)
    indices = eval_indices(len(data.test), ctx.rank, ctx.world_size)
    batches = data.test.batches(
        indices,
        batch_size=cfg.data.eval_batch_size,
        device=ctx.device,
        channels_last=cfg.model.channels_last,
    )
    for images, labels in batches:
        with autocast(ctx, cfg):
            logits = module(images)
        loss_sum += F.cross_entropy(logits.float(), labels, reduction="sum")
        predicted = logits.argmax(dim=1)
        num_correct += (predicted == labels).sum()
        if num_cells:
            confusion.index_add_(0, labels * data.num_classes + predicted, torch.ones_like(labels))
        ctx.alive()
    module.train()
    loss, correct, count, *cells = ctx.sum_over_ranks(
        [loss_sum.item(), num_correct.item(), len(indices), *confusion.tolist()]
    )
    if num_cells:
        ctx.figure("confusion_matrix", confusion_matrix(cells, data.class_names))
    return {"eval/loss": loss / count, "eval/accuracy": correct / count}
