"""Set-up of the pipeline trainer: data, split of the model, engine, and the state of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hpcdist.config.schema import Config
from hpcdist.data.download import prepare
from hpcdist.data.identity import log_image_data
from hpcdist.data.loading import ImageData, load_datasets
from hpcdist.errors import ConfigError
from hpcdist.models.image import build_model
from hpcdist.rank.checkpointing import Restored
from hpcdist.rank.context import Context
from hpcdist.rank.network.rpc import rpc_group
from hpcdist.rank.optimizer import build_optimizer
from hpcdist.trainers.pipeline.engines import RpcEngine
from hpcdist.trainers.pipeline.schema import PipelineConfig
from hpcdist.trainers.pipeline.stage_checkpoint import load_stage
from hpcdist.trainers.pipeline.stages import Stage, use_onednn_for_pointwise
from hpcdist.trainers.pipeline.tuning import choose_cut
from hpcdist.trainers.pipeline.wire import Inbox, Wire


@dataclass(frozen=True, kw_only=True)
class StageSetup:
    """This rank's stage, ready to train."""

    data: ImageData
    engine: RpcEngine
    optimizer: torch.optim.Optimizer
    saved: Restored | None  #: the checkpoint that the stage has been loaded from
    units: list[tuple[str, ...]]  #: of every stage
    parameter_slots: range  #: indices of this stage's parameters among those of the whole model
    num_parameters: int  #: of the whole model

    @property
    def stage(self) -> Stage:
        """The part of the model on this rank."""
        return self.engine.stage


@contextmanager
def open_stage(ctx: Context, cfg: Config) -> Iterator[StageSetup]:
    """Build and restore this rank's stage and connect it to the others; call it on every rank."""
    if ctx.topology.local_rank == 0:
        prepare(cfg.data)
    ctx.barrier()  # the other ranks of the node wait for the download
    # Only the first stage reads images, so nothing is preloaded for the others.
    data = load_datasets(cfg.data if ctx.rank == 0 else replace(cfg.data, preload="never"), cfg.seed)
    if len(data.train) < cfg.data.batch_size:
        raise ConfigError([f"data.batch_size={cfg.data.batch_size}, but there are {len(data.train)} training images"])
    log_image_data(ctx, cfg.data, data, cfg.seed)
    model = build_whole_model(cfg, data)
    ctx.log_model_size(sum(parameter.numel() for parameter in model.parameters()))
    if ctx.device.type == "cpu":
        use_onednn_for_pointwise(model)
    if cfg.model.channels_last:
        model = model.to(memory_format=torch.channels_last)
    saved = ctx.restore()
    example = _example_images(cfg, data)
    units = choose_cut(ctx, model, example, saved)
    stage = Stage(model, units[ctx.rank], checkpointing=cfg.section(PipelineConfig).activation_checkpointing)
    names = [name for name, _ in model.named_parameters()]
    own = [name for name, _ in stage.named_parameters()]
    first = names.index(own[0]) if own else 0
    del model  # frees the other stages
    stage, inbox, schedule = stage.to(ctx.device), Inbox(), cfg.section(PipelineConfig).schedule
    with rpc_group(ctx, inbox.functions) as group:
        wire = Wire(ctx, group, inbox)
        engine = RpcEngine(stage, wire, index=ctx.rank, num_stages=ctx.world_size, schedule=schedule)
        optimizer = build_optimizer(stage.parameters(), cfg.optim)
        if saved is not None:
            load_stage(stage, optimizer, saved, units, ctx.rank)
        yield StageSetup(
            data=data,
            engine=engine,
            optimizer=optimizer,
            saved=saved,
            units=units,
            parameter_slots=range(first, first + len(own)),
            num_parameters=len(names),
        )


def build_whole_model(cfg: Config, data: ImageData) -> nn.Module:
    """Return the unsplit model, initialised from torch's global generator: before training equal on all ranks.

    It takes three channels: grey images become three equal ones.
    """
    return build_model(cfg.model.name, num_classes=data.num_classes, in_channels=3, image_size=data.image_size)


def _example_images(cfg: Config, data: ImageData) -> Tensor:
    """Return random images, as many as a micro-batch has (a quarter of the batch if the number is to be measured)."""
    number = cfg.section(PipelineConfig).num_micro_batches
    size = max(2, cfg.data.batch_size // (number if isinstance(number, int) else 4))
    shape = (size, 3, data.image_size, data.image_size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return images.contiguous(memory_format=torch.channels_last) if cfg.model.channels_last else images
