"""A ResNet cut into stages, each on a rank of its own, through which the micro-batches of a step are streamed.

All ranks are stages (`roles: {stage: 2}`) and walk through the same loop; stage 0 reads the images and, as rank 0,
logs; the last stage reads the labels, which follow from the epoch's order as the images do, so that they never travel.
A master that computes nothing would cost a process, and everything would pass through it.

What is computed is the gradient accumulation of one process over the same micro-batches: each is normalised by its
own batch statistics, the running statistics are updated once for each, in their order, gradients are added up in
their order, and all stages step at the end. It does not depend on where the model is cut, on the schedule, on
activation checkpointing, nor on the number of stages (bit by bit, where all have the same number of threads). It does
depend on the number of micro-batches, as normalisation does.

Steps are synchronous: there is no asynchronous mode. One would have stages work with weights of different steps,
which buys the bubble's time (logged as pipeline/bubble) for gradients of weights that have moved on.

Source of the method: https://docs.pytorch.org/tutorials/intermediate/dist_pipeline_parallel_tutorial.html
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor, nn

from hpcdist.checkpoint.shards import Shard
from hpcdist.config.schema import Config
from hpcdist.data.download import prepare
from hpcdist.data.loading import ImageData, load_datasets
from hpcdist.errors import ConfigError
from hpcdist.models.image import build_model
from hpcdist.rank.context import Context, Restored
from hpcdist.rank.network.rpc import rpc_group
from hpcdist.rank.optimizer import build_optimizer, lr_factor
from hpcdist.rank.training_position import Position
from hpcdist.trainers.pipeline.engines import Engine, PipeliningEngine, RpcEngine, Wire, device_maps
from hpcdist.trainers.pipeline.schedules import ideal_bubble
from hpcdist.trainers.pipeline.schema import PipelineConfig
from hpcdist.trainers.pipeline.stages import Stage, use_onednn_for_pointwise
from hpcdist.trainers.pipeline.tuning import boundaries, choose_cut, choose_micro_batches


class Meter:
    """What has come together since the last logged point."""

    def __init__(self, device: torch.device) -> None:
        self.loss_sum = torch.zeros((), device=device)  #: in the last stage; zero elsewhere
        self.num_steps = 0
        self.idle_s = 0.0
        self.since = time.perf_counter()

    def reset(self) -> None:
        self.loss_sum.zero_()
        self.num_steps = 0
        self.idle_s = 0.0
        self.since = time.perf_counter()


@dataclass(frozen=True)
class Training:
    """What does not change while training."""

    ctx: Context
    cfg: Config
    data: ImageData
    engine: Engine
    optimizer: torch.optim.Optimizer
    units: list[tuple[str, ...]]  #: of every stage
    norm_slots: range  #: where this stage's parameters stand among the whole model's
    num_parameters: int  #: of the whole model
    steps_per_epoch: int
    total_steps: int = 0  #: set once it is known where training goes on from
    num_micro_batches: int = 1

    @property
    def stage(self) -> Stage:
        return self.engine.stage

    @property
    def is_first(self) -> bool:
        return self.ctx.rank == 0

    @property
    def is_last(self) -> bool:
        return self.ctx.rank == self.ctx.world_size - 1


def train(ctx: Context, cfg: Config) -> None:
    """Train, evaluate after each epoch, and leave checkpoints and the final model."""
    ctx.roles.require(stage=None)
    with _set_up(ctx, cfg) as (run, at, meter):
        while not (reason := at.end_reason(cfg.stop, cfg.checkpoint, run.total_steps)):
            if not _train_epoch(run, at, meter):
                return  # stopped, and saved
            metrics = evaluate(run)
            ctx.log(metrics, at.step)
            at.note_evaluation(metrics, cfg.checkpoint)
            _save(run, at, meter, metrics)
        whole = _gather(run)
    ctx.end_reason = reason
    # After the stages have parted: it takes rank 0 longer than RPC waits for its end.
    if whole is not None:
        images, _ = next(run.data.test.batches(torch.arange(2), batch_size=2, device=ctx.device))
        ctx.export_model(whole, _as_rgb(run, images))


# --- before the first step


@contextmanager
def _set_up(ctx: Context, cfg: Config) -> Iterator[tuple[Training, Position, Meter]]:
    if ctx.topology.local_rank == 0:
        prepare(cfg.data)
    ctx.barrier()  # the other ranks of the node wait for the download
    # The other stages read no image: nothing is preloaded for them.
    data = load_datasets(cfg.data if ctx.rank == 0 else replace(cfg.data, preload="never"), cfg.seed)
    if len(data.train) < cfg.data.batch_size:
        raise ConfigError([f"data.batch_size={cfg.data.batch_size}, but there are {len(data.train)} training images"])
    model = _whole_model(cfg, data)
    if ctx.device.type == "cpu":
        use_onednn_for_pointwise(model)
    if cfg.model.channels_last:
        model = model.to(memory_format=torch.channels_last)
    saved = ctx.restore()
    units = choose_cut(ctx, model, _example(cfg, data), saved)
    stage = Stage(model, units[ctx.rank], checkpointing=cfg.section(PipelineConfig).activation_checkpointing)
    names = [name for name, _ in model.named_parameters()]
    own = [name for name, _ in stage.named_parameters()]
    first = names.index(own[0]) if own else 0
    steps_per_epoch = len(data.train) // cfg.data.batch_size
    ends = (
        boundaries(model, units[: ctx.rank + 1], _example(cfg, data)[:1])
        if cfg.section(PipelineConfig).engine == "pipelining"
        else None
    )
    del model  # the other stages' part of it
    with _engine(ctx, cfg, stage.to(ctx.device), ends) as engine:
        run = Training(
            ctx=ctx,
            cfg=cfg,
            data=data,
            engine=engine,
            optimizer=build_optimizer(stage.parameters(), cfg.optim),
            units=units,
            norm_slots=range(first, first + len(own)),
            num_parameters=len(names),
            steps_per_epoch=steps_per_epoch,
        )
        at, meter = _restore(run, saved)
        run = replace(run, total_steps=at.total_steps(cfg.stop), num_micro_batches=_num_micro_batches(run, saved))
        meter.since = time.perf_counter()
        yield run, at, meter


def _whole_model(cfg: Config, data: ImageData) -> nn.Module:
    """The same weights on every rank, which has drawn nothing else so far. Grey images become three equal channels."""
    return build_model(cfg.model.name, num_classes=data.num_classes, in_channels=3, image_size=data.image_size)


def _example(cfg: Config, data: ImageData) -> Tensor:
    """Made-up images of the size of a micro-batch (of a quarter of the batch where that is to be measured)."""
    number = cfg.section(PipelineConfig).num_micro_batches
    size = max(2, cfg.data.batch_size // (number if isinstance(number, int) else 4))
    shape = (size, 3, data.image_size, data.image_size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return images.contiguous(memory_format=torch.channels_last) if cfg.model.channels_last else images


@contextmanager
def _engine(ctx: Context, cfg: Config, stage: Stage, ends: tuple[Tensor, Tensor] | None) -> Iterator[Engine]:
    if ends is not None:
        yield PipeliningEngine(
            stage,
            ctx,
            schedule=cfg.section(PipelineConfig).schedule,
            boundaries=ends,
            channels_last=cfg.model.channels_last,
        )
        return
    maps = device_maps(ctx)
    with rpc_group(ctx, device_maps=maps) as group:
        mapped = [rank for rank, name in enumerate(group.names) if name in maps]
        wire = Wire(ctx, group, mapped)
        yield RpcEngine(
            stage, wire, index=ctx.rank, num_stages=ctx.world_size, schedule=cfg.section(PipelineConfig).schedule
        )


def _num_micro_batches(run: Training, saved: Restored | None) -> int:
    """The config's number; for `auto` the checkpoint's, or the fastest one."""
    number = run.cfg.section(PipelineConfig).num_micro_batches
    if isinstance(number, int):
        return number
    if saved is not None:
        return int(saved.trainer["num_micro_batches"])
    images, labels = next(_batches(run, epoch=0, start=0))
    return choose_micro_batches(run.ctx, run.stage, lambda number: run.engine.step(images, labels, number))


# --- one epoch, one step


def _train_epoch(run: Training, at: Position, meter: Meter) -> bool:
    """Do what is left of the epoch; False when the ranks agreed to stop, with everything saved."""
    ctx, cfg = run.ctx, run.cfg
    run.stage.train()
    for images, labels in _batches(run, epoch=at.epoch, start=at.step_in_epoch):
        if at.step >= run.total_steps:
            break
        _step(run, at.step, images, labels, meter)
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


def _batches(run: Training, *, epoch: int, start: int) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """(images, labels) of each step of the epoch from `start` on, each where it is needed.

    All batches are whole; what is left over of the set has its turn in another epoch's order.
    """
    size = run.cfg.data.batch_size
    generator = torch.Generator().manual_seed(run.cfg.seed + epoch)
    order = torch.randperm(len(run.data.train), generator=generator)[: run.steps_per_epoch * size]
    images = (
        run.data.train.batches(
            order,
            batch_size=size,
            device=run.ctx.device,
            start_batch=start,
            epoch=epoch,
            channels_last=run.cfg.model.channels_last,
        )
        if run.is_first
        else None
    )
    for indices in order.split(size)[start:]:
        yield (
            None if images is None else _as_rgb(run, next(images)[0]),
            run.data.train.labels[indices].to(run.ctx.device) if run.is_last else None,
        )


def _as_rgb(run: Training, images: Tensor) -> Tensor:
    if images.shape[1] == 3:
        return images
    memory_format = torch.channels_last if run.cfg.model.channels_last else torch.contiguous_format
    return images.expand(-1, 3, -1, -1).contiguous(memory_format=memory_format)


def _step(run: Training, step: int, images: Tensor | None, labels: Tensor | None, meter: Meter) -> None:
    """One optimizer step over its micro-batches, each stage for its own parameters."""
    lr = run.cfg.optim.lr * lr_factor(step, run.total_steps, run.cfg.schedule)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    before = run.engine.idle_s
    meter.loss_sum += run.engine.step(images, labels, run.num_micro_batches)
    meter.idle_s += run.engine.idle_s - before
    if run.cfg.optim.max_grad_norm is not None:
        _clip(run, run.cfg.optim.max_grad_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    meter.num_steps += 1


def _clip(run: Training, max_norm: float) -> None:
    """Clip the whole model's gradient by its norm, summed up in the model's order wherever it is cut."""
    norms = torch.zeros(run.num_parameters, device=run.ctx.device)
    gradients = [parameter.grad for parameter in run.stage.parameters() if parameter.grad is not None]
    norms[run.norm_slots.start : run.norm_slots.stop] = torch.stack(torch._foreach_norm(gradients))
    dist.all_reduce(norms)  # each place has one owner: adding zeros changes nothing
    factor = torch.clamp(max_norm / (norms.norm() + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, factor)


def _log(run: Training, at: Position, meter: Meter) -> None:
    """Record the interval's mean loss, and how long each stage worked and waited."""
    ctx, num_stages = run.ctx, run.ctx.world_size
    elapsed_s = time.perf_counter() - meter.since
    busy_s = [0.0] * num_stages
    busy_s[ctx.rank] = elapsed_s - meter.idle_s
    loss_sum, idle_s, all_s, *busy_s = ctx.sum_over_ranks([meter.loss_sum.item(), meter.idle_s, elapsed_s, *busy_s])
    metrics = {
        "train/loss": loss_sum / meter.num_steps,
        "train/lr": run.optimizer.param_groups[0]["lr"],
        "train/epoch": at.epochs,
        "train/samples_per_s": run.cfg.data.batch_size * meter.num_steps / elapsed_s,
        "pipeline/bubble": idle_s / all_s,
        "pipeline/bubble_in_theory": ideal_bubble(num_stages, run.num_micro_batches),
    }
    for index, seconds in enumerate(busy_s):
        metrics[f"pipeline/busy_s/stage_{index}"] = seconds / meter.num_steps
    ctx.log(metrics, at.step)
    meter.reset()


