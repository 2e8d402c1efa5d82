"""Pipeline parallelism: a ResNet split into stages, one per rank, that process the micro-batches of a step.

All ranks are stages and run the same loop. With `roles: {stage: 2}`, two ranks train one model, and 4 or 6 ranks train
2 or 3 replicas of it: a mesh {replica, stage}. The first stage of a replica reads its images; rank 0 also logs. The
last stage reads the labels, which follow from the epoch's order as the images do, so no label is sent. There is no
master: it would cost a process, and all tensors would pass through it. Stages exchange tensors by process groups, and
need no RPC.

The result is that of gradient accumulation in one process over the same micro-batches: each is normalised by its own
batch statistics, running statistics are updated once per micro-batch in order, gradients are summed in order, and all
stages step at the end. It does not depend on the split, activation checkpointing or the number of stages
(bit by bit, if all have the same number of threads). It depends on the number of micro-batches, as normalisation does.
The replicas share the micro-batches of a step, so their number changes the rounding of sums only (`replicas.py`).

Steps are synchronous. In an asynchronous mode stages would work with weights of different steps, which saves the
bubble's time (logged as pipeline/bubble) at the price of stale gradients.

Source of the method: https://docs.pytorch.org/tutorials/intermediate/dist_pipeline_parallel_tutorial.html
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor, nn

from hpcdist.checkpoint.state import Shard
from hpcdist.config.roles import share_of
from hpcdist.config.schema import Config
from hpcdist.data.datasets import EVAL_BATCH_SIZE, ImageData, build_model, load_datasets, log_image_data
from hpcdist.data.download import prepare
from hpcdist.errors import ConfigError
from hpcdist.rank.context import Context, Restored
from hpcdist.rank.training_loop import Meter, Progress, build_optimizer, lr_factor, set_lr
from hpcdist.trainers.pipeline import PipelineConfig
from hpcdist.trainers.pipeline.engine import StageEngine, ideal_bubble
from hpcdist.trainers.pipeline.mesh import StageMesh
from hpcdist.trainers.pipeline.replicas import StageCopies, stage_copies
from hpcdist.trainers.pipeline.stages import (
    RGB_CHANNELS,
    Stage,
    activation_shapes,
    choose_stages,
    use_onednn_for_pointwise,
)
from hpcdist.trainers.pipeline.wire import Wire


def train(ctx: Context, cfg: Config) -> None:
    """Train, evaluate after each epoch, save checkpoints and export the final model. Every stage calls it."""
    ctx.roles.require(stage=None)  # any number
    setup = set_up_stage(ctx, cfg)
    train_stage(ctx, cfg, setup)
    if not ctx.end_reason:  # after a stop
        return
    model = gather_model(ctx, cfg, setup)
    if model is not None:
        images, _ = next(setup.data.test.batches([torch.arange(2)]))  # two images
        ctx.export_model(model, as_rgb(cfg, images))


def train_stage(ctx: Context, cfg: Config, setup: "StageSetup") -> None:
    """Train until a stop rule of the config applies, which becomes `ctx.end_reason`, or a stop is requested."""
    engine, optimizer = setup.engine, setup.optimizer
    progress, meter = setup.progress, setup.meter
    num_micro_batches = cfg.section(PipelineConfig).num_micro_batches
    steps = ctx.steps(progress.total_steps, save=partial(save_step, ctx, setup))
    ctx.timer.training_begins()  # the time until here counts as start-up

    while not progress.end_reason:  # until a stop rule of the config applies, known after an evaluation
        engine.stage.train()
        batches = step_batches(ctx, cfg, setup, epoch=progress.epoch, start=progress.step_in_epoch)
        for step in progress.until_evaluation(steps):
            set_lr(optimizer, cfg.optim.lr * lr_factor(step, progress.total_steps, cfg.schedule))
            images, labels = next(batches)
            meter.add(**train_step(cfg, setup, images, labels, num_micro_batches))
            if steps.log_is_due:
                ctx.log(interval_metrics(ctx, cfg, setup))
                meter.reset()
        if steps.is_stopped:  # on all ranks after the same step, which is saved
            return
        with meter.paused():
            with ctx.timer.evaluating():  # its time counts apart from training
                metrics = evaluate(ctx, cfg, setup)
            progress.end_epoch(metrics)
            steps.save(metrics)

    ctx.end_reason = progress.end_reason


def save_step(ctx: Context, setup: "StageSetup", step: int, metrics: Mapping[str, float]) -> None:
    """Save on every rank; each stage adds its own part of the model, divided among its replicas."""
    stage, mesh = setup.engine.stage, setup.mesh
    trainer = {"position": setup.progress.state_dict(), "units": [list(units) for units in setup.stage_units]}
    weights = stage.state_dict()
    own_names = list(weights)[mesh.replica :: mesh.num_replicas]
    names = [name for name, _ in stage.named_parameters()]  # the order in the optimizer, in one group
    states = {}
    for index, state in setup.optimizer.state_dict()["state"].items():
        if names[index] in own_names:
            states[names[index]] = state
    shard = Shard(model={name: weights[name] for name in own_names}, trainer={"optimizer": states})
    ctx.save(step, model=None, trainer=trainer, local=setup.meter.state_dict(), metrics=metrics, shard=shard)


def train_step(
    cfg: Config, setup: "StageSetup", images: Tensor | None, labels: Tensor | None, num_micro_batches: int
) -> dict[str, Any]:
    """Do one optimizer step of this stage. Returns sums for the metrics; all stages but the last have a loss of 0."""
    mesh, engine = setup.mesh, setup.engine
    shares = mesh.shares(num_micro_batches)
    waited_s_before = engine.waited_s
    if setup.copies is not None:
        setup.copies.begin_step()
    loss = engine.step(
        images,
        labels,
        num_micro_batches=len(shares[mesh.replica]),
        micro_batch_size=cfg.data.batch_size // num_micro_batches,
        batch_size=cfg.data.batch_size,
    )
    if setup.copies is not None:
        setup.copies.end_step(shares)
    if cfg.optim.max_grad_norm is not None:
        clip_gradients(setup, cfg.optim.max_grad_norm)
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    return {"loss_sum": loss, "num_steps": 1, "idle_s": engine.waited_s - waited_s_before}


def clip_gradients(setup: "StageSetup", max_norm: float) -> None:
    """Clip by the norm of the whole model's gradient, which does not depend on the split."""
    parameters = list(setup.engine.stage.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch.zeros(setup.num_parameters, device=gradients[0].device)
    if setup.mesh.replica == 0:
        own_parameters = slice(setup.first_parameter, setup.first_parameter + len(gradients))
        norms[own_parameters] = torch.stack(torch._foreach_norm(gradients))
    dist.all_reduce(norms)  # each element has one owner, the others add zeros
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norms.norm())


