"""Click logs: files, errors in files, and the synthetic log, which does not depend on the number of readers."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet

from hpcdist.errors import DataError
from hpcdist.trainers.hybrid import HybridConfig
from hpcdist.trainers.hybrid.click_logs import Bags, Clicks, batches, padded
from hpcdist.trainers.hybrid.train import auc, load_clicks

COLUMNS: dict[str, Any] = {
    "label": [0, 1, 1, 0, 1, 0],
    "age": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5],
    "user": [3, 1, 4, 1, 5, 0],
    "tag": [[0, 1], [], [2], [1, 1, 1], [0], [2, 0]],
    "city": ["Ulm", "Bonn", "Ulm", "Köln", "Bonn", "Ulm"],
}


def config(path: Path, **options: Any) -> HybridConfig:
    tables = {"user": 6, "tag": 3, "city": 1000}
    return HybridConfig(
        **{
            "file": str(path),
            "tables": tables,
            "numeric_columns": ["age"],
            "hashed_tables": ["city"],
            "eval_fraction": 0.3,
        }
        | options
    )


def write(folder: Path, kind: str, **changed: Any) -> Path:
    path = folder / f"log.{kind}"
    columns = COLUMNS | changed
    if kind == "csv":
        columns["tag"] = ["|".join(map(str, bag)) if bag else None for bag in columns["tag"]]
        csv.write_csv(pa.table(columns), path)
    else:
        parquet.write_table(pa.table(columns), path, row_group_size=2)
    return path


def bag(clicks: Clicks, sample: int, table: int) -> list[int]:
    number = sample * len(clicks.tables) + table
    first, end = clicks.bags.offsets[number : number + 2].tolist()
    return clicks.bags.ids[first:end].tolist()


def damaged(raw: bytes, generator: random.Random) -> bytes:
    """Return `raw` truncated, with flipped bits (anywhere, or in the footer), or with replaced or removed bytes."""
    kind, data = generator.randrange(5), bytearray(raw)
    place = generator.randrange(len(data))
    if kind == 0:
        del data[place:]
    elif kind == 1:
        for _ in range(generator.choice((1, 3, 10))):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    elif kind == 2:
        data[generator.randrange(max(0, len(data) - 1500), len(data))] ^= 1 << generator.randrange(8)
    elif kind == 3:
        data[place : place + generator.randrange(1, 40)] = generator.randbytes(generator.randrange(1, 40))
    else:
        del data[place : place + generator.randrange(1, 200)]
    return bytes(data)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_damaged_file_is_read_or_raises_data_error(tmp_path: Path, kind: str) -> None:
    generator = random.Random(7)
    messages: list[str] = []
    path = write(tmp_path, kind, **{name: values * 40 for name, values in COLUMNS.items()})
    raw = path.read_bytes()
    for _ in range(200):
        path.write_bytes(damaged(raw, generator))
        try:
            load_clicks(config(path), 0, shares=range(1), num_shares=1)
        except DataError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert all(str(path) in text and len(text) < 600 and "\n" not in text for text in messages)


def test_parquet_file_with_a_wrong_page_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    table = pa.table(COLUMNS | {"age": [float(number) for number in range(6)]})
    parquet.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    raw = bytearray(path.read_bytes())
    place = raw.index(struct.pack("<dd", 2.0, 3.0))
    raw[place + 6] ^= 8  # a different, valid number
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"log\.parquet cannot be read as a click log: .*checksum"):
        load_clicks(config(path), 0, shares=range(1), num_shares=1)


def test_small_parquet_file_with_millions_of_rows_is_refused(tmp_path: Path) -> None:
    rows = 2_000_000
    values = {"label": 0, "age": 1.5, "user": 3, "tag": 1, "city": "Ulm"}
    path = tmp_path / "log.parquet"
    parquet.write_table(pa.table({name: pa.repeat(value, rows) for name, value in values.items()}), path)
    assert path.stat().st_size < 100_000
    with pytest.raises(
        DataError, match=r"log\.parquet has 10,000,000 values in \d+ bytes, which would exhaust the memory: if"
    ):
        load_clicks(config(path), 0, shares=range(1), num_shares=1)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_each_trainer_reads_its_share_of_a_file(tmp_path: Path, kind: str) -> None:
    cfg = config(write(tmp_path, kind))
    first, test = load_clicks(cfg, 0, shares=range(1), num_shares=2)
    second, more_test = load_clicks(cfg, 0, shares=range(1, 2), num_shares=2)
    # Two of six samples are for testing; each trainer has two of the other four.
    assert [first.labels.tolist(), second.labels.tolist()] == [[0, 1], [1, 0]]
    assert [test.labels.tolist(), more_test.labels.tolist()] == [[1], [0]]
    assert second.numeric.tolist() == [[2.5], [3.5]]
    assert [bag(first, sample, 0) for sample in range(2)] == [[3], [1]]
    assert bag(first, 0, 1) == [0, 1]
    assert bag(first, 1, 1) == []
    assert bag(second, 1, 1) == [1, 1, 1]
    assert bag(first, 0, 2) == bag(second, 0, 2) == bag(more_test, 0, 2), "the same city"
    assert bag(first, 1, 2) == bag(test, 0, 2) != bag(first, 0, 2)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({}, {"tables": {"users": 6}, "hashed_tables": []}, r"has no column 'users'"),
        ({"user": [3, 1, 4, 1, 9, 0]}, {}, r"'user' has ids 0 to 9, but hybrid.tables.user=6: raise it to 10"),
        ({"label": [0, 1, 2, 0, 1, 0]}, {}, r"column 'label' must be 0 or 1"),
        ({"age": [1.0, None, 2, 3, 4, 5]}, {}, r"column 'age' must have numbers without nulls"),
        ({}, {"hashed_tables": []}, r"column 'city' has ids that are not integers: add it to hybrid.hashed_tables"),
        ({"user": [3, None, 4, 1, 5, 0]}, {}, r"column 'user' has null ids"),
        ({}, {"file": "/nowhere/log.parquet"}, r"/nowhere/log.parquet cannot be read as a click log"),
    ],
)
def test_file_that_does_not_match_the_config_raises_data_error(
    tmp_path: Path, changed: Any, options: Any, message: str
) -> None:
    path = write(tmp_path, "parquet", **changed)
    with pytest.raises(DataError, match=message):
        load_clicks(config(path, **options), 0, shares=range(1), num_shares=1)


def test_file_with_too_few_samples_raises_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 6 samples: too few for 5 trainers"):
        load_clicks(config(write(tmp_path, "parquet")), 0, shares=range(1), num_shares=5)


def test_synthetic_log_does_not_depend_on_the_number_of_readers() -> None:
    cfg = HybridConfig(num_samples=10_000, tables={"a": 10, "b": 5})
    whole, test = load_clicks(cfg, 3, shares=range(1), num_shares=1)
    assert (len(whole), len(test)) == (9000, 1000)
    parts = [load_clicks(cfg, 3, shares=range(share, share + 1), num_shares=3) for share in range(3)]
    assert torch.equal(torch.cat([train.labels for train, _ in parts]), whole.labels)
    assert torch.equal(torch.cat([train.bags.ids for train, _ in parts]), whole.bags.ids)
    assert torch.equal(torch.cat([test.numeric for _, test in parts]), test.numeric)
    other, _ = load_clicks(cfg, 4, shares=range(1), num_shares=1)
    assert not torch.equal(other.labels, whole.labels)
    assert test.best_scores is not None
    assert 0.6 < auc(test.best_scores, test.labels) < 0.95
    assert set(whole.bags.offsets.diff().tolist()) == {1, 2, 3}


def test_take_and_padded_follow_the_order_of_the_samples() -> None:
    bags = Bags(torch.tensor([5, 6, 7, 8]), torch.tensor([0, 2, 2, 3, 4]))
    clicks = Clicks(bags, torch.tensor([[0.5], [1.5]]), torch.tensor([0.0, 1.0]), ("a", "b"))
    assert clicks.table_of_id.tolist() == [0, 0, 0, 1]
    reordered = clicks.take(torch.tensor([1, 0, 1]))
    assert reordered.bags.ids.tolist() == [7, 8, 5, 6, 7, 8]
    assert reordered.bags.offsets.tolist() == [0, 1, 2, 4, 4, 5, 6]
    assert padded(reordered, 2)[:2].tolist() == [[1.5, 7, -1, 8, -1], [0.5, 5, 6, -1, -1]]
    assert len(clicks.take(torch.arange(0))) == 0


def test_epoch_has_each_sample_once_and_starts_at_any_batch() -> None:
    whole = list(batches(10, 4, seed=1, epoch=2))
    assert sorted(torch.cat(whole).tolist()) == list(range(10))
    rest = list(batches(10, 4, seed=1, epoch=2, start=1))
    assert [one.tolist() for one in rest] == [one.tolist() for one in whole[1:]]
    assert torch.cat(whole).tolist() != torch.cat(list(batches(10, 4, seed=1, epoch=3))).tolist()
