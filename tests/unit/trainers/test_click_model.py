"""The trainer `hybrid` without ranks: click logs, figures, and embedding tables."""

import math
import random
import struct
import tempfile
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet
from sklearn.metrics import roc_auc_score
from torch import Tensor

from hpcdist.checkpoint.store import save_file, shard_name
from hpcdist.checkpoint.stored_weights import StoredWeights
from hpcdist.errors import CheckpointError, DataError
from hpcdist.run.figures import MAX_POINTS
from hpcdist.trainers.ddp.train import confusion_matrix
from hpcdist.trainers.hybrid import HybridConfig, click_logs
from hpcdist.trainers.hybrid.click_logs import Bags, Clicks, batches, padded
from hpcdist.trainers.hybrid.tables import (
    TableLayout,
    TableServer,
    TableShard,
    grouped,
    rows_as_units,
    sums_as_units,
    sums_of,
)
from hpcdist.trainers.hybrid.train import NUM_BINS, ClickModel, auc, calibration, load_clicks
from hpcdist.trainers.rl.train import returns_curves

# --- Click logs: files, errors in files, and the synthetic log, which does not depend on the number of readers.


COLUMNS: dict[str, Any] = {
    "label": [0, 1, 1, 0, 1, 0],
    "age": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5],
    "user": [3, 1, 4, 1, 5, 0],
    "tag": [[0, 1], [], [2], [1, 1, 1], [0], [2, 0]],
    "city": ["Ulm", "Bonn", "Ulm", "Köln", "Bonn", "Ulm"],
}


def config(path: Path, **options: Any) -> HybridConfig:
    columns = {"tables": {"user": 6, "tag": 3, "city": 1000}, "numeric_columns": ["age"], "hashed_tables": ["city"]}
    return HybridConfig(**{"file": str(path), **columns, **options})


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
    """Return `raw` truncated, or with replaced or removed bytes anywhere or in the footer."""
    place = generator.randrange(generator.choice((0, max(0, len(raw) - 1500))), len(raw))
    end = generator.choice((place + 1, place + 200, len(raw)))
    return raw[:place] + generator.randbytes(generator.choice((0, 1, 40))) + raw[end:]


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
    # The last of six samples is for testing; each trainer has two of the others.
    assert [first.labels.tolist(), second.labels.tolist()] == [[0, 1], [1, 0]]
    assert [test.labels.tolist(), more_test.labels.tolist()] == [[], [0]]
    assert second.numeric.tolist() == [[2.5], [3.5]]
    assert [bag(first, sample, 0) for sample in range(2)] == [[3], [1]]
    assert bag(first, 0, 1) == [0, 1]
    assert bag(first, 1, 1) == []
    assert bag(second, 1, 1) == [1, 1, 1]
    assert bag(first, 0, 2) == bag(second, 0, 2) == bag(more_test, 0, 2), "the same city"
    assert bag(first, 1, 2) != bag(first, 0, 2)


def test_file_is_read_in_pieces_with_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(write(tmp_path, "parquet", **{name: values * 4 for name, values in COLUMNS.items()}))
    beats: list[str] = []
    clicks: list[Clicks] = []
    num_beats = []
    for num_samples in (100, 5):  # row groups have two samples: the pieces of 22 have 6, 6, 6 and 4
        monkeypatch.setattr(click_logs, "_PIECE_SAMPLES", num_samples)
        beats.clear()
        clicks.append(load_clicks(cfg, 0, shares=range(1), num_shares=1, alive=lambda: beats.append(""))[0])
        num_beats.append(len(beats))
    whole, joined = clicks
    assert num_beats == [3, 6]  # the first one before the file is opened, the last one for its test samples
    assert torch.equal(joined.bags.ids, whole.bags.ids)
    assert torch.equal(joined.bags.offsets, whole.bags.offsets)
    assert torch.equal(joined.numeric, whole.numeric)
    assert torch.equal(joined.labels, whole.labels)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({}, {"tables": {"users": 6}, "hashed_tables": []}, r"has no column 'users'"),
        ({"user": [3, 1, 4, 1, 9, 0]}, {}, r"'user' has ids 1 to 9, but hybrid.tables.user=6: raise it to 10"),
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
    with pytest.raises(DataError, match=r"has 6 samples: too few for 6 trainers"):
        load_clicks(config(write(tmp_path, "parquet")), 0, shares=range(1), num_shares=6)


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
    assert clicks.placed(lambda _, tables: tables).bags.ids.tolist() == [0, 0, 0, 1]
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


# --- Figures of the trainers in the report of a run.