# --- evaluation and the end


def evaluate(run: Training) -> dict[str, float]:
    """Loss and accuracy over the whole test set, each sample counted once, equal on all ranks."""
    ctx, data = run.ctx, run.data
    size = run.cfg.data.eval_batch_size
    count = len(data.test)
    num_batches = math.ceil(count / size)
    # All batches are of one size; what fills up the last one is not counted.
    indices = torch.arange(num_batches * size) % count

    def images() -> Iterator[Tensor | None]:
        if not run.is_first:
            yield from [None] * num_batches
            return
        for batch, _ in data.test.batches(
            indices, batch_size=size, device=ctx.device, channels_last=run.cfg.model.channels_last
        ):
            yield _as_rgb(run, batch)

    run.stage.eval()
    loss_sum = torch.zeros((), device=ctx.device, dtype=torch.float64)
    num_correct = torch.zeros((), device=ctx.device, dtype=torch.int64)
    for logits, labels in zip(run.engine.infer(images()), data.test.labels[indices].split(size), strict=True):
        if logits is not None:
            num_left = min(size, count)
            logits, labels = logits[:num_left].float(), labels[:num_left].to(ctx.device)
            loss_sum += F.cross_entropy(logits, labels, reduction="sum")
            num_correct += (logits.argmax(dim=1) == labels).sum()
        count -= size
        ctx.alive()
    run.stage.train()
    loss, correct = ctx.sum_over_ranks([loss_sum.item(), num_correct.item()])
    return {"eval/loss": loss / len(data.test), "eval/accuracy": correct / len(data.test)}


