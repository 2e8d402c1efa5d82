"""Elastic runs: weights, order of samples and metrics on a changing number of ranks."""

import copy
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from context_scene import new_run, open_context, stop_at
from hpcdist_runs import assert_states_equal
from spawn import Rank, spawn_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from hpcdist.checkpoint.state import load_weights
from hpcdist.config.record_schema import TrackingConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import DataConfig, ElasticConfig, OptimConfig, PrecisionConfig, StopConfig
from hpcdist.rank.context import close
from hpcdist.rank.micro_batches import BatchDivision, TreeSum, micro_batches, sum_of_tree, sum_over_ranks
from hpcdist.run.folder import RunDir
from hpcdist.tracking.journal import read_records
from hpcdist.trainers.ddp import train

#: In the last step of an epoch only one of eight micro-batches has samples, so that two of three ranks have none.
DATA = DataConfig(name="synthetic", image_size=8, num_samples=67, num_classes=5, global_batch_size=16)
NUM_STEPS = 10


def config(*, exact: bool, **sections: Any) -> Config:
    return Config(
        seed=3,
        data=dataclasses.replace(DATA, augment=True),
        optim=OptimConfig(name="sgd", lr=0.05),
        elastic=ElasticConfig(micro_batches=8, exact=exact),
        stop=StopConfig(max_epochs=2),
        tracking=TrackingConfig(log_every_steps=3),
        **sections,
    )


