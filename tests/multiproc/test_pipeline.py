"""A ResNet in stages, compared with the whole ResNet: loss, gradients and statistics are equal bit by bit."""

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from context_scene import new_run, open_context, stop_at
from hpcdist_runs import assert_states_equal
from spawn import Rank, spawn_ranks
from torch import Tensor, nn

from hpcdist.checkpoint.state import load_weights
from hpcdist.config.record_schema import CheckpointConfig, TrackingConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import DataConfig, ModelConfig, OptimConfig, StopConfig, TrainerConfig
from hpcdist.data.datasets import build_model
from hpcdist.errors import ConfigError
from hpcdist.rank.context import Context, close
from hpcdist.run.folder import RunDir
from hpcdist.tracking.journal import read_records
from hpcdist.trainers.pipeline import PipelineConfig, train
from hpcdist.trainers.pipeline.engine import StageEngine
from hpcdist.trainers.pipeline.mesh import StageMesh
from hpcdist.trainers.pipeline.replicas import stage_copies
from hpcdist.trainers.pipeline.stages import Stage, activation_shapes, cut_after, unit_names, use_onednn_for_pointwise
from hpcdist.trainers.pipeline.wire import Wire

SIZE, NUM_MICRO_BATCHES = 8, 4
CUTS: dict[int, list[str]] = {1: [], 2: ["layer2"], 3: ["layer1.0", "layer3"]}


def whole_model() -> nn.Module:
    torch.manual_seed(0)
    model = build_model("resnet18", num_classes=10, in_channels=3, image_size=32)
    use_onednn_for_pointwise(model)
    return model.to(memory_format=torch.channels_last)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SIZE, 3, 32, 32, generator=generator)
    return images.contiguous(memory_format=torch.channels_last), torch.arange(SIZE)


def run_whole(model: nn.Module, num_steps: int = 2) -> Tensor:
    """Add up the gradients of the steps; return their losses."""
    images, labels = batch()
    losses = []
    for _ in range(num_steps):
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


def one_replica(ctx: Context) -> StageMesh:
    return StageMesh(rank=ctx.rank, num_stages=ctx.world_size, num_replicas=1)


def build_engine(ctx: Context, mesh: StageMesh) -> StageEngine:
    """Return the engine of this rank's stage, connected to its neighbours."""
    units = cut_after(unit_names(whole_model()), CUTS[mesh.num_stages])
    shapes = activation_shapes(whole_model(), units, 32)
    wire = Wire(mesh, ctx.device, shapes, torch.channels_last, ctx.groups.timeout, ctx.timer.waiting)
    stage = Stage(whole_model(), units[mesh.stage])
    return StageEngine(stage, wire, index=mesh.stage, num_stages=mesh.num_stages)


def compare_engine(here: Rank, path: Path) -> list[str]:
    with stage_context(here, path) as ctx:
        engine = build_engine(ctx, one_replica(ctx))
        names = differences(ctx, engine, *run_stages(ctx, engine))
        assert engine.waited_s > 0
    return names


@pytest.mark.parametrize("num_stages", [2, pytest.param(3, marks=pytest.mark.faults)])
def test_stages_equal_the_whole_model(tmp_path: Path, num_stages: int) -> None:
    assert spawn_ranks(compare_engine, num_stages, path=new_run(tmp_path).path) == [[]] * num_stages


def step_without_neighbour(here: Rank, path: Path, victim: int) -> str:
    """Do a step, after which the neighbour dies; return the error of the next step."""
    images, labels = batch()
    inputs, targets = (images, None) if here.rank == 0 else (None, labels)
    with stage_context(here, path) as ctx:
        engine = build_engine(ctx, one_replica(ctx))
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


