"""`model.init_from`: ranks and trainers start from the copy of the weights, and a resume does not read it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from context_scene import SINGLE_RANK, new_run, open_context
from hpcdist_runs import Runs
from spawn import Rank, spawn_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hpcdist.checkpoint.state import load_weights
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import ModelConfig
from hpcdist.data.datasets import build_model
from hpcdist.errors import TrainerError
from hpcdist.rank.context import Context, close
from hpcdist.run.folder import RunDir
from hpcdist.run.weight_files import weight_file
from hpcdist.trainers.hybrid import HybridConfig
from hpcdist.trainers.hybrid.train import ClickModel
from hpcdist.trainers.rl import RlConfig
from hpcdist.trainers.rl.policy import Policy
from hpcdist.trainers.rnn import RnnConfig
from hpcdist.trainers.rnn.train import LanguageModel

CONFIG = Config(model=ModelConfig(init_from="old.pth"))
WEIGHT = torch.tensor([[1.0, 2.0, 3.0]])


def run_from_weights(folder: Path) -> RunDir:
    """Return a new run with a copy, in its folder, of the weights of `nn.Linear(3, 1)`."""
    run = new_run(folder)
    torch.save({"module.weight": WEIGHT, "module.bias": torch.zeros(1)}, folder / "old.pth")
    weight_file(str(folder / "old.pth")).copy_to(run.init_from)
    return run


def loop(ctx: Context, *, restores: bool = False) -> torch.Tensor:
    """Train a step of a loop; return the weights before it."""
    net = nn.Linear(3, 1)
    if restores:
        ctx.restore()
        ctx.init_from(net)
    else:
        ctx.init_from(net)
    model = ctx.wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = ctx.steps(1 + (ctx._store.newest_step() or 0), model=model, optimizer=optimizer)
    before = net.weight.detach().clone()
    for _ in steps:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    close(ctx)
    return before


def start_and_resume(here: Rank, path: Path) -> list[torch.Tensor]:
    run, found = RunDir(path), []
    for restores in (False, True):
        with open_context(here, run, CONFIG) as ctx:
            found.append(loop(ctx, restores=restores))
        if here.rank == 0:
            shutil.rmtree(run.init_from, ignore_errors=True)
        torch.distributed.barrier()
    with open_context(here, run, CONFIG) as ctx:
        found.append(loop(ctx))
    return found


def test_resume_does_not_read_the_weights_again(tmp_path: Path) -> None:
    run = run_from_weights(tmp_path)
    for first, second, third in spawn_ranks(start_and_resume, 2, path=run.path):
        assert torch.equal(first, WEIGHT)
        assert torch.allclose(second, WEIGHT - 0.2)  # after one step with the gradient 2 of each weight
        assert torch.allclose(third, WEIGHT - 0.4)


def test_run_with_damaged_checkpoints_starts_from_the_weights(tmp_path: Path) -> None:
    run = run_from_weights(tmp_path)
    with open_context(SINGLE_RANK, run, CONFIG) as ctx:
        net = nn.Linear(3, 1)
        ctx.init_from(net)
        ctx.save(1, model=net, trainer={})
        close(ctx)
    (run.checkpoints / "step-00000001" / "model.pt").write_bytes(b"damaged")
    with open_context(SINGLE_RANK, run, CONFIG) as ctx:
        net = nn.Linear(3, 1)
        assert ctx.restore() is None
        ctx.init_from(net)
        assert torch.equal(net.weight, WEIGHT)
        close(ctx)


def test_trainer_that_ignores_the_weights_is_an_error(tmp_path: Path) -> None:
    run = run_from_weights(tmp_path)
    message = (
        r"^model.init_from=old.pth has no effect: the trainer does not call ctx.init_from\(module\) before its loop"
    )
    with open_context(SINGLE_RANK, run, CONFIG) as ctx, pytest.raises(TrainerError, match=message):
        ctx.should_stop(1)
    roles = replace(CONFIG, roles={"trainer": 1})  # another rank may have the model
    with open_context(SINGLE_RANK, run, roles) as ctx:
        assert not ctx.should_stop(1)
        close(ctx)


def weights_of_sharded_model(here: Rank, path: Path) -> tuple[torch.Tensor, int]:
    sharded = nn.Linear(3, 1)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    with open_context(here, RunDir(path), CONFIG) as ctx:
        ctx.init_from(sharded)
        close(ctx)
    weight = sharded.weight
    assert isinstance(weight, DTensor)
    return weight.full_tensor().detach(), weight.to_local().numel()


def test_each_rank_reads_its_part_of_a_sharded_model(tmp_path: Path) -> None:
    run = run_from_weights(tmp_path)
    found = spawn_ranks(weights_of_sharded_model, 2, path=run.path)
    assert all(torch.equal(weight, WEIGHT) for weight, _ in found)
    assert [size for _, size in found] == [3, 0]  # of one row, the second rank has nothing


# --- The shipped trainers: with a learning rate of almost 0 a run ends with the weights from which it started

RNN = RnnConfig(embedding_size=8, hidden_size=8, num_layers=1, vocab_size=50)
HYBRID = HybridConfig(tables={"user": 30, "item": 20}, embedding_dim=4, hidden_sizes=[8])
MODELS: dict[str, tuple[str, Callable[[], nn.Module], list[str]]] = {
    "ddp": (
        "ddp_digits",
        lambda: build_model("simple_cnn", num_classes=10, in_channels=1, image_size=28),
        ["data.num_workers=0"],
    ),
    "pipeline": (
        "pipeline_resnet50",
        lambda: build_model("resnet18", num_classes=10, in_channels=3, image_size=32),
        ["model.name=resnet18", "data.image_size=32"],
    ),
    "rnn": (
        "rnn_lm",
        lambda: LanguageModel(RNN, RNN.vocab_size),
        ["rnn={embedding_size: 8, hidden_size: 8, num_layers: 1, vocab_size: 50}", "roles.parameter_server=2"],
    ),
    "hybrid": (
        "hybrid_clicks",
        lambda: ClickModel(HYBRID, bag_size=1),
        [
            "hybrid={tables: {user: 30, item: 20}, embedding_dim: 4, hidden_sizes: [8]}",
            "hybrid.num_samples=5000",
            "hybrid.table_lr=1e-12",
        ],
    ),
    "rl": (
        "rl_cartpole",
        lambda: Policy(RlConfig(hidden_sizes=[8]), 4, 2, is_discrete=True),
        ["rl.hidden_sizes=[8]", "rl.num_rollout_steps=16", "rl.num_eval_episodes=2"],
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize(
    "trainer", ["ddp", "hybrid", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pipeline", "rnn", "rl"))]
)
def test_trainer_starts_from_the_weights(runs: Runs, tmp_path: Path, trainer: str) -> None:
    config, build, overrides = MODELS[trainer]
    torch.manual_seed(99)
    expected = build().state_dict()
    torch.save({f"module.{name}": tensor for name, tensor in expected.items()}, tmp_path / "weights.pth")
    name = f"init-from-{trainer}"
    changed: list[Any] = [*overrides, f"model.init_from={tmp_path}/weights.pth", "optim.lr=1e-12", "stop.max_steps=1"]
    arguments = runs.config(name, f"experiment={runs.experiment}", *changed)
    code, output = runs.command("run", config, *arguments[1:], **runs.unshipped)
    assert code == 0, output
    found = load_weights(runs.run_dir(name).checkpoints / "step-00000001")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        if "running_" not in key and "num_batches" not in key:  # which a forward pass changes
            assert torch.allclose(found[key], tensor, atol=1e-6), key
