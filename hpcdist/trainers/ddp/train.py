"""Image classification with DistributedDataParallel: every rank trains the whole model on its share of the data.

Source of the method: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from hpcdist.config.schema import Config
from hpcdist.data.batches import Batch, eval_indices
from hpcdist.data.download import prepare
from hpcdist.data.loading import ImageData, load_datasets
from hpcdist.models.image import build_model
from hpcdist.rank.context import Context
from hpcdist.rank.ddp_buckets import settle_buckets
from hpcdist.rank.optimizer import build_optimizer, lr_factor
from hpcdist.rank.training_position import Position


class Meter:
    """This rank's loss since the last logged point, summed up on the device: reading it would wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.loss_sum = torch.zeros((), device=device)
        self.num_steps = 0
        self.since = time.perf_counter()

    def reset(self) -> None:
        self.loss_sum.zero_()
        self.num_steps = 0
        self.since = time.perf_counter()


@dataclass(frozen=True)
class Training:
    """What does not change while training."""

    ctx: Context
    cfg: Config
    data: ImageData
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    steps_per_epoch: int
    total_steps: int = 0  #: set once it is known where training goes on from


def train(ctx: Context, cfg: Config) -> None:
    """Train, evaluate after each epoch, and leave checkpoints and the final model."""
    run = _set_up(ctx, cfg)
    at, meter = _restore(run)
    run = replace(run, total_steps=at.total_steps(cfg.stop))
    while not (reason := at.end_reason(cfg.stop, cfg.checkpoint, run.total_steps)):
        if not _train_epoch(run, at, meter):
            return  # stopped, and saved
        metrics = evaluate(ctx, run.model.module, run.data, cfg)
        ctx.log(metrics, at.step)
        at.note_evaluation(metrics, cfg.checkpoint)
        _save(run, at, meter, metrics)
    ctx.end_reason = reason
    example, _ = next(run.data.test.batches(torch.arange(2), batch_size=2, device=ctx.device))
    ctx.export_model(run.model.module, example)


def _set_up(ctx: Context, cfg: Config) -> Training:
    if ctx.topology.local_rank == 0:
        prepare(cfg.data)
    ctx.barrier()  # the other ranks of the node wait for the download
    data = load_datasets(cfg.data, cfg.seed)
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
    # DDP may not skip its exchange (no_sync) and take the graph for static at the same time.
    options: dict[str, Any] = {"static_graph": cfg.optim.grad_accum_steps == 1}
    if ctx.device.type == "cpu":
        # DDP's size, but for the first bucket too, which is 1 MB otherwise: a message costs more than it hides here.
        options["bucket_cap_mb"] = 25
    model = ctx.wrap(module, **options)
    ctx.seed_per_rank()
    if ctx.world_size > 2:  # a + b is b + a, so two ranks agree in any order
        indices = torch.arange(cfg.data.batch_size) % len(data.test)
        batches = data.test.batches(
            indices, batch_size=len(indices), device=ctx.device, channels_last=cfg.model.channels_last
        )
        images, labels = next(batches)

        def loss() -> Tensor:
            with _autocast(ctx, cfg):
                return F.cross_entropy(model(images), labels)

        settle_buckets(model, loss)
    batches_per_epoch = math.ceil(math.ceil(len(data.train) / ctx.world_size) / cfg.data.batch_size)
    steps_per_epoch = math.ceil(batches_per_epoch / cfg.optim.grad_accum_steps)
    return Training(
        ctx=ctx,
        cfg=cfg,
        data=data,
        model=model,
        optimizer=build_optimizer(model.parameters(), cfg.optim),
        scaler=torch.amp.GradScaler(ctx.device.type, enabled=cfg.precision.dtype == "fp16"),
        steps_per_epoch=steps_per_epoch,
    )


# --- one epoch, one step


def _train_epoch(run: Training, at: Position, meter: Meter) -> bool:
    """Do what is left of the epoch; False when the ranks agreed to stop, with everything saved."""
    ctx, cfg = run.ctx, run.cfg
    run.model.train()
    batches = run.data.train.batches(
        _epoch_indices(run, at.epoch),
        batch_size=cfg.data.batch_size,
        device=ctx.device,
        start_batch=at.step_in_epoch * cfg.optim.grad_accum_steps,
        epoch=at.epoch,
        channels_last=cfg.model.channels_last,
    )
    for micro_batches in grouped(batches, cfg.optim.grad_accum_steps):
        if at.step >= run.total_steps:
            break
        _step(run, at.step, micro_batches, meter)
        at.count_step()
        if at.step % cfg.tracking.log_every_steps == 0:
            _log(run, at, meter)
        stop = ctx.should_stop(at.step, run.total_steps)
        # A save before an evaluation waits for it, unless the ranks leave before.
        if ctx.should_save(at.step) and (stop or not at.before_evaluation(run.total_steps)):
            _save(run, at, meter, {})
        if stop:
            return False
    at.close_epoch()
    return True


