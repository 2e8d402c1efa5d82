"""The search of all ranks for the newest valid checkpoint, as rank 0 leads it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcdist.checkpoint.store import CheckpointStore, FileRecord, Snapshot, save_file
from hpcdist.errors import CheckpointError
from hpcdist.rank.checkpoint_search import CheckpointSearch

SHARD = "shard-00000.pt"


class ThreeRanks:
    """Groups of rank 0, with what ranks 1 and 2 say of their files in each checkpoint."""

    def __init__(self, problems: Mapping[str, list[str]]) -> None:
        self._problems = problems
        self._folder = ""

    def broadcast(self, message: dict[str, Any]) -> dict[str, Any]:
        self._folder = Path(message.get("folder", "")).name
        return message

    def await_all(self, alive: Callable[[], None]) -> None:
        alive()

    def gather(self, own: str) -> list[str]:
        return [own, *self._problems.get(self._folder, ["", ""])]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Two checkpoints of three files each: rank 1 verifies the shard, rank 2 `trainer.pt`."""
    store = CheckpointStore(tmp_path)

    def collect(folder: Path) -> dict[str, FileRecord]:
        return {SHARD: save_file({"model": {}, "boxes": {}, "trainer": None}, folder / SHARD)}

    for step in (1, 2):
        store.add(Snapshot(step=step, model={}, trainer={}, rank_states=[], collect_shards=collect))
    return store


def newest(store: CheckpointStore, problems: list[str]) -> str:
    groups: Any = ThreeRanks({"step-00000002": problems})
    beats: list[str] = []
    found = CheckpointSearch(store, groups, 0, 3, lambda: beats.append("")).newest()
    assert len(beats) >= 2, "one for a file of rank 0, and one in the wait for the others"
    return Path(found).name


def test_problem_of_one_rank_alone_is_an_error(store: CheckpointStore) -> None:
    assert newest(store, ["", ""]) == "step-00000002"
    with pytest.raises(CheckpointError, match=r"^cannot be read, on rank 1 only: rank 0 reads the file as it was writ"):
        newest(store, ["cannot be read", ""])


def test_problem_with_a_skipped_checkpoint_does_not_count(store: CheckpointStore) -> None:
    (store.folder / "step-00000002" / "trainer.pt").write_bytes(
        bytes((store.folder / "step-00000002" / "trainer.pt").stat().st_size)
    )
    assert newest(store, ["cannot be read", "has changed"]) == "step-00000001"
