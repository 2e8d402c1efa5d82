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
from hpcdist.errors import PeerLost, RemoteError
from hpcdist.rank.context import Context
from hpcdist.rank.rpc import rpc_group
from hpcdist.run.folder import RunDir
from hpcdist.trainers.pipeline.stages import RpcEngine, Stage, Wire, cut_after, unit_names, use_onednn_for_pointwise

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


def run_stages(ctx: Context, engine: RpcEngine) -> tuple[Tensor, list[Tensor]]:
    """Return the losses of two steps, and the logits of five batches."""
    images, labels = batch()
    is_last = ctx.rank == ctx.world_size - 1
    inputs = images if ctx.rank == 0 else None
    losses = [engine.step(inputs, labels if is_last else None, NUM_MICRO_BATCHES) for _ in range(2)]
    engine.stage.eval()
    logits = [y.clone() for y in engine.infer([inputs] * 5) if y is not None]
    engine.stage.train()
    return torch.stack(losses), logits


def differences(ctx: Context, engine: RpcEngine, losses: Tensor, logits: list[Tensor]) -> list[str]:
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


def compare_rpc_engine(here: Rank, path: Path) -> list[str]:
    wire = Wire(torch.device("cpu"))
    with stage_context(here, path) as ctx, rpc_group(ctx, wire.functions) as wire.rpc:
        units = cut_after(unit_names(whole_model()), CUTS[here.world_size])
        stage = Stage(whole_model(), units[ctx.rank])
        engine = RpcEngine(stage, wire, index=ctx.rank, num_stages=ctx.world_size)
        names = differences(ctx, engine, *run_stages(ctx, engine))
        assert engine.idle_s > 0
    return names


@pytest.mark.parametrize("num_stages", [2, pytest.param(3, marks=pytest.mark.faults)])
def test_rpc_engine_equals_the_whole_model(tmp_path: Path, num_stages: int) -> None:
    assert spawn_ranks(compare_rpc_engine, num_stages, path=new_run(tmp_path).path) == [[]] * num_stages


def two_steps(here: Rank, path: Path, wire: Wire) -> None:
    images, labels = batch()
    inputs, targets = (images, None) if here.rank == 0 else (None, labels)
    with stage_context(here, path) as ctx, rpc_group(ctx, wire.functions) as wire.rpc:
        stage = Stage(whole_model(), cut_after(unit_names(whole_model()), CUTS[2])[ctx.rank])
        engine = RpcEngine(stage, wire, index=ctx.rank, num_stages=2)
        for _ in range(2):
            engine.step(inputs, targets, NUM_MICRO_BATCHES)


class RefusingWire(Wire):
    """It takes the tensors of one step, and none of the next one."""

    def put(self, kind: str, number: int, tensor: Tensor) -> None:
        if number >= NUM_MICRO_BATCHES:
            raise OSError("no memory is left")
        super().put(kind, number, tensor)


def step_without_delivery(here: Rank, path: Path, receiver: int) -> str:
    """Write the sender's error of the step in which the receiver takes no tensors; return that of the receiver."""
    with pytest.raises((PeerLost, RemoteError)) as caught:
        two_steps(here, path, (RefusingWire if here.rank == receiver else Wire)(torch.device("cpu")))
    if here.rank != receiver:
        (path / "error").write_text(str(caught.value))
        os.kill(os.getpid(), signal.SIGKILL)  # as the supervisor does; until then the receiver waits for a tensor
    return str(caught.value)


@pytest.mark.parametrize("receiver", [0, 1])
def test_undelivered_tensor_ends_the_step_of_the_sender(tmp_path: Path, receiver: int) -> None:
    path, sender = new_run(tmp_path).path, 1 - receiver
    outcomes = spawn_ranks(step_without_delivery, 2, killed=[sender], path=path, receiver=receiver)
    error = (path / "error").read_text()
    assert error.startswith(f"stage:{receiver} (rank {receiver} on ")
    assert "OSError: no memory is left" in error
    assert outcomes[receiver].startswith(f"stage:{sender} (rank {sender}) does not answer: ")
