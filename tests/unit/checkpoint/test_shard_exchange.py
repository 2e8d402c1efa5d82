"""Reports of the owners of shards to rank 0, and the files that a failed save must not leave."""

import errno
from datetime import timedelta
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them at run time

from hpcdist.checkpoint import shard_exchange
from hpcdist.checkpoint.shard_exchange import PendingShards, ShardExchange
from hpcdist.checkpoint.store import CheckpointStore, Snapshot, load_file, shard_name
from hpcdist.errors import CheckpointError

STEP = 3


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    return CheckpointStore(tmp_path / "checkpoints").staging(STEP, 1)


def write(store: Store, rank: int, staging: Path) -> None:
    exchange = ShardExchange(store, rank=rank, attempt=1)
    exchange.write({"model": {f"part{rank}": torch.ones(2)}, "trainer": None}, boxes={}, step=STEP, staging=staging)


def pending(store: Store, owners: list[int], staging: Path) -> PendingShards:
    return ShardExchange(store, rank=0, attempt=1).pending(STEP, owners, staging)


def write_with_error(store: Store, rank: int, staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(shard_exchange, "save_file", fail)
        with pytest.raises(CheckpointError, match=r"^rank 1 could not write its shard of step 3: Stale file handle$"):
            write(store, rank, staging)


class LateStore:
    """A store in which rank 2 reports only when it is waited for."""

    def __init__(self, store: Store, staging: Path) -> None:
        self._store = store
        self._staging = staging

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if f"{STEP}/2" in keys:
            write(self._store, 2, self._staging)

    def __getattr__(self, name: str) -> Any:
        return getattr(PrefixStore("shards/1", self._store), name)


def test_only_shards_are_written_without_crc(staging: Path, tmp_path: Path) -> None:
    # A wrong CRC-32 is the only trace: torch.load does not compare it.
    write(HashStore(), 1, staging)
    file = staging / shard_name(1)
    assert torch.equal(load_file(file)["model"]["part1"], torch.ones(2))
    assert ZipFile(file).testzip() is not None
    torch.save({"of": "the trainer"}, tmp_path / "own.pt")
    assert ZipFile(tmp_path / "own.pt").testzip() is None


def test_error_of_an_owner_does_not_disturb_the_others(staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    write_with_error(store, 1, staging, monkeypatch)
    shards = pending(store, [1, 2], staging)
    shards._store = LateStore(store, staging)  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"^rank 1 could not write its shard of step 3: Stale") as caught:
        shards.collect(staging.parent)
    assert caught.value.may_pass
    assert not staging.exists()
    for rank in (1, 2):  # the second attempt finds no report of the first
        write(store, rank, staging)
    records = pending(store, [1, 2], staging).collect(staging.parent)
    assert sorted(records) == ["shard-00001.pt", "shard-00002.pt"]


def test_owner_that_does_not_report_is_named(staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_exchange, "OWNER_TIMEOUT_S", 0.01)
    store = HashStore()
    write(store, 1, staging)
    with pytest.raises(CheckpointError, match=r"^rank 2, 3 has not written its shard of step 3 in 0.01 s$"):
        pending(store, [1, 2, 3], staging).collect(staging.parent)


@pytest.mark.parametrize("is_saved", [True, False])
def test_shards_that_nobody_collects_are_removed(
    staging: Path, monkeypatch: pytest.MonkeyPatch, is_saved: bool
) -> None:
    """Of a step that is saved already, and of a failed save."""
    checkpoints = CheckpointStore(staging.parent)
    if is_saved:
        checkpoints.add(Snapshot(step=STEP, model={}, trainer={}, rank_states=[]))
    else:
        (checkpoints.folder / "step-00000003").mkdir(parents=True)
        monkeypatch.setattr(CheckpointStore, "_temp_name", lambda *_: checkpoints.folder / "missing" / "folder")
    store = HashStore()
    write(store, 1, staging)
    shards = pending(store, [1], staging)
    snapshot = Snapshot(
        step=STEP,
        model={},
        trainer={},
        rank_states=[],
        collect_shards=shards.collect,
        drop_shards=shards.drop,
    )
    if is_saved:
        checkpoints.add(snapshot)
    else:
        with pytest.raises(CheckpointError, match=r"^checkpoint of step 3 could not be written"):
            checkpoints.add(snapshot)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000003"]