def _gather(run: Training) -> nn.Module | None:
    """The whole model on rank 0, on the host; None elsewhere. Every rank calls it."""
    ctx = run.ctx
    parts: list[Any] = [None] * ctx.world_size
    state = {name: tensor.cpu() for name, tensor in run.stage.state_dict().items()}
    dist.gather_object(state, parts if ctx.is_main else None, dst=0)
    if not ctx.is_main:
        return None
    model = _whole_model(run.cfg, run.data)
    model.load_state_dict({name: tensor for part in parts for name, tensor in part.items()})
    return model


# --- checkpoints


def _save(run: Training, at: Position, meter: Meter, metrics: dict[str, float]) -> None:
    """Each stage writes its weights, statistics and optimizer states, all under the whole model's names."""
    names = [name for name, _ in run.stage.named_parameters()]
    states = run.optimizer.state_dict()["state"]
    run.ctx.save(
        at.step,
        model=None,
        trainer={
            "position": asdict(at),
            "units": [list(stage) for stage in run.units],
            "num_micro_batches": run.num_micro_batches,
        },
        local={"loss_sum": meter.loss_sum, "num_steps": meter.num_steps},
        metrics=metrics,
        shard=Shard(
            model=run.stage.state_dict(),
            trainer={"optimizer": {names[index]: state for index, state in states.items()}},
        ),
    )


