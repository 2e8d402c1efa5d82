"""Image classification with DistributedDataParallel: each rank trains the whole model on its share of the data.

With `data.global_batch_size` the run is *elastic*: each step takes the same samples on any number of ranks.

Source of the method: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from hpcdist.config.schema import Config
from hpcdist.data.datasets import EVAL_BATCH_SIZE, ImageData, build_model, load_datasets, log_image_data
from hpcdist.data.download import prepare
from hpcdist.rank.context import Context
from hpcdist.rank.training_loop import (
    MAX_ORDER_FREE_RANKS,
    Meter,
    Progress,
    build_optimizer,
    lr_factor,
    set_lr,
    settle_buckets,
)
from hpcdist.run.figures import MAX_CLASSES, Matrix
from hpcdist.run.samples import MAX_RESULTS

WeightedBatch: TypeAlias = tuple[Tensor, Tensor, float]
"""Images, labels, and the weight of their mean loss in the gradient of an optimizer step."""


def train(ctx: Context, cfg: Config) -> None:
    """Train, evaluate after each epoch, save checkpoints and export the final model. Every rank calls it."""
    data = open_data(ctx, cfg)
    model = build_ddp_model(ctx, cfg, data)
    optimizer = build_optimizer(model.parameters(), cfg.optim)
    scaler = build_scaler(ctx, cfg)
    # The newest valid checkpoint, None without one. It fixes the micro-batches of elastic runs, for `steps_per_epoch`.
    saved = ctx.restore()
    ctx.init_from(model)  # without a checkpoint: the weights of `model.init_from`, if it is set
    position = None
    if saved is not None:
        position = saved.trainer["position"]
    # Steps and epochs done so far, and sums of the loss and of samples since the last logged step. Both begin with the
    # checkpoint's: the total number of steps follows from the position, and sums of other ranks may have to be joined.
    progress = Progress(cfg, steps_per_epoch(ctx, cfg, data), position)
    meter = Meter.restore(ctx, saved)
    # Loads the checkpoint into all of them; then, after each step, asks for a stop, and saves what is due.
    steps = ctx.steps(
        progress.total_steps, model=model, optimizer=optimizer, scaler=scaler, position=progress, local=meter
    )
    ctx.timer.training_begins()  # until here counts as start-up, from here to the end of the first step as compilation
    # The gradients of two ranks have one order of addition only, and with `exact`, hpcdist adds in a fixed order.
    has_fixed_order = ctx.world_size <= MAX_ORDER_FREE_RANKS or cfg.elastic.exact
    if not has_fixed_order:
        settle_order_of_gradients(ctx, cfg, data, model)

    while not progress.end_reason:  # until a stop rule of the config applies, known after an evaluation
        model.train()
        batches = epoch_steps(ctx, cfg, data, model, progress)
        for step in progress.until_evaluation(steps):
            set_lr(optimizer, cfg.optim.lr * lr_factor(step, progress.total_steps, cfg.schedule))
            meter.add(**train_step(ctx, cfg, model, optimizer, scaler, next(batches)))
            if steps.log_is_due:
                ctx.log(interval_metrics(ctx, optimizer, progress, meter))
                meter.reset()
        if steps.is_stopped:  # on all ranks after the same step, which is saved
            return
        with meter.paused():
            with ctx.timer.evaluating():  # its time counts apart from training
                metrics = evaluate(ctx, model.module, data, cfg)
            progress.end_epoch(metrics)
            steps.save(metrics)

    ctx.end_reason = progress.end_reason
    example, _ = next(data.test.batches([torch.arange(2)]))  # two images
    ctx.export_model(model.module, example)


def train_step(
    ctx: Context,
    cfg: Config,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    micro_batches: Iterable[WeightedBatch],
) -> dict[str, Any]:
    """Do one optimizer step. Returns sums over this rank's micro-batches, the loss on the device."""
    loss_sum = torch.zeros((), device=ctx.device, dtype=torch.float64)
    weight_sum = 0.0
    num_samples = 0
    for images, labels, weight in micro_batches:
        with autocast(ctx, cfg):
            loss = F.cross_entropy(model(images), labels) * weight
        scaler.scale(loss).backward()
        loss_sum += loss.detach()
        weight_sum += weight
        num_samples += len(labels)
    if cfg.optim.max_grad_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.max_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return {"loss_sum": loss_sum, "weight_sum": weight_sum, "num_samples": num_samples}