def test_figures_of_trainers() -> None:
    matrix = confusion_matrix([5, 1, 2, 6], ("cat", "dog"))
    assert (matrix.names, matrix.values) == (["cat", "dog"], [[5, 1], [2, 6]])
    assert confusion_matrix([5, 1, 2, 6]).names == ["0", "1"]
    scores = torch.linspace(0, 1, 1000, dtype=torch.float64)
    points = calibration(scores, (torch.arange(1000) % 2 == 0).float()).lines["model"]
    expected = torch.stack([scores.view(NUM_BINS, -1).mean(1), torch.full((NUM_BINS,), 0.5, dtype=torch.float64)], 1)
    torch.testing.assert_close(torch.tensor(points, dtype=torch.float64), expected)
    lines = returns_curves("CartPole-v1", [(step, 1.0 * step, 0.0, 2.0 * step) for step in range(5000)]).lines
    assert [lines[name][-1] for name in ("mean", "smallest", "largest")] == [[4999, 4999], [4999, 0], [4999, 9998]]
    assert len(lines["mean"]) <= MAX_POINTS


# --- The click model in one process, and the AUC.


def test_auc_equals_the_one_of_scikit_learn() -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, 2, (500,)).float()
    for scores in (torch.randn(500), torch.randint(0, 5, (500,)).float()):
        assert math.isclose(auc(scores, labels), roc_auc_score(labels, scores), rel_tol=1e-6)
    assert math.isnan(auc(torch.randn(3), torch.ones(3)))


def test_padding_has_no_effect() -> None:
    torch.manual_seed(0)
    cfg = HybridConfig(tables={"a": 4, "b": 3}, embedding_dim=2, hidden_sizes=[3])
    model = ClickModel(cfg, bag_size=2)
    ids = torch.tensor([[3, -1, -1, -1], [3, 1, 2, 2]])
    numeric = torch.full((2, cfg.num_numeric), 0.5)
    found = model(torch.cat([numeric, ids], dim=1).double())
    weights: dict[str, Any] = {name: table.weight for name, table in model.tables.items()}
    a, b = weights["a"], weights["b"]
    pooled = torch.stack([torch.cat([a[3], torch.zeros(2)]), torch.cat([a[3] + a[1], 2 * b[2]])])
    expected = model.dense(torch.cat([pooled, numeric], dim=1)).squeeze(1).sigmoid()
    torch.testing.assert_close(found, expected)


# --- Embedding tables on servers: layout, initial values, updates, checkpoints, and units of lookups.


TABLES = {"a": 3000, "b": 7, "c": 1}


def shard(layout: TableLayout, server: int, optimizer: str = "adagrad") -> TableShard:
    cfg = HybridConfig(table_optimizer=optimizer, table_lr=0.1)  # type: ignore[arg-type]
    return TableShard(layout, server, cfg, seed=1, device=torch.device("cpu"))


def whole(shards: list[TableShard]) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / shard_name(server) for server in range(len(shards))]
        for one, file in zip(shards, files, strict=True):
            save_file(one.checkpoint().content(), file)
        return dict(StoredWeights({}, files))


def test_initial_rows_do_not_depend_on_the_number_of_servers() -> None:
    alone = whole([shard(TableLayout(TABLES, 4, 1), 0)])
    assert alone["tables.a.weight"].shape == (3000, 4)
    assert not torch.equal(alone["tables.b.weight"], alone["tables.a.weight"][:7])
    for num_servers in (2, 3, 10):
        layout = TableLayout(TABLES, 4, num_servers)
        shards = [shard(layout, server) for server in range(num_servers)]
        found = whole(shards)
        assert all(torch.equal(found[name], alone[name]) for name in alone)
        ids = torch.tensor([0, 2999, 1500, 6, 0, 0])
        placed = layout.place(ids, torch.tensor([0, 0, 0, 1, 1, 2]))
        assert layout.starts[-1] == 3008
        joined = torch.cat([one.weight for one in shards])
        names = ["a", "a", "a", "b", "b", "c"]
        expected = torch.stack([alone[f"tables.{name}.weight"][row] for name, row in zip(names, ids, strict=True)])
        assert torch.equal(joined[placed], expected)


def updated(one: TableShard) -> TableShard:
    for _ in range(2):
        rows, units = torch.tensor([2, 0, 2, 1]), torch.tensor([0, 0, 1, 2])
        one.update(*grouped(rows, units), torch.ones(3, 4))
    return one


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sparse_adam"])
def test_shards_load_on_another_number_of_servers(optimizer: str) -> None:
    before = [updated(shard(TableLayout(TABLES, 4, 3), server, optimizer)) for server in range(3)]
    saved = [None, *(one.checkpoint().content() for one in before)]
    layout = TableLayout(TABLES, 4, 2)
    after = [shard(layout, server, optimizer) for server in range(2)]
    for one in after:
        one.weight.zero_()
        one.load(saved)
        assert one.optimizer.step == 2
    assert all(torch.equal(whole(before)[name], table) for name, table in whole(after).items())

    def state(shards: list[TableShard], key: str) -> Tensor:
        return torch.cat([one.table_rows("a", one.optimizer.state[key]) for one in shards])

    for key in before[0].optimizer.state:
        assert torch.equal(state(before, key), state(after, key))
    with pytest.raises(CheckpointError, match=r"lacks 1000 rows of table 'a'"):
        after[1].load(saved[:3])
    with pytest.raises(CheckpointError, match=r"table 'a' has another size: 3000 × 4"):
        shard(TableLayout({"a": 2000}, 4, 1), 0, optimizer).load(saved)


