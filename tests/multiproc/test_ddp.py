"""The functions of the DDP trainer on two ranks, compared with one process, and whole trainings."""

import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from context_scene import SINGLE_RANK, new_run, open_context, stop_at
from hpcdist_runs import assert_states_equal
from spawn import Rank, spawn_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcdist.checkpoint.state import load_weights
from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.config.record_schema import CheckpointConfig, TrackingConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    ScheduleConfig,
    StopConfig,
)
from hpcdist.data.datasets import EVAL_BATCH_SIZE, ImageData, Normalize, PreloadedSplit, SimpleCNN, load_datasets
from hpcdist.rank.context import Context, close
from hpcdist.rank.process_group import seed_everything
from hpcdist.rank.training_loop import Progress, build_optimizer, lr_factor, set_lr, settle_buckets
from hpcdist.run.folder import RunDir
from hpcdist.run.samples import parse_npy
from hpcdist.tracking.journal import read_records
from hpcdist.trainers.ddp import train

#: For two ranks. One rank with twice the batch size has the same samples in each step.
DATA = DataConfig(name="synthetic", image_size=8, num_samples=67, num_classes=5, batch_size=8)
SGD = OptimConfig(name="sgd", lr=0.1, momentum=0.0)
SIZES = (1, 2, 3, 7, 2 * EVAL_BATCH_SIZE + 5)


def config(**sections: Any) -> Config:
    return Config(**{"seed": 3, "data": DATA, "optim": SGD, **sections})


def some_images(num: int) -> ImageData:
    """Return a test set of `num` images, equal on all ranks."""
    generator = torch.Generator().manual_seed(num)
    images = torch.randint(0, 256, (num, 1, 8, 8), dtype=torch.uint8, generator=generator)
    normalize = Normalize((0.5,), (0.25,), torch.device("cpu"))
    split = PreloadedSplit(images, torch.randint(0, 5, (num,), generator=generator), normalize=normalize)
    return ImageData(train=split, test=split, num_classes=5, in_channels=1, image_size=8)


def evaluations(ctx: Context) -> dict[str, dict[str, float]]:
    seed_everything(11)
    model = SimpleCNN(num_classes=5, in_channels=1, image_size=8)
    return {str(num): train.evaluate(ctx, model, some_images(num), config()) for num in SIZES}


def train_steps(ctx: Context, cfg: Config, num_steps: int = 3) -> dict[str, Any]:
    """Train some steps; return weights, loss and distances between steps."""
    data = load_datasets(cfg.data, cfg.seed, ctx.device, channels_last=cfg.model.channels_last)
    model = train.build_ddp_model(ctx, cfg, data)
    optimizer = build_optimizer(model.parameters(), cfg.optim)
    scaler = torch.amp.GradScaler(ctx.device.type, enabled=False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    distances, loss_sum = [], 0.0
    progress = Progress(cfg, train.steps_per_epoch(ctx, cfg, data))
    for step, micro_batches in zip(range(num_steps), train.epoch_steps(ctx, cfg, data, model, progress), strict=False):
        set_lr(optimizer, cfg.optim.lr * lr_factor(step, 0, cfg.schedule))
        loss_sum += float(train.train_step(ctx, cfg, model, optimizer, scaler, micro_batches)["loss_sum"])
        after = [parameter.detach().clone() for parameter in model.parameters()]
        distances.append(math.sqrt(sum((a - b).square().sum().item() for a, b in zip(after, before, strict=True))))
        before = after
    return {
        "model": {key: value.clone() for key, value in model.module.state_dict().items()},
        "distances": distances,
        "loss": loss_sum,
    }


VARIANTS = {
    "plain": config(),
    "clipped": config(optim=dataclasses.replace(SGD, max_grad_norm=0.01)),
    "bf16": config(precision=PrecisionConfig(dtype="bf16")),
    "channels_last": config(model=ModelConfig(channels_last=True)),
    "warm-up": config(schedule=ScheduleConfig(warmup_steps=4)),
}


def two_ranks(here: Rank, path: Path) -> dict[str, Any]:
    """Return the results that need a process group, from one start of two ranks."""
    results: dict[str, Any] = {}
    with open_context(here, RunDir(path), config()) as ctx:
        results["evaluations"] = evaluations(ctx)

        # Running statistics differ between ranks.
        norm = nn.BatchNorm2d(1)
        assert norm.running_mean is not None
        model = nn.Sequential(norm, nn.Flatten(), nn.Linear(64, 5))
        norm.running_mean.fill_(here.rank)
        train.evaluate(ctx, model, some_images(5), config())
        results["running mean"] = norm.running_mean.item()

        for name, cfg in VARIANTS.items():
            seed_everything(cfg.seed)
            results[name] = train_steps(ctx, cfg)
        close(ctx)
    return results


def one_rank(here: Rank, path: Path) -> dict[str, Any]:
    cfg = config(data=dataclasses.replace(DATA, batch_size=16))
    with open_context(here, RunDir(path), cfg) as ctx:
        results = train_steps(ctx, cfg)
        close(ctx)
    return results


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn_ranks(two_ranks, 2, path=new_run(tmp_path_factory.mktemp("ddp")).path)


def is_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 1e-5) -> bool:
    assert left.keys() == right.keys()
    return all(torch.allclose(left[key], right[key], rtol=tolerance, atol=tolerance) for key in left)