def autocast(ctx: Context, cfg: Config) -> AbstractContextManager[Any]:
    """Return the context of a forward pass in `precision.dtype`; fp32 disables it."""
    dtype = torch.bfloat16
    if cfg.precision.dtype == "fp16":
        dtype = torch.float16
    return torch.autocast(ctx.device.type, dtype=dtype, enabled=cfg.precision.dtype != "fp32")


def interval_metrics(
    ctx: Context, optimizer: torch.optim.Optimizer, progress: Progress, meter: Meter
) -> dict[str, float]:
    """Return the training metrics since the last logged step, and count their samples in `progress`."""
    # Training waits for the device only here.
    own_sums = [float(meter.sums[name]) for name in ("loss_sum", "weight_sum", "num_samples")]
    loss_sum, weight_sum, num_samples = ctx.groups.sum(own_sums)
    return {
        "train/loss": loss_sum / weight_sum,
        "train/lr": optimizer.param_groups[0]["lr"],
        "train/epoch": progress.epochs,
        "train/samples_per_s": num_samples / meter.elapsed_s,
        "samples": progress.add_samples(num_samples),  # since the start of the run
    }


# Set-up: data, gradient scaler.


def open_data(ctx: Context, cfg: Config) -> ImageData:
    """Download the dataset once on each node, if it is not there, and return it."""
    alive = ctx.timer.alive  # the heartbeat, since loading counts no steps
    if ctx.topology.local_rank == 0:
        prepare(cfg.data, alive)
    ctx.groups.await_all(alive)  # the other ranks of the node wait for the download
    data = load_datasets(cfg.data, cfg.seed, ctx.device, channels_last=cfg.model.channels_last, alive=alive)
    ctx.groups.await_all(alive)  # and for a node with a slower disk
    log_image_data(ctx, cfg.data, data, cfg.seed)  # name, size and digest, for MLflow
    return data


def build_scaler(ctx: Context, cfg: Config) -> torch.amp.GradScaler:
    """Return the scaler of the loss, which has an effect for fp16 only."""
    scaler = torch.amp.GradScaler(ctx.device.type, enabled=cfg.precision.dtype == "fp16")
    # Its first call initialises it. In an elastic run a rank may have no samples in a step, and so make no call.
    scaler.scale(torch.zeros((), device=ctx.device))
    return scaler


# The data of an epoch: a rank's micro-batches of each optimizer step, plain or elastic.


def steps_per_epoch(ctx: Context, cfg: Config, data: ImageData) -> int:
    """Return the number of optimizer steps in an epoch. The last one may have fewer samples."""
    if cfg.data.global_batch_size is not None:
        return ctx.elastic.division(len(data.train)).steps_per_epoch
    share = math.ceil(len(data.train) / ctx.world_size)
    return math.ceil(share / cfg.data.batch_size)


def epoch_steps(
    ctx: Context, cfg: Config, data: ImageData, model: DistributedDataParallel, progress: Progress
) -> Iterator[Iterator[WeightedBatch]]:
    """Return this rank's micro-batches of each optimizer step until the end of the epoch: one batch, or several.

    In an elastic run (`data.global_batch_size`) they are a part of a global batch that is the same for any number of
    ranks; a rank may have none in the last step of an epoch.
    """
    if cfg.data.global_batch_size is not None:
        return elastic_steps(ctx, data, model, progress)
    whole_epoch = epoch_indices(ctx, cfg, data, progress.epoch).split(cfg.data.batch_size)
    remaining = list(whole_epoch[progress.step_in_epoch :])
    batches = data.train.batches(remaining, epoch=progress.epoch)
    return (iter([(*batch, 1.0)]) for batch in batches)


def elastic_steps(
    ctx: Context, data: ImageData, model: DistributedDataParallel, progress: Progress
) -> Iterator[Iterator[WeightedBatch]]:
    """Return this rank's micro-batches of each optimizer step of an elastic run, from the current step on."""
    num_samples = len(data.train)
    index_batches = ctx.elastic.division(num_samples).rank_indices(progress.epoch, progress.step_in_epoch)
    batches = data.train.batches(index_batches, epoch=progress.epoch)

    def micro_batches(step: int) -> Iterator[WeightedBatch]:
        # At the end of the loop the gradients have been summed over the ranks, by DDP or by `elastic.micro_batches`.
        for micro in ctx.elastic.micro_batches(model, step, num_samples):
            images, labels = next(batches)
            yield images, labels, micro.weight

    steps = itertools.count(progress.step)  # of the whole training: the caller takes those of one epoch
    return map(micro_batches, steps)


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