def interval_metrics(ctx: Context, cfg: Config, setup: "StageSetup") -> dict[str, float]:
    """Return the training metrics since the last logged step, and each stage's time per step without waits.

    The time of a stage is the mean over its replicas.
    """
    meter, mesh, progress = setup.meter, setup.mesh, setup.progress
    elapsed_s, idle_s, num_steps = meter.elapsed_s, meter.sums["idle_s"], meter.sums["num_steps"]
    own_busy_s = [0.0] * mesh.num_stages  # by stage, of which this rank knows its own
    own_busy_s[mesh.stage] = (elapsed_s - idle_s) / mesh.num_replicas
    own_sums = [float(meter.sums["loss_sum"]), idle_s, elapsed_s, *own_busy_s]
    loss_sum, all_idle_s, all_elapsed_s, *busy_s = ctx.groups.sum(own_sums)
    num_samples = cfg.data.batch_size * num_steps
    shares = mesh.shares(cfg.section(PipelineConfig).num_micro_batches)
    num_micro_batches = max(len(share) for share in shares)  # of the replica that is ready last
    metrics = {
        "train/loss": loss_sum / num_steps,
        "train/lr": setup.optimizer.param_groups[0]["lr"],
        "train/epoch": progress.epochs,
        "train/samples_per_s": num_samples / elapsed_s,
        "samples": progress.add_samples(num_samples),
        "pipeline/bubble": all_idle_s / all_elapsed_s,
        "pipeline/bubble_in_theory": ideal_bubble(mesh.num_stages, num_micro_batches),
    }
    for index, seconds in enumerate(busy_s):
        metrics[f"pipeline/busy_s/stage_{index}"] = seconds / num_steps
    return metrics


