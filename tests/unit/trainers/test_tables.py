"""Embedding tables on servers: layout, initial values, updates, checkpoints, and units of lookups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hpcdist.checkpoint.state import merge
from hpcdist.errors import CheckpointError
from hpcdist.trainers.hybrid.tables import (
    Coalesced,
    Layout,
    TableShard,
    choose,
    put_rows,
    rows_as_units,
    sums_as_units,
    unit_of_row,
)

TABLES = {"a": 3000, "b": 7, "c": 1}


def shard(layout: Layout, server: int, optimizer: str = "adagrad") -> TableShard:
    cpu = torch.device("cpu")
    return TableShard(layout, server, optimizer=optimizer, lr=0.1, scale=0.5, seed=1, device=cpu)


def whole(shards: list[TableShard]) -> dict[str, Tensor]:
    return merge([one.checkpoint().content() for one in shards], "test")


def test_initial_rows_and_their_places_do_not_depend_on_the_number_of_servers() -> None:
    alone = whole([shard(Layout(TABLES, 4, 1), 0)])
    assert alone["tables.a.weight"].shape == (3000, 4)
    assert not torch.equal(alone["tables.b.weight"], alone["tables.a.weight"][:7])
    for num_servers in (2, 3, 10):
        layout = Layout(TABLES, 4, num_servers)
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
        one.update(Coalesced.of(rows, units), torch.ones(3, 4))
    return one


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sparse_adam"])
def test_shards_load_on_another_number_of_servers(optimizer: str) -> None:
    before = [updated(shard(Layout(TABLES, 4, 3), server, optimizer)) for server in range(3)]
    saved = [None, *(one.checkpoint().content() for one in before)]
    layout = Layout(TABLES, 4, 2)
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
        shard(Layout({"a": 2000}, 4, 1), 0, optimizer).load(saved)


def test_update_changes_the_rows_of_the_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcdist.trainers.hybrid.tables.UPDATE_ROWS", 2)  # more than one piece
    layout = Layout({"a": 6}, 2, 1)
    one, before = shard(layout, 0, "sgd"), shard(layout, 0).weight
    one.update(Coalesced.of(torch.tensor([4, 1, 4, 0]), torch.tensor([0, 0, 1, 1])), torch.tensor([[1.0, 2], [3, 4]]))
    change = torch.tensor([[3.0, 4], [1, 2], [0, 0], [0, 0], [4, 6], [0, 0]])
    torch.testing.assert_close(one.weight, before - 0.1 * change)


def test_put_rows_sets_the_given_rows() -> None:
    matrix = torch.zeros(4, 3)
    put_rows(matrix, torch.tensor([3, 1]), torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
    assert matrix.tolist() == [[0, 0, 0], [4, 5, 6], [0, 0, 0], [1, 2, 3]]


def ragged(*bags: list[int]) -> tuple[Tensor, Tensor]:
    rows = torch.tensor([row for one in bags for row in one], dtype=torch.int64)
    return rows, torch.tensor([0, *(len(one) for one in bags)]).cumsum(0)


@pytest.mark.parametrize("as_units", [rows_as_units, sums_as_units])
@pytest.mark.parametrize("starts", [[0, 10], [0, 4, 10], [0, 4, 4, 10]])
@pytest.mark.parametrize("bags", [([1, 9, 1], [], [5], [9, 0, 4]), ([1, 5], [5, 1]), ([],), ()])
def test_units_return_sums_of_bags_and_gradients_of_rows(as_units: Any, starts: Any, bags: Any) -> None:
    weight = torch.rand(10, 2, requires_grad=True)
    rows, offsets = ragged(*bags)
    units = as_units(rows, offsets, starts)
    values = []
    for server, own in enumerate(units.rows):
        part = weight[starts[server] : starts[server + 1]]
        unit = unit_of_row(len(own), None if units.offsets is None else units.offsets[server])
        values.append(torch.zeros(units.counts[server], 2).index_add(0, unit, part[own]))
    pooled = units.pooled(torch.cat(values).detach())
    expected = torch.zeros(len(offsets) - 1, 2).index_add(0, unit_of_row(len(rows), offsets[:-1]), weight[rows])
    torch.testing.assert_close(pooled, expected)
    gradient = torch.rand(len(offsets) - 1, 2)
    expected.backward(gradient)
    found = torch.zeros(10, 2)
    for server, (own, part) in enumerate(zip(units.rows, units.gradients(gradient), strict=True)):
        unit = unit_of_row(len(own), None if units.offsets is None else units.offsets[server])
        found.index_add_(0, own + starts[server], part[unit])
    torch.testing.assert_close(found, weight.grad)


def test_choose_returns_the_plan_with_less_traffic() -> None:
    same = ragged(*([[0, 1]] * 8))
    different = ragged(*([2 * bag, 2 * bag + 1] for bag in range(8)))
    other = ragged(*([2 * bag, 2 * bag + 1] for bag in range(8, 16)))
    assert not choose([same, same], [0, 100], 2).pool_at_server, "two rows, eight bags"
    assert choose([different, other], [0, 100], 2).pool_at_server, "sixteen rows, eight bags"
    assert not choose([same, same], [0, 100], 2).ahead, "all rows change"
    assert choose([different, other], [0, 100], 2).ahead