class Net(nn.Module):
    """Batch normalisation and dropout: running statistics, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 5)
        )
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.body(images)
        return logits


Audit = list[tuple[int, int, list[int]]]


def fit(here: Rank, path: Path, cfg: Config, last_step: int | None) -> tuple[str, Audit]:
    """Train as the worker does. Returns the reason of the end, and (step, micro-batch, samples) of this rank."""
    audit: Audit = []
    with open_context(here, RunDir(path), cfg) as ctx:
        batches = ctx.elastic.micro_batches

        def micro_batches(model: Any, step: int, num_samples: int) -> Any:
            for micro in batches(model, step, num_samples):
                audit.append((step, micro.number, micro.indices.tolist()))
                yield micro

        stop_at(ctx, last_step)
        ctx.elastic.micro_batches = micro_batches  # type: ignore[method-assign]
        ctx.export_model = lambda *_: None  # type: ignore[method-assign]
        train.build_model = lambda *_, **__: Net()  # type: ignore[attr-defined]
        train.train(ctx, cfg)
        close(ctx)
        return ctx.end_reason or "stopped", audit


def assert_sums_are_those_of_one_rank(here: Rank) -> None:
    """Compare sums over all ranks with those of one, with more and fewer leaves than ranks."""
    for num_leaves in (1, 2, 5, 8):
        edges = [num_leaves * rank // here.world_size for rank in range(here.world_size + 1)]
        shares = [range(low, high) for low, high in pairwise(edges)]
        found = []
        for all_shares, share in (([range(num_leaves)], range(num_leaves)), (shares, shares[here.rank])):
            tree = TreeSum(num_leaves)
            for leaf in share:
                vector = torch.randn(7, generator=torch.Generator().manual_seed(leaf)) * 10**leaf
                tree.add(leaf, leaf + 1, vector)
            found.append(sum_of_tree(num_leaves, all_shares, tree.sums, torch.zeros(7)))
        assert torch.equal(*found), num_leaves


def assert_gradients_of_a_model_without_buffers(here: Rank) -> None:
    """Compare them with those of the whole global batch, also in a step in which only one micro-batch has samples."""
    x = torch.randn(18, 3, generator=torch.Generator().manual_seed(0))
    division = BatchDivision(
        num_samples=18, global_batch_size=16, num_micro_batches=8, seed=0, rank=here.rank, world_size=here.world_size
    )
    for exact in (True, False):
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        whole, model = copy.deepcopy(net), DistributedDataParallel(net)
        if not exact:
            model.register_comm_hook(None, sum_over_ranks)
        for step, samples in enumerate(division.order(0).split(16)):
            for micro in micro_batches(division, model, step, exact=exact):
                (model(x[micro.indices]).square().mean() * micro.weight).backward()
            whole.zero_grad()
            whole(x[samples]).square().mean().backward()
            torch.testing.assert_close([p.grad for p in net.parameters()], [p.grad for p in whole.parameters()])


def fit_both(
    here: Rank, paths: dict[bool, Path], last_step: int | None, sections: dict[str, Any]
) -> dict[bool, tuple[str, Audit]]:
    """Train the exact run and the other one."""
    assert_sums_are_those_of_one_rank(here)
    assert_gradients_of_a_model_without_buffers(here)
    configs = {exact: dataclasses.replace(config(exact=exact), **sections) for exact in paths}
    return {exact: fit(here, path, configs[exact], last_step) for exact, path in paths.items()}


@dataclass(frozen=True)
class Trained:
    """A run with the samples that its ranks have computed."""

    run: RunDir
    audit: Audit

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_weights(self.run.checkpoints / f"step-{NUM_STEPS:08d}")

    @property
    def metrics(self) -> dict[tuple[str, int], float]:
        records = [record for file in sorted(self.run.journal.glob("*.jsonl")) for record in read_records(file)[0]]
        points = [((key, record.step), value) for record in records for key, value in record.metrics.items()]
        assert len(points) == len(dict(points)), "a point was logged twice"
        return {key: value for key, value in points if not key[0].startswith("time/")}


def train_on(
    sizes: Sequence[tuple[int | None, int]], folder: Path, *modes: bool, **sections: Any
) -> dict[bool, Trained]:
    """Train on changing numbers of ranks.

    Args:
        sizes: the steps at which the ranks stop, and their numbers.
        modes: the values of `elastic.exact`, with one run each.
        sections: sections of the config that differ from `config`.
    """
    trained = {exact: Trained(new_run(folder, f"exact-{exact}"), []) for exact in modes}
    paths = {exact: each.run.path for exact, each in trained.items()}
    for last_step, num_ranks in sizes:
        for results in spawn_ranks(fit_both, num_ranks, paths=paths, last_step=last_step, sections=sections):
            for exact, (reason, audit) in results.items():
                assert reason == ("stopped" if last_step else f"trained {NUM_STEPS} steps, 2 epochs")
                trained[exact].audit.extend(audit)
    return trained


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Trained]:
    """Undisturbed runs on one rank."""
    return train_on([(None, 1)], tmp_path_factory.mktemp("alone"), True, False)


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Trained]:
    """Runs that continue on two ranks instead of three in the middle of an epoch, between two logged steps."""
    return train_on([(4, 3), (None, 2)], tmp_path_factory.mktemp("changing"), True, False)


def assert_each_sample_once_an_epoch(audit: Audit) -> None:
    for epoch in range(2):
        steps = range(5 * epoch, 5 * epoch + 5)
        assert sorted(sample for step, _, samples in audit if step in steps for sample in samples) == list(range(67))
    assert len(audit) == len({(step, number) for step, number, _ in audit})


def test_exact_weights_are_bit_equal(alone: dict[bool, Trained], changing: dict[bool, Trained]) -> None:
    """The running statistics of batch normalisation included."""
    assert "body.1.running_var" in alone[True].weights
    assert_states_equal(changing[True].weights, alone[True].weights)


def test_other_weights_differ_by_rounding(alone: dict[bool, Trained], changing: dict[bool, Trained]) -> None:
    """Each sum of 8 gradients has at most 7 roundings; the factor 2 for the growth of differences is an assumption."""
    tolerance = 2 * NUM_STEPS * 7 * torch.finfo(torch.float32).eps
    assert tolerance < 2e-5
    for trained in (changing[False], alone[True]):
        for name, value in alone[False].weights.items():
            scale = max(1.0, float(value.abs().nan_to_num(posinf=0.0).max()))
            torch.testing.assert_close(trained.weights[name], value, rtol=0, atol=tolerance * scale, msg=name)
    assert any(not torch.equal(alone[False].weights[name], value) for name, value in alone[True].weights.items())


def test_each_sample_counts_once_an_epoch_in_one_order(
    alone: dict[bool, Trained], changing: dict[bool, Trained]
) -> None:
    for trained in (*alone.values(), *changing.values()):
        assert_each_sample_once_an_epoch(trained.audit)
        assert sorted(trained.audit) == sorted(alone[True].audit)


def test_metrics_continue_on_another_number_of_ranks(alone: dict[bool, Trained], changing: dict[bool, Trained]) -> None:
    for exact in (True, False):
        expected, found = alone[exact].metrics, changing[exact].metrics
        assert {key for key in found if key[0] != "world_size"} == {key for key in expected if key[0] != "world_size"}
        assert [found["samples", step] for step in (3, 6, 9)] == [48, 83, 131]
        for key in ("samples", "train/lr", "train/epoch", "train/loss"):
            for step in (3, 6, 9):
                assert found[key, step] == pytest.approx(expected[key, step], rel=1e-4), (key, step)
        sizes = {step: value for (key, step), value in found.items() if key == "world_size"}
        assert sizes == {1: 3, 3: 3, 5: 2, 6: 2, 9: 2}


@pytest.mark.faults  # slow: 25 ranks start
def test_clipped_bf16_training_is_bit_equal_on_8_3_5_and_8_ranks(alone: dict[bool, Trained], tmp_path: Path) -> None:
    optim = OptimConfig(name="sgd", lr=0.05, max_grad_norm=0.5)
    sections = {"precision": PrecisionConfig(dtype="bf16"), "optim": optim}
    one = train_on([(None, 1)], tmp_path / "one", True, **sections)[True]
    trained = train_on([(2, 8), (4, 3), (7, 5), (None, 8)], tmp_path / "changing", True, **sections)[True]
    assert_states_equal(trained.weights, one.weights)
    assert_each_sample_once_an_epoch(trained.audit)
    assert any(not torch.equal(alone[True].weights[name], value) for name, value in one.weights.items())


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples with random noise of all generators."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((3,), float(index)) + torch.rand(3) + random.random() + float(np.random.rand())
        return x, x.sum()


def fit_with_loader(here: Rank, path: Path, num_workers: int, until: int) -> dict[str, torch.Tensor]:
    """Train a trainer of one's own with `ctx.elastic.loader`; return the weights."""
    cfg = Config(data=DataConfig(global_batch_size=8), elastic=ElasticConfig(micro_batches=4, exact=True))
    with open_context(here, RunDir(path), cfg) as ctx:
        net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        model = ctx.wrap(net)
        loader = ctx.elastic.loader(Noisy(), num_workers=num_workers)
        step = 0
        if (saved := ctx.restore()) is not None:
            net.load_state_dict(saved.model)
            step = saved.step
        while step < until:
            for micro, (x, y) in loader.of_step(model, step):
                (F.mse_loss(model(x).flatten(), y) * micro.weight).backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(1e-4 * parameter.grad)
            step += 1
        ctx.save(step, model=model, trainer={})
        close(ctx)
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_loader_resumes_exactly_on_other_ranks_and_workers(tmp_path: Path) -> None:
    """In the third step of an epoch, one micro-batch has samples; the runs continue in the middle of an epoch."""
    (expected,) = spawn_ranks(fit_with_loader, 1, path=new_run(tmp_path, "alone").path, num_workers=0, until=7)
    path = new_run(tmp_path, "changing").path
    spawn_ranks(fit_with_loader, 3, path=path, num_workers=0, until=4)
    for weights in spawn_ranks(fit_with_loader, 2, path=path, num_workers=1, until=7):
        assert_states_equal(weights, expected)