def evaluate(ctx: Context, cfg: Config, setup: "StageSetup") -> dict[str, float]:
    """Return loss and accuracy over the test set, each sample counted once, equal on all ranks."""
    data, mesh, engine = setup.data, setup.mesh, setup.engine
    size = EVAL_BATCH_SIZE
    num_samples = len(data.test)
    num_batches = math.ceil(num_samples / size)
    # All batches have the same size; the samples that fill up the last one are not counted.
    index_batches = (torch.arange(num_batches * size) % num_samples).split(size)
    own_numbers = share_of(mesh.replica, mesh.num_replicas, num_batches)
    own_batches = index_batches[own_numbers.start : own_numbers.stop]

    def image_batches() -> Iterator[Tensor | None]:
        if not mesh.is_first_stage:
            yield from [None] * len(own_batches)
            return
        for images, _ in data.test.batches(own_batches):
            yield as_rgb(cfg, images)

    engine.stage.eval()
    loss_sum = torch.zeros((), device=ctx.device, dtype=torch.float64)
    num_correct = torch.zeros((), device=ctx.device, dtype=torch.int64)
    outputs = engine.infer(image_batches(), num_batches=len(own_batches), batch_size=size)
    for logits, indices, number in zip(outputs, own_batches, own_numbers, strict=True):
        if logits is not None:
            num_counted = min(size, num_samples - number * size)
            logits = logits[:num_counted].float()
            labels = data.test.labels[indices[:num_counted]].to(ctx.device)
            loss_sum += F.cross_entropy(logits, labels, reduction="sum")
            num_correct += (logits.argmax(dim=1) == labels).sum()
        ctx.timer.alive()  # a heartbeat, since an evaluation counts no steps
    loss, correct = ctx.groups.sum([loss_sum.item(), num_correct.item()])
    return {"eval/loss": loss / num_samples, "eval/accuracy": correct / num_samples}


def step_batches(
    ctx: Context, cfg: Config, setup: "StageSetup", *, epoch: int, start: int
) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Yield this replica's (images, labels) of each step of the epoch from `start` on.

    Only the first stage has images, and only the last one has labels. All batches are full; the remaining samples are
    part of other epochs, which have another order. The order does not depend on the number of replicas.
    """
    data, mesh = setup.data, setup.mesh
    size = cfg.data.batch_size
    num_samples = len(data.train) // size * size
    generator = torch.Generator().manual_seed(cfg.seed + epoch)
    order = torch.randperm(len(data.train), generator=generator)[:num_samples]
    num_micro_batches = cfg.section(PipelineConfig).num_micro_batches
    micro_batch_size = size // num_micro_batches
    share = mesh.shares(num_micro_batches)[mesh.replica]
    index_batches = []
    for batch in order.split(size)[start:]:
        index_batches.append(batch[share.start * micro_batch_size : share.stop * micro_batch_size])
    batches = None
    if mesh.is_first_stage:
        batches = data.train.batches(index_batches, epoch=epoch)
    for indices in index_batches:
        images, labels = None, None
        if batches is not None:
            images = as_rgb(cfg, next(batches)[0])
        if mesh.is_last_stage:
            labels = data.train.labels[indices].to(ctx.device)
        yield images, labels


def as_rgb(cfg: Config, images: Tensor) -> Tensor:
    """Return images [B, 3, H, W]; a grey image becomes three equal channels."""
    if images.shape[1] == RGB_CHANNELS:
        return images
    return images.expand(-1, RGB_CHANNELS, -1, -1).contiguous(memory_format=memory_format_of(cfg))


def memory_format_of(cfg: Config) -> torch.memory_format:
    """Return the memory format of images and of the model's weights."""
    if cfg.model.channels_last:
        return torch.channels_last
    return torch.contiguous_format