def replicated_step(here: Rank, path: Path, num_replicas: int) -> dict[str, Tensor]:
    """Do a step with the share of a replica, and compare it with the whole batch; return gradients and statistics."""
    images, labels = batch()
    mesh = StageMesh(rank=here.rank, num_stages=here.world_size // num_replicas, num_replicas=num_replicas)
    config = Config(roles={"stage": mesh.num_stages}, data=DataConfig(batch_size=SIZE))
    size = SIZE // NUM_MICRO_BATCHES
    shares = mesh.shares(NUM_MICRO_BATCHES)
    share = shares[mesh.replica]
    own = slice(share.start * size, share.stop * size)
    with open_context(here, RunDir(path), config) as ctx:
        engine = build_engine(ctx, mesh)
        copies = stage_copies(engine.stage, mesh, ctx.groups.timeout)
        assert copies is not None
        copies.begin_step()
        loss = engine.step(
            images[own] if mesh.is_first_stage else None,
            labels[own] if mesh.is_last_stage else None,
            num_micro_batches=len(share),
            micro_batch_size=size,
            batch_size=SIZE,
        )
        copies.end_step(shares)
        (whole_loss,) = ctx.groups.sum([float(loss)])
    found = values_of(engine.stage)
    # In this process, since a sum over another number of threads is rounded differently.
    model = whole_model()
    losses = run_whole(model, num_steps=1)
    assert whole_loss == pytest.approx(float(losses[0]), rel=1e-6)
    expected = values_of(model)
    for name, value in found.items():
        # Relative to the whole tensor: elements near 0 are sums that cancel.
        difference = (value - expected[name]).float().norm()
        assert difference <= 1e-5 * expected[name].float().norm(), name
    return found


def values_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients and the statistics of a module."""
    values = dict(module.named_buffers())
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        values[name] = parameter.grad.clone()  # a view of a vector, with which pickle would store the whole vector
    return values


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(2, 2), pytest.param(1, 3, marks=pytest.mark.faults)])
def test_replicas_equal_accumulation_over_the_batch(tmp_path: Path, num_stages: int, num_replicas: int) -> None:
    """Three replicas have 1, 1 and 2 of the four micro-batches."""
    path = new_run(tmp_path).path
    found = spawn_ranks(replicated_step, num_stages * num_replicas, path=path, num_replicas=num_replicas)
    for rank, values in enumerate(found):
        assert_states_equal(values, found[rank % num_stages])


def trainer_config(num_stages: int = 2) -> Config:
    """Six steps of an epoch, of which each has four micro-batches, and an evaluation."""
    return Config(
        trainer=TrainerConfig(target="pipeline"),
        roles={"stage": num_stages},
        model=ModelConfig(name="resnet18"),
        data=DataConfig(name="synthetic", image_size=32, num_samples=96, num_classes=5, batch_size=16),
        optim=OptimConfig(name="sgd", lr=0.01, max_grad_norm=1.0),
        stop=StopConfig(max_epochs=1),
        checkpoint=CheckpointConfig(monitor="eval/loss", monitor_mode="min"),
        tracking=TrackingConfig(log_every_steps=4),
        sections={"pipeline": PipelineConfig(num_micro_batches=NUM_MICRO_BATCHES)},
    )


def fit(here: Rank, path: Path, last_step: int | None = None) -> None:
    """Train until a step as the worker does, or to the end."""
    cfg = trainer_config()
    with open_context(here, RunDir(path), cfg) as ctx:
        stop_at(ctx, last_step)
        ctx.export_model = lambda *_: None  # type: ignore[method-assign]
        train.train(ctx, cfg)
        close(ctx)


def results(run: RunDir) -> tuple[dict[str, Tensor], dict[tuple[str, int], float]]:
    """Return weights and statistics, and the metrics that do not depend on the clock."""
    found = {}
    for file in sorted(run.journal.glob("*.jsonl")):
        for record in read_records(file)[0]:
            for key, value in record.metrics.items():
                if key in ("train/loss", "eval/loss", "eval/accuracy", "samples"):
                    found[key, record.step] = value
    return load_weights(max(run.checkpoints.glob("step-*"))), found


@pytest.mark.slow
def test_runs_continue_with_other_numbers_of_replicas(tmp_path: Path) -> None:
    """A stop after step 2 is between two logged steps: the sums of the first steps are part of the next point."""
    run = new_run(tmp_path, "two")
    spawn_ranks(fit, 4, path=run.path)
    shards = [torch.load(file, weights_only=True)["model"] for file in run.checkpoints.glob("*/shard-*.pt")]
    assert sorted(map(len, shards)) == [30, 30, 31, 31], "the replicas share the work of a save"
    expected = results(run)
    assert {("train/loss", 4), ("eval/loss", 6)} <= expected[1].keys()
    for name, ranks in {"same": (4, 4), "fewer": (4, 2), "more": (2, 4)}.items():
        run = new_run(tmp_path, name)
        spawn_ranks(fit, ranks[0], path=run.path, last_step=2)
        spawn_ranks(fit, ranks[1], path=run.path)
        found = results(run)
        if name == "same":
            assert_states_equal(found, expected)
        else:
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_replicas_without_a_micro_batch_are_refused(tmp_path: Path) -> None:
    cfg = dataclasses.replace(trainer_config(num_stages=1), sections={"pipeline": PipelineConfig(num_micro_batches=2)})
    errors = spawn_ranks(refusal, 3, path=new_run(tmp_path).path, cfg=cfg)
    assert errors[0] == (
        "pipeline.num_micro_batches=2 are too few for 3 replicas of 1 stages (3 ranks, roles.stage=1), each of which"
        " needs one: use at most 2 ranks, or more micro-batches"
    )


def refusal(here: Rank, path: Path, cfg: Config) -> str:
    with open_context(here, RunDir(path), cfg) as ctx, pytest.raises(ConfigError) as caught:
        train.set_up_stage(ctx, cfg)
    return str(caught.value)
