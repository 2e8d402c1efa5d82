"""A ResNet in stages, compared with the whole ResNet: loss, gradients and statistics are equal bit by bit."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from context_scene import new_run, open_context
from spawn import Rank, spawn_ranks
from torch import Tensor, nn

from hpcdist.config.schema import Config
from hpcdist.config.training_schema import DataConfig
from hpcdist.data.datasets import build_model
from hpcdist.rank.context import Context
from hpcdist.run.folder import RunDir
from hpcdist.trainers.pipeline.engine import StageEngine
from hpcdist.trainers.pipeline.mesh import StageMesh
from hpcdist.trainers.pipeline.stages import Stage, activation_shapes, cut_after, unit_names, use_onednn_for_pointwise
from hpcdist.trainers.pipeline.wire import Wire

SIZE, NUM_MICRO_BATCHES = 8, 4
CUTS = {2: ["layer2"], 3: ["layer1.0", "layer3"]}


def whole_model() -> nn.Module:
    torch.manual_seed(0)
    model = build_model("resnet18", num_classes=10, in_channels=3, image_size=32)
    use_onednn_for_pointwise(model)
    return model.to(memory_format=torch.channels_last)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SIZE, 3, 32, 32, generator=generator)
    return images.contiguous(memory_format=torch.channels_last), torch.arange(SIZE)


def run_whole(model: nn.Module) -> Tensor:
    """Add up the gradients of two steps; return their losses."""
    images, labels = batch()
    losses = []
    for _ in range(2):
        total = torch.zeros(())
        for x, y in zip(images.chunk(NUM_MICRO_BATCHES), labels.chunk(NUM_MICRO_BATCHES), strict=True):
            loss = F.cross_entropy(model(x), y, reduction="sum") / SIZE
            loss.backward()
            total += loss.detach()
        losses.append(total)
    return torch.stack(losses)


@cache
def trained_whole_model() -> tuple[nn.Module, Tensor]:
    """Return the whole model with its gradients, and its losses."""
    model = whole_model()
    return model, run_whole(model)


def step(engine: StageEngine, images: Tensor | None, labels: Tensor | None) -> Tensor:
    size = SIZE // NUM_MICRO_BATCHES
    return engine.step(images, labels, num_micro_batches=NUM_MICRO_BATCHES, micro_batch_size=size, batch_size=SIZE)


def run_stages(ctx: Context, engine: StageEngine) -> tuple[Tensor, list[Tensor]]:
    """Return the losses of two steps, and the logits of five batches."""
    images, labels = batch()
    is_last = ctx.rank == ctx.world_size - 1
    inputs = images if ctx.rank == 0 else None
    losses = [step(engine, inputs, labels if is_last else None) for _ in range(2)]
    engine.stage.eval()
    outputs = engine.infer([inputs] * 5, num_batches=5, batch_size=SIZE)
    logits = [y.clone() for y in outputs if y is not None]
    engine.stage.train()
    return torch.stack(losses), logits


def differences(ctx: Context, engine: StageEngine, losses: Tensor, logits: list[Tensor]) -> list[str]:
    """Return the names of the values of this stage that differ from the whole model."""

    def same(ours: Tensor | None, whole: Tensor | None) -> bool:
        assert ours is not None
        assert whole is not None
        return torch.equal(ours, whole)

    model, expected = trained_whole_model()
    found = []
    if ctx.rank == ctx.world_size - 1:
        found += [] if same(losses, expected) else [f"losses {losses} {expected}"]
        with torch.no_grad():
            expected_logits = model.eval()(batch()[0])
        found += [] if len(logits) == 5 and all(same(one, expected_logits) for one in logits) else ["logits"]
    else:
        assert (losses.tolist(), logits) == ([0.0, 0.0], [])
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    found += [n for n, p in engine.stage.named_parameters() if not same(p.grad, parameters[n].grad)]
    return found + [n for n, b in engine.stage.named_buffers() if not same(b, buffers[n])]


@contextmanager
def stage_context(here: Rank, path: Path) -> Iterator[Context]:
    config = Config(roles={"stage": here.world_size}, data=DataConfig(batch_size=SIZE))
    with open_context(here, RunDir(path), config) as ctx:
        yield ctx


def build_engine(ctx: Context) -> StageEngine:
    """Return the engine of this rank's stage, connected to its neighbours."""
    units = cut_after(unit_names(whole_model()), CUTS[ctx.world_size])
    shapes = activation_shapes(whole_model(), units, 32)
    mesh = StageMesh(rank=ctx.rank, num_stages=ctx.world_size, num_replicas=1)
    wire = Wire(mesh, ctx.device, shapes, torch.channels_last, ctx.groups.timeout, ctx.timer.waiting)
    return StageEngine(Stage(whole_model(), units[ctx.rank]), wire, index=ctx.rank, num_stages=ctx.world_size)


def compare_engine(here: Rank, path: Path) -> list[str]:
    with stage_context(here, path) as ctx:
        engine = build_engine(ctx)
        names = differences(ctx, engine, *run_stages(ctx, engine))
        assert engine.waited_s > 0
    return names


@pytest.mark.parametrize("num_stages", [2, pytest.param(3, marks=pytest.mark.faults)])
def test_stages_equal_the_whole_model(tmp_path: Path, num_stages: int) -> None:
    assert spawn_ranks(compare_engine, num_stages, path=new_run(tmp_path).path) == [[]] * num_stages


def step_without_neighbour(here: Rank, path: Path, victim: int) -> str:
    """Do a step whose neighbour dies before the next one; return the error of that one."""
    images, labels = batch()
    inputs, targets = (images, None) if here.rank == 0 else (None, labels)
    with stage_context(here, path) as ctx:
        engine = build_engine(ctx)
        step(engine, inputs, targets)
        if here.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError) as caught:
            step(engine, inputs, targets)
    return str(caught.value)


@pytest.mark.parametrize("victim", [0, 1])
def test_step_ends_when_a_neighbour_dies(tmp_path: Path, victim: int) -> None:
    errors = spawn_ranks(step_without_neighbour, 2, killed=[victim], path=new_run(tmp_path).path, victim=victim)
    assert "onnection" in errors[1 - victim], "closed or reset by the peer, not a time limit"