def build_ddp_model(ctx: Context, cfg: Config, data: ImageData) -> DistributedDataParallel:
    """Return the model on this rank's device; call it on every rank."""
    module = build_model(
        cfg.model.name, num_classes=data.num_classes, in_channels=data.in_channels, image_size=data.image_size
    )
    if cfg.model.channels_last:
        module = module.to(memory_format=torch.channels_last)
    if cfg.model.compile:
        module.compile()  # in place: the state dict keeps its names
    options: dict[str, Any] = {"static_graph": True}  # `wrap` ignores it in an elastic run
    if ctx.device.type == "cpu":
        # An explicit size also applies to the first bucket (default 1 MB): on CPU, few messages are faster.
        options["bucket_cap_mb"] = 25
    return ctx.wrap(module, **options)


def settle_order_of_gradients(ctx: Context, cfg: Config, data: ImageData, model: DistributedDataParallel) -> None:
    """Let DDP choose now in which order it adds gradients, so that resumed and uninterrupted runs round alike.

    `settle_buckets` leaves weights, buffers and random number generators as they are.
    """
    batch_size = cfg.data.batch_size  # of the training, so that a compiled model is compiled once
    if cfg.data.global_batch_size is not None:
        division = ctx.elastic.division(len(data.train))
        batch_size = max(1, division.global_batch_size // division.num_micro_batches)  # of a micro-batch
    indices = torch.arange(batch_size) % len(data.test)
    images, labels = next(data.test.batches([indices]))

    def loss() -> Tensor:
        with autocast(ctx, cfg):
            return F.cross_entropy(model(images), labels)

    settle_buckets(model, loss)


@torch.no_grad()
def evaluate(ctx: Context, module: nn.Module, data: ImageData, cfg: Config) -> dict[str, float]:
    """Return loss and accuracy over the test set, each sample counted once, equal on all ranks."""
    for buffer in module.buffers():
        # Running statistics of a plain batch norm differ between ranks; the checkpoint holds those of rank 0.
        if ctx.world_size > 1:
            dist.broadcast(buffer, src=0)
    module.eval()
    # Loss and correctness of each sample, [2, n] per batch. The first entry is for a rank without samples.
    results = [torch.zeros(2, 0, device=ctx.device)]
    num_cells = 0  # of the confusion matrix; 0 disables it
    if data.num_classes <= MAX_CLASSES:
        num_cells = data.num_classes**2
    confusion = torch.zeros(num_cells, device=ctx.device, dtype=torch.int64)
    indices = torch.arange(len(data.test))[ctx.rank :: ctx.world_size]  # without padding; shares may be empty
    for images, labels in data.test.batches(indices.split(EVAL_BATCH_SIZE)):
        with autocast(ctx, cfg):
            logits = module(images)
        predicted = logits.argmax(dim=1)
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        results.append(torch.stack([losses, (predicted == labels).float()]))
        if num_cells:
            cells_of_samples = labels * data.num_classes + predicted  # row by row, as `confusion_matrix` reads them
            confusion.index_add_(0, cells_of_samples, torch.ones_like(labels))
        ctx.timer.alive()  # a heartbeat, since an evaluation counts no steps
    by_sample = torch.cat(results, dim=1).cpu().double()
    own_sums = [*by_sample.sum(dim=1).tolist(), *confusion.tolist()]
    loss, correct, *cells = ctx.groups.sum(own_sums)
    if len(data.test) <= MAX_RESULTS:  # the result of each sample, by which `hpcdist compare` pairs two runs
        ctx.report.log_samples("eval/loss", by_sample[0], indices)
        ctx.report.log_samples("eval/accuracy", by_sample[1], indices)
    if num_cells:
        ctx.report.figure("confusion_matrix", confusion_matrix(cells, data.class_names))
    return {"eval/loss": loss / len(data.test), "eval/accuracy": correct / len(data.test)}


def confusion_matrix(counts: Sequence[float], class_names: Sequence[str] = ()) -> Matrix:
    """Return the confusion matrix of numbers of samples by true and predicted class, row by row."""
    num_classes = math.isqrt(len(counts))
    names = list(class_names) or [str(index) for index in range(num_classes)]
    rows = [list(counts[row * num_classes :][:num_classes]) for row in range(num_classes)]
    return Matrix(
        title="confusion matrix of the test set",
        row_label="true class",
        column_label="predicted class",
        names=names,
        values=rows,
    )
