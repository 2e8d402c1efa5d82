"""Boxes of tensors in the files of several ranks, and the reader that joins them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcdist.checkpoint.sharded import (
    Box,
    ShardReader,
    Target,
    Whole,
    divide,
    map_leaves,
    nearest_first,
    parts_of,
    read_shard,
)
from hpcdist.checkpoint.state import Shard
from hpcdist.checkpoint.store import save_file, shard_name
from hpcdist.checkpoint.stored_weights import StoredWeights
from hpcdist.errors import CheckpointError

TABLE = torch.arange(30.0).view(5, 6)
MOMENT = ("optimizer", "state", 0, "exp_avg")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three ranks: a table and its moment in boxes of both dimensions, and a bias of one rank."""
    boxes = [(slice(0, 3), slice(0, 2)), (slice(0, 3), slice(2, 6)), (slice(3, 5), slice(0, 6))]
    paths = []
    for rank, (rows, columns) in enumerate(boxes):
        box = Box((rows.start, columns.start), (5, 6))
        model = {"table": TABLE[rows, columns].clone()}
        if rank == 1:
            model["bias"] = torch.ones(3)
        shard = Shard(model=model, boxes={"table": box, MOMENT: box}, trainer={MOMENT: -TABLE[rows, columns]})
        paths.append(tmp_path / shard_name(rank))
        save_file(shard.content(), paths[-1])
    return paths


@pytest.mark.parametrize(
    ("num_saved", "rank", "world_size", "first"),
    [
        (4, 2, 4, [2, 1, 3, 0]),
        (8, 3, 4, [3, 6, 7, 5]),  # itself, then the two that had its rows
        (4, 6, 8, [3, 2, 1, 0]),
    ],
)
def test_ranks_that_likely_had_the_parts_come_first(
    num_saved: int, rank: int, world_size: int, first: list[int]
) -> None:
    assert nearest_first(num_saved, rank, world_size)[:4] == first


def test_boxes_join_to_whole_tensors(files: list[Path]) -> None:
    found = StoredWeights({"table": None, "norm": torch.zeros(2)}, files)
    assert list(found) == ["table", "norm", "bias"]
    assert found.whole("table") == Whole((5, 6), torch.float32)
    assert found.whole("norm") == Whole((2,), torch.float32)
    assert torch.equal(found["table"], TABLE)
    assert torch.equal(found["bias"], torch.ones(3))
    moment = ShardReader(files).read(MOMENT, Whole((5, 6), torch.float64))
    assert torch.equal(moment, -TABLE.double())


@pytest.mark.parametrize("offset", [(0, 0), (1, 1), (2, 3), (3, 0), (4, 5)])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (3, 6), (5, 6)])
def test_any_box_is_read_from_the_boxes_in_the_files(
    files: list[Path], offset: tuple[int, int], shape: tuple[int, int]
) -> None:
    rows = slice(offset[0], min(5, offset[0] + shape[0]))
    columns = slice(offset[1], min(6, offset[1] + shape[1]))
    expected = TABLE[rows, columns]
    memory = torch.full(expected.shape, torch.nan)
    ShardReader(files).fill("table", [Target(memory, offset)])
    assert torch.equal(memory, expected)


def test_reader_opens_no_file_after_it_has_found_all(files: list[Path]) -> None:
    target = Target(torch.empty(2, 6), (3, 0))
    files[0].write_bytes(b"damaged")
    ShardReader([files[2], files[0]]).fill("table", [target])
    assert torch.equal(target.tensor, TABLE[3:5])


def test_values_in_no_shard_are_errors(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}: 12 values of optimizer.state.0.exp_avg are in no shard$"):
        ShardReader(files[:2]).read(MOMENT, Whole((5, 6), torch.float32))
    with pytest.raises(CheckpointError, match=r"^a checkpoint without shards: 2 values of bias are in no shard$"):
        ShardReader([]).read("bias", Whole((2,), torch.float32))
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}: 12 values of table are in no shard$"):
        StoredWeights({}, files[:2])["table"]
    with pytest.raises(CheckpointError, match=r"^the checkpoint has no values of norm: its shards are missing$"):
        StoredWeights({"norm": None}, files)["norm"]


def test_damaged_shards_are_named(files: list[Path]) -> None:
    content = torch.load(files[0], weights_only=True)
    damages: list[dict[str, Any]] = [
        {"model": 7},
        {"boxes": {"table": [[0, 0]]}},
        {"boxes": {"table": [[0], [5]]}},
        {"boxes": {"other": [[0], [5]]}},
        {"boxes": {MOMENT: [[0, 0], [5, 6]]}, "trainer": None},
    ]
    for damage in damages:
        save_file(content | damage, files[0])
        with pytest.raises(CheckpointError, match=rf"^{files[0]}: a shard is damaged \(\w+Error: "):
            list(parts_of(files[0]))


def test_boxes_may_have_numbers_of_numpy(tmp_path: Path) -> None:
    part = torch.ones(2, 3)
    box = Box.of_rows(part, np.int64(1), np.int32(4))  # type: ignore[arg-type]
    path = ("optimizer", np.int64(0))
    shard = Shard(model={"table": part}, boxes={"table": box, path: box}, trainer={("optimizer", 0): part})
    save_file(shard.content(), tmp_path / shard_name(0))
    found = read_shard(tmp_path / shard_name(0))
    assert found["boxes"] == {"table": [[1, 0], [4, 3]], ("optimizer", 0): [[1, 0], [4, 3]]}
    unnamed = Shard(boxes={("optimizer", None, b"", object()): box})
    with pytest.raises(
        CheckpointError, match=r"^boxes has the key \('optimizer', None, .*, but keys in a checkpoint are"
    ):
        unnamed.content()


def test_rows_of_an_older_checkpoint_are_boxes(tmp_path: Path) -> None:
    for rank, rows in enumerate((range(3), range(3, 5))):
        model = {"table": TABLE[rows.start : rows.stop].clone()}
        content = {"model": model, "rows": {"table": [rows.start, 5]}, "trainer": {"step": 4}}
        save_file(content, tmp_path / shard_name(rank))
    files = sorted(tmp_path.glob("shard-*.pt"))
    assert torch.equal(StoredWeights({}, files)["table"], TABLE)
    found = read_shard(files[1])
    assert (found["boxes"], found["trainer"]) == ({"table": ((3, 0), (5, 6))}, {"step": 4})
    save_file({"model": {}, "rows": {"table": [3]}}, files[0])
    with pytest.raises(CheckpointError, match=r"a shard is damaged \((KeyError|ValueError): "):
        read_shard(files[0])


def test_state_without_sharded_tensors_stays_as_it_is() -> None:
    weight = torch.ones(2)
    model, trainer = {"w": weight}, {"groups": [{"lr": 0.1, "betas": (0.9, weight)}], "empty": {}}
    found = divide(model, trainer)
    assert found.model["w"] is weight
    assert found.trainer == trainer
    assert found.tensors == {}
    paths: list[tuple[Any, ...]] = []

    def note(path: tuple[Any, ...], value: Any) -> Any:
        paths.append(path)
        return value

    map_leaves(note, trainer)
    assert paths == [("groups", 0, "lr"), ("groups", 0, "betas", 0), ("groups", 0, "betas", 1)]


def test_whole_tensors_are_not_divided() -> None:
    tensor: Tensor = torch.zeros(2, 3)
    assert divide({"a": tensor}, {}).wholes == {}