def test_evaluation_counts_each_sample_once(pair: list[dict[str, Any]], tmp_path: Path) -> None:
    """The sizes include sets of several batches, sets that are no multiple of the ranks, and ranks without samples."""
    with open_context(SINGLE_RANK, new_run(tmp_path), config()) as ctx:
        expected = evaluations(ctx)
        close(ctx)
    for results in pair:
        for num, metrics in expected.items():
            assert results["evaluations"][num]["eval/accuracy"] == metrics["eval/accuracy"], num
            assert results["evaluations"][num]["eval/loss"] == pytest.approx(metrics["eval/loss"], rel=1e-6), num
    assert pair[0]["evaluations"] == pair[1]["evaluations"]


def test_ranks_have_equal_weights_and_statistics_of_rank_0(pair: list[dict[str, Any]]) -> None:
    assert [results["running mean"] for results in pair] == [0.0, 0.0]
    for name in VARIANTS:
        assert_states_equal(pair[0][name]["model"], pair[1][name]["model"])


def test_two_ranks_equal_one_rank_with_twice_the_batch_size(pair: list[dict[str, Any]], tmp_path: Path) -> None:
    (alone,) = spawn_ranks(one_rank, 1, path=new_run(tmp_path).path)
    assert is_close(pair[0]["plain"]["model"], alone["model"])
    assert (pair[0]["plain"]["loss"] + pair[1]["plain"]["loss"]) / 2 == pytest.approx(alone["loss"], rel=1e-5)
    assert len(pair[0]["plain"]["distances"]) == 3


def test_clipping_and_warm_up_limit_the_length_of_a_step(pair: list[dict[str, Any]]) -> None:
    plain = pair[0]["plain"]["distances"]
    assert min(plain) > 2 * 0.1 * 0.01
    assert pair[0]["clipped"]["distances"] == pytest.approx([0.1 * 0.01] * 3, rel=1e-3)
    assert pair[0]["warm-up"]["distances"][0] == pytest.approx(plain[0] / 4, rel=1e-3)


def test_precision_and_memory_format_change_rounding_only(pair: list[dict[str, Any]]) -> None:
    plain, half = pair[0]["plain"]["model"], pair[0]["bf16"]["model"]
    assert {value.dtype for value in half.values()} == {torch.float32}
    assert not is_close(half, plain, 1e-6)
    assert is_close(half, plain, 0.02)
    assert is_close(pair[0]["channels_last"]["model"], plain)


