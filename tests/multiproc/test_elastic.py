"""Elastic runs: weights, order of samples and metrics on a changing number of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from context_scene import new_run, open_context
from hpcdist_runs import assert_states_equal
from spawn import Rank, spawn_ranks
from torch import nn

from hpcdist.checkpoint.weights import load_weights
from hpcdist.config.schema import Config, DataConfig, ElasticConfig, OptimConfig, StopConfig, TrackingConfig
from hpcdist.run.folder import RunDir
from hpcdist.tracking.journal_reader import read_records
from hpcdist.trainers.ddp import train

#: 67 samples: 4 full global batches in an epoch, and 3 samples in one of 8 micro-batches of two, for one or two ranks.
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
        return self.body(images)


def fit(
    here: Rank, path: Path, cfg: Config, stop_at: int | None = None
) -> tuple[str, list[tuple[int, int, list[int]]]]:
    """Train as the worker does. Returns the reason of the end, and (step, micro-batch, samples) of this rank."""
    audit: list[tuple[int, int, list[int]]] = []
    torch.set_num_threads(1)
    with open_context(here, RunDir(path), cfg) as ctx:
        original, batches = ctx.should_stop, ctx.micro_batches

        def should_stop(step: int, total_steps: int | None = None) -> bool:
            ctx._stop.agreed = step == stop_at
            return original(step, total_steps)

        def micro_batches(model: Any, step: int, num_samples: int) -> Any:
            for micro in batches(model, step, num_samples):
                audit.append((step, micro.number, micro.indices.tolist()))
                yield micro

        ctx.should_stop, ctx.micro_batches = should_stop, micro_batches  # type: ignore[method-assign]
        ctx.export_model = lambda *_: None  # type: ignore[method-assign]
        train.build_model = lambda *_, **__: Net()  # type: ignore[attr-defined]
        train.train(ctx, cfg)
        ctx.close()
        return ctx.end_reason or "stopped", audit


def train_on(
    sizes: dict[int | None, int], folder: Path, *, exact: bool
) -> tuple[RunDir, list[tuple[int, int, list[int]]]]:
    """Train one run on changing numbers of ranks. `sizes` has the number of ranks by the step at which they stop."""
    run = new_run(folder)
    audit = []
    for stop_at, num_ranks in sizes.items():
        for reason, seen in spawn_ranks(fit, num_ranks, path=run.path, cfg=config(exact=exact), stop_at=stop_at):
            assert reason == ("stopped" if stop_at else f"trained {NUM_STEPS} steps, 2 epochs")
            audit += seen
    return run, audit


def final(run: RunDir) -> dict[str, torch.Tensor]:
    return load_weights(run.checkpoints / f"step-{NUM_STEPS:08d}")


def metrics_of(run: RunDir) -> dict[tuple[str, int], float]:
    records = [record for file in sorted(run.journal.glob("*.jsonl")) for record in read_records(file)[0]]
    points = [((key, record.step), value) for record in records for key, value in record.metrics.items()]
    assert len(points) == len(dict(points)), "a point was logged twice"
    return {key: value for key, value in points if not key[0].startswith("time/")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """An undisturbed exact run on one rank."""
    return train_on({None: 1}, tmp_path_factory.mktemp("alone"), exact=True)[0]


def assert_each_sample_once_an_epoch(audit: list[tuple[int, int, list[int]]]) -> None:
    for epoch in range(2):
        steps = range(5 * epoch, 5 * epoch + 5)
        assert sorted(sample for step, _, samples in audit if step in steps for sample in samples) == list(range(67))
    assert len(audit) == len({(step, number) for step, number, _ in audit})


def test_weights_are_bit_equal_for_every_sequence_of_world_sizes(alone: RunDir, tmp_path: Path) -> None:
    """The sizes 3 and 5 change in the middle of an epoch, and between two logged steps."""
    changing, audit = train_on({2: 4, 4: 3, 7: 5, None: 2}, tmp_path, exact=True)
    assert_states_equal(final(changing), final(alone))
    assert_each_sample_once_an_epoch(audit)
    expected, found = metrics_of(alone), metrics_of(changing)
    assert {key for key in found if key[0] != "world_size"} == {key for key in expected if key[0] != "world_size"}
    for key in ("samples", "train/lr", "train/epoch"):
        assert [found[key, step] for step in (3, 6, 9)] == [expected[key, step] for step in (3, 6, 9)]
    assert [found["samples", step] for step in (3, 6, 9)] == [48, 83, 131]
    for step in (3, 6, 9):
        assert found["train/loss", step] == pytest.approx(expected["train/loss", step], rel=1e-6)
    assert {step: value for (key, step), value in found.items() if key == "world_size"} == {
        1: 4,
        3: 3,
        5: 5,
        6: 5,
        8: 2,
        9: 2,
    }
