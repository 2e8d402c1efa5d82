"""Trainers and parameter servers: they compute what one process would, in whatever way values travel."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_scene import new_run, open_context
from spawn import Rank, spawn_ranks
from torch import Tensor, nn

from hpcdist.data.clicks import Clicks, batches, load_clicks
from hpcdist.models.clicks import ClickModel
from hpcdist.rundir import RunDir
from hpcdist.runtime.checkpoint import load_weights
from hpcdist.runtime.tables import initial_rows
from hpcdist.schema import CheckpointConfig, Config, HybridConfig, OptimConfig, StopConfig, TrackingConfig
from hpcdist.trainers import hybrid

TABLES = {"user": 50, "item": 7, "tag": 1}
NUM_STEPS = 5
NUM_TRAINERS = 2


def config(mode: str = "sync", num_servers: int = 2, **options: Any) -> Config:
    return Config(
        roles={"trainer": NUM_TRAINERS, "server": num_servers},
        hybrid=HybridConfig(
            mode=mode,
            tables=TABLES,
            dim=4,
            hidden=[5],
            init_scale=0.5,
            batch_size=16,
            eval_batch_size=64,
            num_samples=400,
            num_numeric=2,
            test_fraction=0.25,
            table_lr=0.1,
            **options,
        ),
        optim=OptimConfig(name="sgd", lr=0.1, momentum=0.0),
        stop=StopConfig(steps=NUM_STEPS),
        checkpoint=CheckpointConfig(best="eval/auc"),
        tracking=TrackingConfig(log_every=1),
    )


def take_part(here: Rank, path: Path, cfg: Config) -> None:
    with open_context(here, RunDir(path), cfg) as ctx:
        ctx.export_model = lambda *_: None  # type: ignore[method-assign]  # MLflow costs seconds
        hybrid.train(ctx, cfg)
        ctx.close()


def trained(folder: Path, cfg: Config) -> dict[str, Tensor]:
    """The weights at the end of a run, put together from its owners."""
    run = new_run(folder)
    spawn_ranks(take_part, sum(cfg.roles.values()), path=run.path, cfg=cfg)
    return load_weights(run.checkpoints / f"step-{NUM_STEPS:08d}")


def in_one_process(cfg: Config) -> dict[str, Tensor]:
    """The same steps on the trainers' joint batches by torch's own modules and optimizers."""
    options = cfg.hybrid
    torch.manual_seed(cfg.seed)
    model = ClickModel(TABLES, dim=options.dim, num_numeric=2, hidden=options.hidden, bag_size=1)
    torch.manual_seed(cfg.seed)
    model.dense = hybrid.dense_part(len(TABLES) * options.dim + 2, options.hidden)
    tables: dict[str, nn.EmbeddingBag] = dict(model.tables.items())  # type: ignore[arg-type]
    for name, table in tables.items():
        table.sparse = True
        rows = initial_rows(range(TABLES[name]), table=name, dim=4, scale=options.init_scale, seed=cfg.seed)
        table.weight.data.copy_(rows)
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "sparse_adam": torch.optim.SparseAdam,
    }
    weights = [table.weight for table in tables.values()]
    optimizers = [
        kinds[options.table_optimizer](weights, lr=options.table_lr),
        torch.optim.SGD(model.dense.parameters(), lr=0.1),
    ]
    shares = [load_clicks(options, cfg.seed, share=share, num_shares=2)[0] for share in range(2)]
    orders = [list(batches(len(share), 16, seed=cfg.seed, epoch=0)) for share in shares]
    with torch.sparse.check_sparse_tensor_invariants():  # saying nothing about it warns
        for step in range(NUM_STEPS):
            losses = [
                loss_of(model, tables, part.take(order[step])) for part, order in zip(shares, orders, strict=True)
            ]
            (sum(losses) / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


def loss_of(model: ClickModel, tables: dict[str, nn.EmbeddingBag], clicks: Clicks) -> Tensor:
    pooled = []
    for number, table in enumerate(tables.values()):
        mine = clicks.bags.take(torch.arange(number, len(clicks.bags), len(TABLES)))
        pooled.append(table(mine.ids, mine.offsets[:-1]))
    logits = model.dense(torch.cat([*pooled, clicks.numeric], dim=1)).squeeze(1)
    return F.binary_cross_entropy_with_logits(logits, clicks.labels)


@pytest.mark.parametrize(
    ("optimizer", "num_servers", "pool", "prefetch"),
    [
        ("sgd", 2, "server", "values"),
        ("adagrad", 2, "trainer", "values"),
        ("sparse_adam", 1, "server", "indices"),
        ("sgd", 3, "trainer", "indices"),
    ],
)
def test_a_step_is_that_of_one_process_on_the_joint_batch(
    tmp_path: Path, optimizer: str, num_servers: int, pool: str, prefetch: str
) -> None:
    cfg = config(num_servers=num_servers, table_optimizer=optimizer, pool=pool, prefetch=prefetch)
    found, wanted = trained(tmp_path, cfg), in_one_process(cfg)
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6, msg=name)