def _restore(run: Training, saved: Restored | None) -> tuple[Position, Meter]:
    at, meter = Position(steps_per_epoch=run.steps_per_epoch), Meter(run.ctx.device)
    if saved is None:
        return at, meter
    # Cut in another way, too: a stage takes its part wherever it lies.
    same = saved.trainer["units"] == [list(stage) for stage in run.units]
    weights: dict[str, Tensor] = {}
    states: dict[str, Any] = {}
    for rank in [run.ctx.rank] if same else range(saved.world_size):
        shard = saved.shard(rank)
        assert shard is not None, "every stage owns parameters"
        weights |= shard["model"]
        states |= shard["trainer"]["optimizer"]
    own = run.stage.state_dict()
    run.stage.load_state_dict({name: weights[name] for name in own})
    names = [name for name, _ in run.stage.named_parameters()]
    state_dict = run.optimizer.state_dict()
    state_dict["state"] = {index: states[name] for index, name in enumerate(names) if name in states}
    run.optimizer.load_state_dict(state_dict)
    if saved.local is not None:
        meter.loss_sum.copy_(saved.local["loss_sum"])
        meter.num_steps = saved.local["num_steps"]
    at = Position(**saved.trainer["position"])
    at.rescale(run.steps_per_epoch)
    return at, meter