# Set-up of a stage: data, split of the model, engine, and the state of a checkpoint.


@dataclass(frozen=True, kw_only=True)
class StageSetup:
    """This rank's stage, which has consecutive parameters of the model, and the objects that train it."""

    data: ImageData
    mesh: StageMesh
    engine: StageEngine
    copies: StageCopies | None  #: of the stage in all replicas; None with one replica
    optimizer: torch.optim.Optimizer
    progress: Progress  #: steps and epochs done so far
    meter: Meter  #: sums of the loss and of idle time since the last logged step
    stage_units: list[tuple[str, ...]]  #: names of each stage's parts of the model, such as the block `layer1.0`
    first_parameter: int  #: index of this stage's first parameter among those of the whole model
    num_parameters: int  #: of the whole model


def set_up_stage(ctx: Context, cfg: Config) -> StageSetup:
    """Build and restore this rank's stage and connect it to the others; call it on every rank."""
    pipeline = cfg.section(PipelineConfig)
    mesh = stage_mesh(ctx, cfg)
    data = load_data(ctx, cfg, mesh)
    model = build_whole_model(cfg, data)
    ctx.report.log_model_size(sum(parameter.numel() for parameter in model.parameters()))
    if ctx.device.type == "cpu":
        use_onednn_for_pointwise(model)  # faster 1x1 convolutions, with the same names and results
    memory_format = memory_format_of(cfg)
    model = model.to(memory_format=memory_format)
    saved = ctx.restore()
    ctx.init_from(model)  # each stage takes its part below
    # At least 2: batch norm needs more than one value of a channel.
    micro_batch_size = max(2, cfg.data.batch_size // pipeline.num_micro_batches)
    shape = (micro_batch_size, RGB_CHANNELS, data.image_size, data.image_size)
    example = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stage_units = choose_stages(ctx, cfg, model, example.contiguous(memory_format=memory_format), saved)
    names = [name for name, _ in model.named_parameters()]
    shapes = activation_shapes(model, stage_units, data.image_size)
    stage = Stage(model, stage_units[mesh.stage])
    del model  # frees the other stages
    stage = stage.to(ctx.device)
    first_name, _ = next(stage.named_parameters())
    wire = Wire(mesh, ctx.device, shapes, memory_format, ctx.groups.timeout, ctx.timer.waiting)
    optimizer = build_optimizer(stage.parameters(), cfg.optim)
    position = None
    if saved is not None:
        load_stage(stage, optimizer, saved, stage_units, mesh)
        position = saved.trainer["position"]
    return StageSetup(
        data=data,
        mesh=mesh,
        engine=StageEngine(stage, wire, index=mesh.stage, num_stages=mesh.num_stages),
        copies=stage_copies(stage, mesh, ctx.groups.timeout),
        optimizer=optimizer,
        progress=Progress(cfg, len(data.train) // cfg.data.batch_size, position),
        meter=Meter(restored_sums(ctx, saved), ctx.device),
        stage_units=stage_units,
        first_parameter=names.index(first_name),
        num_parameters=len(names),
    )


def stage_mesh(ctx: Context, cfg: Config) -> StageMesh:
    """Return the mesh of the run. Raises ConfigError if a replica would have no micro-batch."""
    num_stages = cfg.roles["stage"]
    num_replicas = ctx.world_size // num_stages
    num_micro_batches = cfg.section(PipelineConfig).num_micro_batches
    if num_replicas > num_micro_batches:
        raise ConfigError(
            f"pipeline.num_micro_batches={num_micro_batches} are too few for {num_replicas} replicas of {num_stages}"
            f" stages ({ctx.world_size} ranks, roles.stage={num_stages}), each of which needs one: use at most"
            f" {num_micro_batches * num_stages} ranks, or more micro-batches"
        )
    return StageMesh(rank=ctx.rank, num_stages=num_stages, num_replicas=num_replicas)


def restored_sums(ctx: Context, saved: Restored | None) -> dict[str, Any] | None:
    """Return the state of this rank's meter from a checkpoint that another number of ranks may have saved.

    Not `Meter.restore`: every rank counts the same steps, so that sums over ranks would be wrong.
    """
    if saved is None:
        return None
    if saved.local is not None:
        return saved.local
    parts = [part for part in saved.local_by_rank if part]
    if not parts:
        return None
    loss_sum = 0.0
    if ctx.is_main:
        loss_sum = sum(float(part["loss_sum"]) for part in parts)
    return {
        "loss_sum": loss_sum,
        "num_steps": parts[0]["num_steps"],
        "idle_s": sum(part["idle_s"] for part in parts) / len(parts),
        "elapsed_s": max(part["elapsed_s"] for part in parts),
    }


def load_data(ctx: Context, cfg: Config, mesh: StageMesh) -> ImageData:
    """Return the dataset. Only first stages read images, so nothing is preloaded for the others."""
    alive = ctx.timer.alive  # the heartbeat, since loading counts no steps
    if ctx.topology.local_rank == 0:
        prepare(cfg.data, alive)
    ctx.groups.await_all(alive)  # the other ranks of the node wait for the download
    data = load_datasets(
        cfg.data,
        cfg.seed,
        ctx.device,
        channels_last=cfg.model.channels_last,
        preload=mesh.is_first_stage,
        alive=alive,
    )
    ctx.groups.await_all(alive)  # and for a first stage, which alone reads images
    if len(data.train) < cfg.data.batch_size:
        raise ConfigError(f"data.batch_size={cfg.data.batch_size}, but there are {len(data.train)} training images")
    log_image_data(ctx, cfg.data, data, cfg.seed)
    return data


def build_whole_model(cfg: Config, data: ImageData) -> nn.Module:
    """Return the unsplit model for three channels (grey images become three equal ones), equal on all ranks."""
    return build_model(
        cfg.model.name, num_classes=data.num_classes, in_channels=RGB_CHANNELS, image_size=data.image_size
    )


def load_stage(
    stage: Stage,
    optimizer: torch.optim.Optimizer,
    saved: Restored,
    stage_units: Sequence[Sequence[str]],
    mesh: StageMesh,
) -> None:
    """Load what belongs to this rank's stage from a checkpoint, which may be of other stages and replicas."""
    owners = range(saved.world_size)
    if saved.trainer["units"] == [list(units) for units in stage_units]:  # the same stages
        owners = range(mesh.stage, saved.world_size, mesh.num_stages)
    weights: dict[str, Tensor] = {}
    states: dict[str, Any] = {}
    for owner in owners:
        shard = saved.shard(owner)
        assert shard is not None, "every rank saves a part of its stage"
        weights |= shard["model"]
        states |= shard["trainer"]["optimizer"]
    stage.load_state_dict({name: weights[name] for name in stage.state_dict()})
    own_states = {}
    for index, (name, _) in enumerate(stage.named_parameters()):
        if name in states:
            own_states[index] = states[name]
    optimizer.load_state_dict({"state": own_states})


def gather_model(ctx: Context, cfg: Config, setup: StageSetup) -> nn.Module | None:
    """Return the whole model on the CPU of rank 0, None elsewhere; call it on every rank."""
    own_weights = {}
    if setup.mesh.replica == 0:
        own_weights = {name: tensor.cpu() for name, tensor in setup.engine.stage.state_dict().items()}
    parts = ctx.groups.gather(own_weights)
    if not ctx.is_main:
        return None
    weights: dict[str, Tensor] = {}
    for part in parts:
        weights |= part
    model = build_whole_model(cfg, setup.data)
    model.load_state_dict(weights)
    return model