# --- whole trainings


def fit(here: Rank, path: Path, cfg: Config, last_step: int | None = None) -> str:
    """Train on a run folder as the worker does; return the reason of the end, or `stopped`."""
    with open_context(here, RunDir(path), cfg) as ctx:
        stop_at(ctx, last_step)
        ctx.export_model = lambda *_: None  # type: ignore[method-assign]
        train.train(ctx, cfg)
        close(ctx)
        return ctx.end_reason or "stopped"


def metrics_of(run: RunDir) -> dict[tuple[str, int], float]:
    records = [record for file in sorted(run.journal.glob("*.jsonl")) for record in read_records(file)[0]]
    return {(key, record.step): value for record in records for key, value in record.metrics.items()}


def test_resume_on_other_world_size_trains_remaining_epochs(tmp_path: Path) -> None:
    """67 samples: 9 steps per epoch on one rank, 5 on two."""
    run = new_run(tmp_path)
    cfg = config(stop=StopConfig(max_epochs=3), tracking=TrackingConfig(log_every_steps=1))
    assert spawn_ranks(fit, 1, path=run.path, cfg=cfg, last_step=14) == ["stopped"]
    assert max(step for _, step in metrics_of(run)) == 14
    assert metrics_of(run)["train/epoch", 14] == pytest.approx(1 + 5 / 9)
    reasons = spawn_ranks(fit, 2, path=run.path, cfg=cfg)
    # 5 of 9 steps correspond to 2 of 5: three steps of the second epoch remain, then five of the third.
    assert reasons == ["trained 22 steps, 3 epochs"] * 2
    metrics = metrics_of(run)
    assert sorted(step for key, step in metrics if key == "eval/accuracy") == [9, 17, 22]
    assert metrics["train/epoch", 17] == pytest.approx(2.0)
    assert metrics["train/epoch", 22] == pytest.approx(3.0)
    evaluated = {save.step: save for save in CheckpointStore(run.checkpoints).all() if save.metrics}
    assert {17, 22} <= evaluated.keys(), "evaluated by two ranks"
    for save in evaluated.values():
        samples = parse_npy((save.path / "samples.npy").read_bytes(), save.metrics["eval/accuracy"])
        assert samples is not None
        assert len(samples) == 13


def events(here: Rank, path: Path, cfg: Config, last_step: int | None = None) -> list[str]:
    """Train like `fit`; return what the training loop has logged and saved, and the reason of its end."""
    found: list[str] = []
    original_log, original_save = Context.log, Context.save

    def log(ctx: Context, metrics: Mapping[str, float | torch.Tensor], step: int | None = None) -> None:
        assert ctx._steps is not None
        found.append(f"log {'eval' if 'eval/loss' in metrics else 'train'} {ctx._steps.number}")
        original_log(ctx, metrics, step)

    def save(ctx: Context, step: int, *, metrics: Mapping[str, float] | None = None, **state: Any) -> None:
        found.append(f"save {'eval ' * bool(metrics)}{step}")
        original_save(ctx, step, metrics=metrics, **state)

    Context.log, Context.save = log, save  # type: ignore[method-assign, assignment]
    reason = fit(here, path, cfg, last_step)
    return [*found, reason]


def test_each_epoch_trains_evaluates_and_saves(tmp_path: Path) -> None:
    """A save that is due before an evaluation waits for its metrics; a run stopped there resumes with it."""
    cfg = config(
        data=dataclasses.replace(DATA, num_samples=24),  # 3 steps per epoch
        stop=StopConfig(max_epochs=2),
        tracking=TrackingConfig(log_every_steps=2),
        checkpoint=CheckpointConfig(every_steps=1),
    )
    first = ["save 1", "log train 2", "save 2"]
    rest = ["log eval 3", "save eval 3", "log train 4", "save 4", "save 5", "log train 6", "log eval 6", "save eval 6"]
    run = new_run(tmp_path / "whole")
    assert spawn_ranks(events, 1, path=run.path, cfg=cfg) == [[*first, *rest, "trained 6 steps, 2 epochs"]]
    run = new_run(tmp_path / "stopped")
    assert spawn_ranks(events, 1, path=run.path, cfg=cfg, last_step=3) == [[*first, "save 3", "stopped"]]
    assert spawn_ranks(events, 1, path=run.path, cfg=cfg) == [[*rest, "trained 6 steps, 2 epochs"]]


