"""Trainers and parameter servers: equal to one process with every form of lookups."""

import os
import random
import resource
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from context_scene import new_run, open_context, stop_at
from hpcdist_runs import wait_for
from spawn import Rank, spawn_ranks
from torch import Tensor, nn

from hpcdist.checkpoint.state import load_weights
from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.config.record_schema import CheckpointConfig, TrackingConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import OptimConfig, StopConfig
from hpcdist.rank.context import close
from hpcdist.rank.step_timing import StepTimer
from hpcdist.rank.training_loop import fill_rows
from hpcdist.run.folder import RunDir
from hpcdist.trainers.hybrid import HybridConfig, train
from hpcdist.trainers.hybrid.click_logs import Clicks, batches
from hpcdist.trainers.hybrid.tables import INIT_SCALE, TableLayout, TableShard, choose
from hpcdist.trainers.hybrid.train import ClickModel, load_clicks

TABLES = {"user": 50, "item": 7, "tag": 1}
#: Some rows of two batches are equal, so that values are sent ahead and few of them again.
LARGE = {"user": 2000, "item": 1000, "tag": 400}
NUM_STEPS = 5
NUM_TRAINERS = 2


def config(num_servers: int = 2, tables: Mapping[str, int] = TABLES, **options: Any) -> Config:
    return Config(
        roles={"trainer": NUM_TRAINERS, "parameter_server": num_servers},
        sections={
            "hybrid": HybridConfig(
                tables=dict(tables),
                embedding_dim=4,
                hidden_sizes=[5],
                batch_size=16,
                num_samples=400,
                table_lr=0.1,
                **options,
            )
        },
        optim=OptimConfig(name="sgd", lr=0.1, momentum=0.0),
        stop=StopConfig(max_steps=NUM_STEPS),
        # Before the last step, the rows of the next batch are on their way while a checkpoint is saved.
        checkpoint=CheckpointConfig(monitor="eval/auc", every_steps=1),
        tracking=TrackingConfig(log_every_steps=1),
    )


def train_on_rank(here: Rank, path: Path, cfg: Config, last_step: int | None = None) -> None:
    with open_context(here, RunDir(path), cfg) as ctx:
        ctx.export_model = lambda *_: None  # type: ignore[method-assign]  # MLflow takes seconds
        train.EVAL_BATCH_SIZE = 16  # several batches
        stop_at(ctx, last_step)
        train.train(ctx, cfg)
        close(ctx)


def trained(folder: Path, cfg: Config, stopped: Config | None = None) -> dict[str, Tensor]:
    """Return the weights at the end of a run, joined from all shards.

    With `stopped`, the run begins with that config, stops after two steps and is resumed.
    """
    run = new_run(folder)
    if stopped is not None:
        spawn_ranks(train_on_rank, sum(stopped.roles.values()), path=run.path, cfg=stopped, last_step=2)
    spawn_ranks(train_on_rank, sum(cfg.roles.values()), path=run.path, cfg=cfg)
    return load_weights(run.checkpoints / f"step-{NUM_STEPS:08d}")


def in_one_process(cfg: Config, num_steps: int = NUM_STEPS) -> dict[str, Tensor]:
    """Return the weights after the same steps on the joint batches with torch.nn and torch.optim."""
    num_trainers = cfg.roles["trainer"]
    options = cfg.section(HybridConfig)
    torch.manual_seed(cfg.seed)
    model = ClickModel(options, bag_size=1)
    torch.manual_seed(cfg.seed)
    model.dense = train.dense_part(options)
    tables: dict[str, nn.EmbeddingBag] = dict(model.tables.items())  # type: ignore[arg-type]
    for name, table in tables.items():
        table.sparse = True
        fill_rows(table.weight.data, range(options.tables[name]), table=name, scale=INIT_SCALE, seed=cfg.seed)
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
    shares = [
        load_clicks(options, cfg.seed, shares=range(share, share + 1), num_shares=num_trainers)[0]
        for share in range(num_trainers)
    ]
    orders = [list(batches(len(share), 16, seed=cfg.seed, epoch=0)) for share in shares]
    with torch.sparse.check_sparse_tensor_invariants():  # torch warns unless it is set
        for step in range(num_steps):
            losses = [
                loss_of(model, tables, part.take(order[step])) for part, order in zip(shares, orders, strict=True)
            ]
            total: Any = sum(losses)
            (total / num_trainers).backward()
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


def write_log(folder: Path, tables: Mapping[str, int]) -> Path:
    """Write a click log with one id in each bag."""
    draw, path = random.Random(0), folder / "clicks.csv"
    rows = [
        ",".join(map(str, (draw.randrange(2), draw.random(), draw.random(), *map(draw.randrange, tables.values()))))
        for _ in range(400)
    ]
    path.write_text("\n".join([",".join(("label", "a", "b", *tables)), *rows, ""]))
    return path


@pytest.mark.parametrize(
    ("optimizer", "num_servers", "tables", "has_file", "pool_at_server", "ahead"),
    [
        ("adagrad", 2, LARGE, False, True, True),
        pytest.param("sgd", 3, LARGE, True, False, True, marks=pytest.mark.faults),
        pytest.param("sparse_adam", 1, TABLES, False, False, False, marks=pytest.mark.slow),
    ],
)
def test_training_equals_one_process_on_the_joint_batch(
    tmp_path: Path,
    optimizer: str,
    num_servers: int,
    tables: Mapping[str, int],
    has_file: bool,
    pool_at_server: bool,
    ahead: bool,
) -> None:
    log: dict[str, Any] = {}
    if has_file:
        log = {"file": str(write_log(tmp_path, tables)), "numeric_columns": ["a", "b"]}
    cfg = config(num_servers=num_servers, table_optimizer=optimizer, tables=tables, **log)
    clicks, _ = load_clicks(cfg.section(HybridConfig), cfg.seed, shares=range(1), num_shares=NUM_TRAINERS)
    layout = TableLayout(dict(tables), 4, num_servers)
    placed = clicks.placed(layout.place)
    first_two = [placed.take(batch).bags for batch in islice(batches(len(clicks), 16, seed=cfg.seed, epoch=0), 2)]
    assert choose(first_two, layout.starts, NUM_TRAINERS) == (pool_at_server, ahead)
    found, expected = trained(tmp_path, cfg), in_one_process(cfg)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6, msg=name)
    # The weights of all shards change: an optimizer with gradients of other tensors would not change them.
    initial = in_one_process(cfg, num_steps=0)
    assert [name for name, weight in found.items() if torch.equal(weight, initial[name])] == []


