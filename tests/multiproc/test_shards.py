"""Checkpoints of a model that several ranks own: each rank writes its shard, one process reads the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from context_scene import new_run, open_context
from spawn import Rank, spawn_ranks
from torch import nn
from torch.distributed import HashStore, PrefixStore

from hpcdist.checkpoint.state import Shard, ShardExchange, load_weights, merge
from hpcdist.config.schema import Config
from hpcdist.errors import CheckpointError
from hpcdist.run.folder import RunDir

TABLE = torch.arange(10.0).view(5, 2)


def shard_of(rank: int, scale: float = 1.0) -> Shard:
    """Return the shard of a rank: ranks 1 and 2 own rows of a table, rank 2 also a bias, rank 0 no parameters."""
    if rank == 0:
        return Shard()
    rows = slice(0, 3) if rank == 1 else slice(3, 5)
    model = {"table.weight": scale * TABLE[rows]} | ({"bias": torch.full((2,), scale)} if rank == 2 else {})
    return Shard(model=model, rows={"table.weight": (rows.start, 5)}, trainer={"rank": rank, "scale": scale})


def save_twice(here: Rank, path: Path) -> None:
    with open_context(here, RunDir(path), Config()) as ctx:
        assert ctx.restore() is None
        for step, scale in ((1, 1.0), (2, 3.0)):
            shard = shard_of(here.rank, scale)
            torch.manual_seed(0)
            ctx.save(step, model=nn.Linear(2, 2) if ctx.is_main else None, trainer={"at": step}, shard=shard)
            for tensor in shard.model.values():
                tensor.fill_(-1)  # changes after the save must not be in the checkpoint
        ctx.save(2, model=None, trainer={"at": 2}, shard=shard_of(here.rank), metrics={"eval/loss": 1.0})
        ctx.close()


def restore(here: Rank, path: Path) -> Any:
    with open_context(here, RunDir(path), Config()) as ctx:
        found = ctx.restore()
        assert found is not None
        return found.trainer, [found.shard(rank) for rank in range(3)], set(found.model)


def test_owners_write_shards_and_one_process_reads_the_whole_model(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    spawn_ranks(save_twice, 3, path=run.path)
    whole = load_weights(run.checkpoints / "step-00000002")
    assert set(whole) == {"weight", "table.weight", "bias"}
    assert torch.equal(whole["table.weight"], 3 * TABLE)
    assert torch.equal(whole["bias"], torch.full((2,), 3.0))
    assert torch.equal(load_weights(run.checkpoints / "step-00000001")["table.weight"], TABLE)
    assert [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")] == []
    for trainer, shards, own in spawn_ranks(restore, 3, path=run.path):
        assert trainer == {"at": 2}
        assert shards[0] is None
        assert [shard["trainer"] for shard in shards[1:]] == [{"rank": 1, "scale": 3.0}, {"rank": 2, "scale": 3.0}]
        assert own == {"weight", "bias"}

    # A checkpoint with a damaged shard is invalid.
    (run.checkpoints / "step-00000002" / "shard-00001.pt").write_bytes(b"")
    assert spawn_ranks(restore, 3, path=run.path)[0][0] == {"at": 1}


def fail_to_write(here: Rank, path: Path) -> str:
    with open_context(here, RunDir(path), Config()) as ctx:
        if here.rank == 2:  # a folder with the name of the shard
            (ctx._checkpoints.store.staging(1, ctx.attempt.number) / "shard-00002.pt").mkdir(parents=True)
        ctx.barrier()
        ctx.save(1, model=None, trainer={}, shard=shard_of(here.rank))
        try:
            ctx.close()
        except CheckpointError as error:
            return str(error)
    return "closed"


def test_shard_that_cannot_be_written_leaves_no_checkpoint(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    main, other, failed = spawn_ranks(fail_to_write, 3, path=run.path)
    assert other == "closed"
    assert failed.startswith("rank 2 could not write its shard of step 1: Is a directory")
    assert failed in main
    assert list(run.checkpoints.iterdir()) == []


def test_merge_refuses_missing_rows() -> None:
    first, second = (shard_of(rank).content() for rank in (1, 2))
    assert torch.equal(merge([second, first], "x")["table.weight"], TABLE)
    with pytest.raises(CheckpointError, match=r"x: rows of table.weight are missing after row 3 of 5"):
        merge([first], "x")
    with pytest.raises(CheckpointError, match=r"missing after row 0 of 5"):
        merge([second], "x")


def test_damaged_shards_and_reports_are_refused(tmp_path: Path) -> None:
    for damage in ({"model": 7}, {"rows": {"table.weight": 3}}, {"rows": {"table.weight": [0]}}):
        with pytest.raises(CheckpointError, match=r"x: a shard is damaged \(\w+Error: "):
            merge([shard_of(1).content() | damage], "x")
    store = HashStore()
    exchange = ShardExchange(store, rank=0, attempt=1)
    for report in ("[" * 100_000, "[]", '{"bytes": 1e999, "sha256": ""}', '{"bytes": 3}'):
        PrefixStore("shards/1", store).set("5/2", report)
        with pytest.raises(CheckpointError, match="rank 2 reported its shard of step 5 as b"):
            exchange.collect(5, [2], tmp_path / "staging", tmp_path)