# --- without ranks


@pytest.mark.faults  # slow: it compiles for half a minute
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPUs: apt-get install g++"
)
def test_checkpoint_of_a_compiled_model_loads_into_a_plain_one(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    cfg = config(stop=StopConfig(max_steps=4), model=ModelConfig(compile=True))
    assert spawn_ranks(fit, 1, path=run.path, cfg=cfg) == ["trained 4 steps, 0.4444 epochs"]
    weights = load_weights(run.checkpoints / "step-00000004")
    SimpleCNN(num_classes=5, in_channels=3, image_size=8).load_state_dict(weights)


# --- DDP buckets: a resumed run is bit-equal to an uninterrupted one, also with more than two ranks.


NUM_RANKS = 4
STEPS = 8
RESUMED_AT = 3


def model_of(*, static_graph: bool) -> DistributedDataParallel:
    torch.manual_seed(0)
    # Gradients arrive in another order than that of the parameters; dropout draws random numbers.
    body = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 300))
    return DistributedDataParallel(body, gradient_as_bucket_view=True, static_graph=static_graph)


def steps(model: DistributedDataParallel, here: Rank, begin: int, end: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(begin, end):
        torch.manual_seed(1 + step * NUM_RANKS + here.rank)
        loss: Tensor = model(torch.randn(8, 16)).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def uninterrupted_and_resumed(here: Rank, settle: Callable[..., None], static_graph: bool) -> list[dict[str, Any]]:
    found = []
    for boundaries in ((0, STEPS), (0, RESUMED_AT, STEPS)):
        state: dict[str, Tensor] = {}
        for begin, end in pairwise(boundaries):
            model = model_of(static_graph=static_graph)
            settle(model, lambda model=model: model(torch.ones(8, 16)).sum())
            if state:
                model.module.load_state_dict(state)
            steps(model, here, begin, end)
            state = {name: value.clone() for name, value in model.module.state_dict().items()}
        found.append(state)
    return found


def final_states(here: Rank) -> dict[str, Any]:
    """Return the states after uninterrupted and resumed trainings, with and without `settle_buckets`."""

    def unsettled(model: DistributedDataParallel, loss: object) -> None:
        return None

    assert_settling_changes_no_state(model_of(static_graph=True))
    return {
        "static": uninterrupted_and_resumed(here, settle_buckets, static_graph=True),
        "dynamic": uninterrupted_and_resumed(here, settle_buckets, static_graph=False),
        "unsettled": uninterrupted_and_resumed(here, unsettled, static_graph=True),
    }


def assert_settling_changes_no_state(model: DistributedDataParallel) -> None:
    """Assert that `settle_buckets` does not change weights, buffers, gradients and random numbers."""
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    generator = torch.get_rng_state()
    settle_buckets(model, lambda: model(torch.ones(8, 16)).sum())
    assert_states_equal(dict(model.module.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [parameter.grad for parameter in model.parameters()] == [None] * 6


@pytest.mark.faults
def test_resume_with_settled_buckets_is_bit_equal() -> None:
    found = spawn_ranks(final_states, num_ranks=NUM_RANKS)[0]
    for kind in ("static", "dynamic"):
        whole, resumed = found[kind]
        assert_states_equal(resumed, whole)
    whole, resumed = found["unsettled"]
    # If this no longer raises, DDP has been changed and `settle_buckets` is not needed any more.
    with pytest.raises(AssertionError, match="differs"):
        assert_states_equal(resumed, whole)