def load_late(here: Rank, path: Path, cfg: Config) -> bool:
    """Return whether a trainer has sent heartbeats while it waited for the samples of the other one."""
    load_clicks = train.load_clicks
    alive = StepTimer.alive
    beaten = here.folder / "beaten"
    num_beats = 0

    def load(*arguments: Any, **options: Any) -> Any:
        if here.rank == 1:
            wait_for(beaten.exists, "heartbeats of the other trainer")
        return load_clicks(*arguments, **options)

    def count(timer: StepTimer) -> None:
        nonlocal num_beats
        alive(timer)
        num_beats += 1
        if here.rank == 0 and num_beats == 5:  # more than its own samples need
            beaten.touch()

    train.load_clicks = load
    StepTimer.alive = count  # type: ignore[method-assign,assignment]
    train_on_rank(here, path, cfg)
    return beaten.exists()


def test_trainer_sends_heartbeats_until_another_has_its_samples(tmp_path: Path) -> None:
    cfg = config(num_servers=1)
    assert all(spawn_ranks(load_late, 3, path=new_run(tmp_path).path, cfg=cfg))


def resized(cfg: Config, *, trainers: int, servers: int) -> Config:
    roles = {"trainer": trainers, "parameter_server": servers}
    # The change is between two logged steps.
    return replace(cfg, roles=roles, tracking=TrackingConfig(log_every_steps=3))


def test_other_role_sizes_continue_with_the_same_joint_batches(tmp_path: Path) -> None:
    cfg = config(table_optimizer="adagrad")
    first, second = resized(cfg, trainers=3, servers=1), resized(cfg, trainers=2, servers=2)
    found, expected = trained(tmp_path, second, stopped=first), in_one_process(first)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6, msg=name)
    # The sums of an interval with a change of the number of trainers are complete.
    store = CheckpointStore(tmp_path / "runs" / "exp" / "first" / "checkpoints")
    newest = store.latest()
    assert newest is not None
    assert store.load(newest.path).trainer["position"]["samples"] == NUM_STEPS * 16 * 3


def fail_in_server(here: Rank, path: Path, cfg: Config) -> str:
    def failing_update(*_: Any, **__: Any) -> None:
        num_threads = sum(thread.name == "hpcdist-rpc" for thread in threading.enumerate())
        raise ValueError(f"simulated failure, {num_threads} threads of RPC")

    TableShard.update = failing_update  # type: ignore[method-assign]
    try:
        train_on_rank(here, path, cfg)
    except Exception as error:
        if here.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)  # the worker ends at once as well
        return f"{type(error).__name__}: {error}"
    return "finished"


def test_error_of_an_update_names_the_server(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    results = spawn_ranks(fail_in_server, 3, killed=[2], path=run.path, cfg=config(num_servers=1))
    assert "finished" not in results
    # The other trainer may lose the first one in a collective.
    errors = [str(error) for error in results if str(error).startswith("RemoteError: parameter_server:0 (rank 2 on ")]
    assert errors
    # Each of those that compute would start threads of OpenMP: few suffice for one update at a time.
    assert "ValueError: simulated failure, 4 threads of RPC" in errors[0]


# --- memory

LARGE_TABLE = {"large": 2_400_000}
LARGE_TABLE_BYTES = 2_400_000 * 32 * 4


def memory_growth(here: Rank, small: Path, large: Path, cfg: Config) -> int:
    """Return the growth of the peak of resident memory, in bytes, from small tables to large ones."""
    train_on_rank(here, small, cfg)  # imports all modules
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hybrid = replace(cfg.section(HybridConfig), tables=LARGE_TABLE)
    train_on_rank(here, large, replace(cfg, sections={"hybrid": hybrid}))
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.slow
def test_no_rank_holds_a_whole_table(tmp_path: Path) -> None:
    """A server copies its rows once for a checkpoint: two thirds of a table are less than the whole."""
    cfg = config(num_servers=3)
    options = replace(cfg.section(HybridConfig), embedding_dim=32, table_optimizer="sgd", num_samples=200)
    cfg = replace(cfg, sections={"hybrid": options}, stop=StopConfig(max_steps=2))
    small, large = new_run(tmp_path, "small"), new_run(tmp_path, "large")
    growth = spawn_ranks(memory_growth, 5, small=small.path, large=large.path, cfg=cfg)
    slack = 64e6  # a second RPC agent, its buffers, and the effect of each row in the synthetic log
    assert [size for size in growth[:NUM_TRAINERS] if size > slack] == [], growth
    assert [size for size in growth[NUM_TRAINERS:] if size > 2 * LARGE_TABLE_BYTES / 3 + slack] == [], growth
    shards = sorted(path.stat().st_size for path in (large.checkpoints / "step-00000002").glob("shard-*.pt"))
    assert len(shards) == 3
    assert shards[-1] < LARGE_TABLE_BYTES / 3 + 1e6