def test_update_changes_the_rows_of_the_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcdist.trainers.hybrid.tables.UPDATE_ROWS", 2)  # more than one piece
    layout = TableLayout({"a": 6}, 2, 1)
    one, before = shard(layout, 0, "sgd"), shard(layout, 0).weight
    one.update(*grouped(torch.tensor([4, 1, 4, 0]), torch.tensor([0, 0, 1, 1])), torch.tensor([[1.0, 2], [3, 4]]))
    change = torch.tensor([[3.0, 4], [1, 2], [0, 0], [0, 0], [4, 6], [0, 0]])
    torch.testing.assert_close(one.weight, before - 0.1 * change)


def test_push_answers_with_values_as_they_are_after_the_update() -> None:
    one, before = shard(TableLayout({"a": 6}, 2, 1), 0, "sgd"), shard(TableLayout({"a": 6}, 2, 1), 0).weight
    server = TableServer(one, num_trainers=2)
    server.look_up(0, torch.tensor([0, 1]), None, True)
    server.look_up(1, torch.tensor([1, 4]), None, True)
    server.look_up(0, torch.tensor([2, 4, 5, 1]), None, True)  # ahead
    first = server.push(0, torch.ones(2, 2), None, None)
    assert not first.done(), "it waits for the gradients of the other trainer"
    second = server.push(1, torch.ones(2, 2), torch.tensor([3, 0]), None)
    # The mean over two trainers, times the learning rate 0.1.
    torch.testing.assert_close(one.weight, before - torch.tensor([[0.05], [0.1], [0], [0], [0.05], [0]]))
    changed, late = first.result()  # type: ignore[misc]
    assert changed is not None
    assert changed.tolist() == [1, 3]
    assert torch.equal(late, one.weight[[4, 1]])
    units, values = second.result()  # type: ignore[misc]
    assert units is None
    assert torch.equal(values, one.weight[[3, 0]])
    server.push(0, torch.ones(4, 2), None, None)
    assert server.push(1, torch.ones(2, 2), None, None).result() is None, "there is no next batch"


def test_last_trainer_does_not_wait_for_the_next_update(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TableServer(shard(TableLayout({"a": 6}, 2, 1), 0, "sgd"), num_trainers=1)
    next_update = server._next_update
    is_answered = threading.Event()
    waits: list[bool] = []

    def noted() -> Any:
        waits.append(is_answered.wait(2))
        return next_update()

    server.look_up(0, torch.tensor([0, 1]), None, True)
    server._prepared = next_update()
    monkeypatch.setattr(server, "_next_update", noted)
    server.push(0, torch.ones(2, 2), torch.tensor([2]), None)
    is_answered.set()
    server._preparation.shutdown()
    assert waits == [True]


def ragged(*bags: list[int]) -> Bags:
    ids = torch.tensor([row for one in bags for row in one], dtype=torch.int64)
    return Bags(ids, torch.tensor([0, *(len(one) for one in bags)]).cumsum(0))


@pytest.mark.parametrize("as_units", [rows_as_units, sums_as_units])
@pytest.mark.parametrize("starts", [[0, 10], [0, 4, 10], [0, 4, 4, 10]])
@pytest.mark.parametrize("bags", [([1, 9, 1], [], [5], [9, 0, 4]), ([1, 5], [5, 1]), ([],), ()])
def test_units_return_sums_of_bags_and_gradients_of_rows(as_units: Any, starts: Any, bags: Any) -> None:
    weight = torch.rand(10, 2, requires_grad=True)
    wanted = ragged(*bags)
    lookup = as_units(wanted, starts)
    servers = list(zip(lookup.units, starts, strict=False))
    sums = [torch.zeros(len(units), 2).index_add(0, units.of_id, weight[units.ids + start]) for units, start in servers]
    lookup.values = torch.cat(sums).detach()
    expected = torch.zeros(len(wanted), 2).index_add(0, wanted.of_id, weight[wanted.ids])
    torch.testing.assert_close(lookup.pooled(), expected)
    gradient = torch.rand(len(wanted), 2)
    expected.backward(gradient)
    found = torch.zeros(10, 2)
    parts = sums_of(lookup.bags_of_unit, gradient).split(lookup.counts)
    for (units, start), part in zip(servers, parts, strict=True):
        found.index_add_(0, units.ids + start, part[units.of_id])
    torch.testing.assert_close(found, weight.grad)