def _epoch_indices(run: Training, epoch: int) -> Tensor:
    """This rank's share of the training set in the epoch's order, int64 [n]; padded to equal length everywhere."""
    sampler: DistributedSampler[Any] = DistributedSampler(
        run.data.train.labels,  # type: ignore[arg-type]  # only its length is asked for
        num_replicas=run.ctx.world_size,
        rank=run.ctx.rank,
        seed=run.cfg.seed,
    )
    sampler.set_epoch(epoch)
    return torch.tensor(list(sampler))


def grouped(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """The micro-batches of each optimizer step; the last group of an epoch may be smaller."""
    group: list[Batch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _step(run: Training, step: int, micro_batches: list[Batch], meter: Meter) -> None:
    """One optimizer step over its micro-batches."""
    cfg, model, scaler = run.cfg, run.model, run.scaler
    lr = cfg.optim.lr * lr_factor(step, run.total_steps, cfg.schedule)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    for number, (images, labels) in enumerate(micro_batches, start=1):
        # Gradients travel once a step, with the last micro-batch.
        exchange: AbstractContextManager[Any] = nullcontext() if number == len(micro_batches) else model.no_sync()
        with exchange:
            with _autocast(run.ctx, cfg):
                loss = F.cross_entropy(model(images), labels) / len(micro_batches)
            scaler.scale(loss).backward()
        meter.loss_sum += loss.detach()
    if cfg.optim.max_grad_norm is not None:
        scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.max_grad_norm)
    scaler.step(run.optimizer)
    scaler.update()
    run.optimizer.zero_grad()
    meter.num_steps += 1


def _autocast(ctx: Context, cfg: Config) -> AbstractContextManager[Any]:
    if cfg.precision.dtype == "fp32":
        return nullcontext()
    dtype = torch.bfloat16 if cfg.precision.dtype == "bf16" else torch.float16
    return torch.autocast(ctx.device.type, dtype=dtype)


def _log(run: Training, at: Position, meter: Meter) -> None:
    """Record the interval's mean loss over all ranks; the one place where a step waits for the device."""
    loss_sum, num_steps = run.ctx.sum_over_ranks([meter.loss_sum.item(), meter.num_steps])
    samples_per_step = run.cfg.data.batch_size * run.cfg.optim.grad_accum_steps * run.ctx.world_size
    metrics = {
        "train/loss": loss_sum / num_steps,
        "train/lr": run.optimizer.param_groups[0]["lr"],
        "train/epoch": at.epochs,
        "train/samples_per_s": samples_per_step * meter.num_steps / (time.perf_counter() - meter.since),
    }
    run.ctx.log(metrics, at.step)
    meter.reset()


# --- evaluation and the end


@torch.no_grad()
def evaluate(ctx: Context, module: nn.Module, data: ImageData, cfg: Config) -> dict[str, float]:
    """Loss and accuracy over the whole test set, each sample counted once, equal on all ranks.

    Args:
        module: the bare model; it is left in training mode.
    """
    for buffer in module.buffers():
        # Running statistics differ from rank to rank; the checkpoint holds those of rank 0.
        if ctx.world_size > 1:
            dist.broadcast(buffer, src=0)
    module.eval()
    loss_sum = torch.zeros((), device=ctx.device, dtype=torch.float64)
    num_correct = torch.zeros((), device=ctx.device, dtype=torch.int64)
    indices = eval_indices(len(data.test), ctx.rank, ctx.world_size)
    batches = data.test.batches(
        indices,
        batch_size=cfg.data.eval_batch_size,
        device=ctx.device,
        channels_last=cfg.model.channels_last,
    )
    for images, labels in batches:
        with _autocast(ctx, cfg):
            logits = module(images)
        loss_sum += F.cross_entropy(logits.float(), labels, reduction="sum")
        num_correct += (logits.argmax(dim=1) == labels).sum()
        ctx.alive()
    module.train()
    loss, correct, count = ctx.sum_over_ranks([loss_sum.item(), num_correct.item(), len(indices)])
    return {"eval/loss": loss / count, "eval/accuracy": correct / count}


# --- checkpoints


def _save(run: Training, at: Position, meter: Meter, metrics: dict[str, float]) -> None:
    run.ctx.save(
        at.step,
        model=run.model,
        trainer={
            "optimizer": run.optimizer.state_dict(),
            "scaler": run.scaler.state_dict(),
            "position": asdict(at),
        },
        local={"loss_sum": meter.loss_sum, "num_steps": meter.num_steps},
        metrics=metrics,
    )


def _restore(run: Training) -> tuple[Position, Meter]:
    at, meter = Position(steps_per_epoch=run.steps_per_epoch), Meter(run.ctx.device)
    saved = run.ctx.restore()
    if saved is None:
        return at, meter
    run.model.module.load_state_dict(saved.model)
    run.optimizer.load_state_dict(saved.trainer["optimizer"])
    run.scaler.load_state_dict(saved.trainer["scaler"])
    if saved.local is not None:
        meter.loss_sum.copy_(saved.local["loss_sum"])
        meter.num_steps = saved.local["num_steps"]
    at = Position(**saved.trainer["position"])
    at.rescale(run.steps_per_epoch)
    return at, meter
