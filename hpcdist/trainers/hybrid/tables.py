"""Embedding tables on parameter servers, and the bags of a batch as units of these servers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor

from hpcdist.checkpoint.state import Shard
from hpcdist.config.topology import share_of
from hpcdist.errors import CheckpointError

# Embedding tables, sharded by row over parameter servers: layout, rows of a server, and sparse optimizers.
#
# A server holds its rows of all tables in one matrix, so that several tables need one lookup and one update. Global
# rows (`Layout.place`) are numbered across the servers: server 0's rows of every table, then server 1's.
#
# Lookups and updates have *units*: single rows, or sums of the server's rows of a bag.

#: Number of rows that are drawn together, from (seed, table, number of the block).
BLOCK_ROWS = 1024
#: Number of rows that are updated together, so that their gradients and state fit into a core's cache.
UPDATE_ROWS = 2048


@dataclass(frozen=True)
class Layout:
    """Shards of the tables. Server s of n has rows `R × s // n` to `R × (s + 1) // n` of a table of R rows."""

    tables: Mapping[str, int]  #: number of rows by name
    dim: int
    num_servers: int

    def span(self, table: str, server: int) -> range:
        """Return the rows of a table on a server."""
        return share_of(server, self.num_servers, self.tables[table])

    def num_rows(self, server: int) -> int:
        """Return the number of rows of a server's matrix."""
        return sum(len(self.span(table, server)) for table in self.tables)

    @property
    def starts(self) -> list[int]:
        """First global row of each server, then the number of all rows."""
        return [0, *accumulate(self.num_rows(server) for server in range(self.num_servers))]

    def place(self, ids: Tensor, table_of_id: Tensor) -> Tensor:
        """Return the global rows, int64 [n], of ids in tables (given by number)."""
        placed = torch.empty_like(ids)
        begins = self.starts[:-1]  # global row of the table's first row on each server
        for number, table in enumerate(self.tables):
            mine = table_of_id == number
            spans = [self.span(table, server) for server in range(self.num_servers)]
            server = torch.searchsorted(torch.tensor([span.stop for span in spans]), ids[mine], right=True)
            shifts = torch.tensor([begin - span.start for begin, span in zip(begins, spans, strict=True)])
            placed[mine] = ids[mine] + shifts[server]
            begins = [begin + len(span) for begin, span in zip(begins, spans, strict=True)]
        return placed


def fill_initial(out: Tensor, rows: range, *, table: str, scale: float, seed: int) -> None:
    """Write the initial values of rows of a table into `out` [len(rows), dim]: uniform in ± scale.

    They depend on (seed, table, row) only, so that they are equal for every number of servers.
    """
    for block in range(rows.start // BLOCK_ROWS, -(-rows.stop // BLOCK_ROWS)):
        digest = hashlib.blake2b(f"{seed}/{table}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        drawn = torch.empty(BLOCK_ROWS, out.shape[1]).uniform_(-scale, scale, generator=generator)
        first = block * BLOCK_ROWS
        begin, end = max(rows.start, first), min(rows.stop, first + BLOCK_ROWS)
        out[begin - rows.start : end - rows.start] = drawn[begin - first : end - first]


class SparseOptimizer:
    """SGD, Adagrad or SparseAdam with the formulas of torch.optim, for the rows of a batch.

    It is not torch.optim, because sparse tensors cost two to four times as much: writing 40,000 of a million rows of
    64 numbers takes 12 ms as a sparse `add_`, 1.1 ms as one copy per row.
    """

    BETAS, ADAM_EPS, ADAGRAD_EPS = (0.9, 0.999), 1e-8, 1e-10

    def __init__(self, name: Literal["sgd", "adagrad", "sparse_adam"], lr: float, weight: Tensor) -> None:
        self.name = name
        self.lr = lr
        self.step = 0
        names = {"sgd": [], "adagrad": ["sum"], "sparse_adam": ["exp_avg", "exp_avg_sq"]}[name]
        self.state = {key: torch.zeros_like(weight) for key in names}

    def change(self, rows: Tensor, grad: Tensor) -> Tensor:
        """Return the change of these different rows for their gradient, both [n, dim]; `grad` is overwritten."""
        if self.name == "sgd":
            return grad.mul_(-self.lr)
        if self.name == "adagrad":
            total = self.state["sum"].index_select(0, rows).addcmul_(grad, grad)
            put_rows(self.state["sum"], rows, total)
            return grad.div_(total.sqrt_().add_(self.ADAGRAD_EPS)).mul_(-self.lr)
        first, second = self.BETAS
        mean = self.state["exp_avg"].index_select(0, rows).lerp_(grad, 1 - first)
        square = self.state["exp_avg_sq"].index_select(0, rows).mul_(second).addcmul_(grad, grad, value=1 - second)
        put_rows(self.state["exp_avg"], rows, mean)
        put_rows(self.state["exp_avg_sq"], rows, square)
        size = self.lr * (1 - second**self.step) ** 0.5 / (1 - first**self.step)
        return mean.div_(square.sqrt_().add_(self.ADAM_EPS)).mul_(-size)


def put_rows(matrix: Tensor, rows: Tensor, values: Tensor) -> None:
    """Set different rows. NumPy copies each row as one element, 3 to 10 times faster than torch."""
    if matrix.is_cuda:
        matrix.index_copy_(0, rows, values)
    else:
        as_one = np.dtype((np.void, matrix.shape[1] * matrix.element_size()))
        matrix.numpy().view(as_one).reshape(-1)[rows.numpy()] = values.contiguous().numpy().view(as_one).reshape(-1)


class TableShard:
    """One server's rows of all tables, [rows, dim], with their optimizer."""

    def __init__(
        self, layout: Layout, server: int, *, optimizer: str, lr: float, scale: float, seed: int, device: torch.device
    ) -> None:
        self._spans = {table: layout.span(table, server) for table in layout.tables}
        ends = accumulate(map(len, self._spans.values()))
        self._slices = {
            table: slice(end - len(span), end) for (table, span), end in zip(self._spans.items(), ends, strict=True)
        }
        self._layout = layout
        self.weight = torch.empty(layout.num_rows(server), layout.dim, device=device)
        for table, span in self._spans.items():
            fill_initial(self.table_rows(table), span, table=table, scale=scale, seed=seed)
        self.optimizer = SparseOptimizer(optimizer, lr, self.weight)  # type: ignore[arg-type]

    def values(self, rows: Tensor, offsets: Tensor | None) -> Tensor:
        """Return the sum of each unit's rows, [units, dim], on the host; without offsets each row is a unit."""
        device = self.weight.device
        rows = rows.to(device)
        if offsets is None:
            return self.weight.index_select(0, rows).cpu()
        return F.embedding_bag(rows, self.weight, offsets.to(device), mode="sum").cpu()

    def update(self, batch: Coalesced, grads: Tensor) -> None:
        """Do one optimizer step with the gradients of the batch's units, [units, dim]."""
        device, optimizer = self.weight.device, self.optimizer
        optimizer.step += 1
        grads = grads.to(device)
        for begin in range(0, len(batch.rows), UPDATE_ROWS):
            rows = batch.rows[begin : begin + UPDATE_ROWS].to(device)
            firsts = batch.firsts[begin : begin + UPDATE_ROWS + 1]
            units = batch.units[firsts[0] : firsts[-1]].to(device)
            grad = F.embedding_bag(units, grads, (firsts[:-1] - firsts[0]).to(device), mode="sum")
            change = optimizer.change(rows, grad)
            put_rows(self.weight, rows, change.add_(self.weight.index_select(0, rows)))

    # --- checkpoints

    def table_rows(self, table: str, matrix: Tensor | None = None) -> Tensor:
        """Return a view of this server's rows of a table."""
        return (self.weight if matrix is None else matrix)[self._slices[table]]

    def checkpoint(self) -> Shard:
        """Return views of all rows and of the optimizer's state, which has the same rows."""
        return Shard(
            model={weight_name(table): self.table_rows(table) for table in self._spans},
            rows={weight_name(table): (span.start, self._layout.tables[table]) for table, span in self._spans.items()},
            trainer={
                "step": self.optimizer.step,
                "state": {
                    weight_name(table): {key: self.table_rows(table, m) for key, m in self.optimizer.state.items()}
                    for table in self._spans
                },
            },
        )

    def load(self, shards: Iterable[Mapping[str, Any] | None]) -> None:
        """Load this server's rows from shards of any number of servers, one at a time, until it has all rows.

        Raises CheckpointError if rows are missing.
        """
        missing = {table: len(span) for table, span in self._spans.items()}
        for shard in filter(None, shards):
            for table in self._spans:
                missing[table] -= self._load_table(table, shard)
            self.optimizer.step = shard["trainer"]["step"]
            if not any(missing.values()):
                return
        for table, count in missing.items():
            if count:
                raise CheckpointError(f"the checkpoint lacks {count} rows of table {table!r}")

    def _load_table(self, table: str, shard: Mapping[str, Any]) -> int:
        """Load the rows of a table that the shard has of this server's; return their number."""
        name, span = weight_name(table), self._spans[table]
        rows = shard["model"][name]
        first, total = map(int, shard["rows"][name])
        if total != self._layout.tables[table] or rows.shape[1] != self._layout.dim:
            raise CheckpointError(f"the checkpoint's table {table!r} has another size: {total} × {rows.shape[1]}")
        begin, end = max(span.start, first), min(span.stop, first + len(rows))
        if begin >= end:
            return 0
        here, there = slice(begin - span.start, end - span.start), slice(begin - first, end - first)
        self.table_rows(table)[here] = rows[there]
        for key, matrix in self.optimizer.state.items():
            self.table_rows(table, matrix)[here] = shard["trainer"]["state"][name][key][there]
        return end - begin


def weight_name(table: str) -> str:
    """Return the name of a table's weight in the whole model (`ClickModel`)."""
    return f"tables.{table}.weight"


# --- units


@dataclass(frozen=True)
class Coalesced:
    """Units by row: different sorted `rows` [n]; `units[firsts[i]:firsts[i + 1]]` are the units with `rows[i]`."""

    rows: Tensor
    units: Tensor
    firsts: Tensor

    @classmethod
    def of(cls, rows: Tensor, units: Tensor) -> Coalesced:
        """Group pairs of row and unit by row; the units of a row keep their order, so that sums are deterministic."""
        # One sort of integers takes 0.1 ms for 20,000 of them; torch.unique takes 2 ms.
        bits = max(1, (len(rows) - 1).bit_length())
        packed = (rows.numpy() << bits) | np.arange(len(rows))
        packed.sort()
        in_order = packed >> bits
        firsts = np.flatnonzero(np.diff(in_order, prepend=-1))
        return cls(
            torch.from_numpy(in_order[firsts]),
            units[torch.from_numpy(packed & ((1 << bits) - 1))],
            torch.from_numpy(np.append(firsts, len(rows))),
        )


def unit_of_row(num_rows: int, offsets: Tensor | None) -> Tensor:
    """Return the unit of each row, int64 [rows]."""
    if offsets is None:
        return torch.arange(num_rows)
    lengths = torch.diff(offsets, append=torch.tensor([num_rows]))
    return torch.arange(len(offsets)).repeat_interleave(lengths)


# The bags of a batch as units of the parameter servers: what a trainer asks them for, and how bags follow from it.
#
# A unit is one or more rows of one server; its value is their sum. With rows 0 to 4 on server A, rows 5 to 9 on server
# B and the bags [1, 7] and [1, 2, 7]:
#
#     rows as units    A: 1, 2               B: 7        each row once; the trainer sums bags from these three values
#     sums as units    A: [1], [1, 2]        B: [7], [7] one sum per bag and server, which the trainer adds
#
# `choose` takes the form with fewer units. The gradient of a unit is the sum of those of the bags that contain it.


@dataclass(frozen=True)
class LookupPlan:
    """How lookups are exchanged, chosen once per attempt. The results are equal up to rounding."""

    pool_at_server: bool
    ahead: bool  #: whether values of the next batch are sent before this batch's update


@dataclass(frozen=True)
class Units:
    """The bags of a batch as units of the servers, in the order of the servers."""

    rows: list[Tensor]  #: of each server, int64, relative to its first row
    counts: list[int]  #: number of units by server
    offsets: list[Tensor] | None = None  #: start of each unit in a server's `rows`; None if each row is a unit
    places: Tensor | None = None  #: units of each bag, bag after bag; None if bag b is unit b of every server
    offsets_of_bag: Tensor | None = None  #: start of each bag in `places`
    bags: Tensor | None = None  #: bags of each unit, unit after unit; None if unit u of every server is bag u
    firsts: Tensor | None = None  #: start of each unit in `bags`; None if each unit is part of one bag

    def pooled(self, values: Tensor) -> Tensor:
        """Return the sums of the bags [bags, dim] for the values of all units [units, dim]."""
        if self.places is None:
            parts = values.split(self.counts)
            return values if len(parts) == 1 else torch.stack(parts).sum(0)
        return F.embedding_bag(self.places, values, self.offsets_of_bag, mode="sum")

    def gradients(self, grad: Tensor) -> Sequence[Tensor]:
        """Return the gradients of each server's units [units, dim] for those of the sums of the bags [bags, dim]."""
        if self.bags is None:
            return [grad] * len(self.counts)
        if self.firsts is None:
            units = grad.index_select(0, self.bags)
        else:
            units = F.embedding_bag(self.bags, grad, self.firsts, mode="sum")
        return list(units.split(self.counts))


def rows_as_units(rows: Tensor, offsets: Tensor, starts: Sequence[int]) -> Units:
    """Return units for sums at the trainer: each different row of the bags is a unit.

    Args:
        rows: global rows of the bags, int64 [n].
        offsets: start of each bag in `rows`, then the number of rows, int64 [bags + 1].
        starts: first global row of each server, then the number of all rows.
    """
    found = Coalesced.of(rows, unit_of_row(len(rows), offsets[:-1]))
    cuts = torch.searchsorted(found.rows, torch.tensor(starts)).tolist()
    counts = [end - begin for begin, end in pairwise(cuts)]
    # Sorted rows are ordered by server. Sorted by bag again, they are the units of each bag.
    unit = torch.arange(len(found.rows)).repeat_interleave(found.firsts.diff())
    return Units(
        rows=[part - start for part, start in zip(found.rows.split(counts), starts, strict=False)],
        counts=counts,
        places=Coalesced.of(found.units, unit).units,
        offsets_of_bag=offsets[:-1],
        bags=found.units,
        firsts=found.firsts[:-1],
    )


def sums_as_units(rows: Tensor, offsets: Tensor, starts: Sequence[int]) -> Units:
    """Return units for sums at the servers: each server's rows of a bag are a unit. Arguments as in `rows_as_units`."""
    num_bags = len(offsets) - 1
    bag_of_row = unit_of_row(len(rows), offsets[:-1])
    own_rows, own_offsets, bags = [], [], []
    for start, end in pairwise(starts):
        if len(starts) > 2:
            mine = ((rows >= start) & (rows < end)).nonzero().squeeze(1)
            here, bag = rows[mine], bag_of_row[mine]
        else:
            here, bag = rows, bag_of_row
        firsts = torch.from_numpy(np.flatnonzero(np.diff(bag.numpy(), prepend=-1)))
        own_rows.append(here - start)
        own_offsets.append(firsts)
        bags.append(bag[firsts])
    counts = [len(part) for part in bags]
    if all(count == num_bags for count in counts):
        return Units(own_rows, counts, own_offsets)
    of_unit = torch.cat(bags)
    places = Coalesced.of(of_unit, torch.arange(len(of_unit))).units
    offsets_of_bag = torch.searchsorted(of_unit.sort().values, torch.arange(num_bags))
    return Units(own_rows, counts, own_offsets, places, offsets_of_bag, of_unit)


def choose(batches: Sequence[tuple[Tensor, Tensor]], starts: Sequence[int], num_trainers: int) -> LookupPlan:
    """Return the plan with less traffic for the first two batches (or one), given as rows and offsets.

    Values are requested ahead if less than a quarter of the units change meanwhile and have to be sent again. The
    estimate assumes that batches of other trainers are similar.
    """
    pool_at_server = sum(sums_as_units(*batches[0], starts).counts) < sum(rows_as_units(*batches[0], starts).counts)
    as_units = sums_as_units if pool_at_server else rows_as_units
    units = as_units(*batches[-1], starts)
    touched = batches[0][0].unique()
    changed = 0
    for server, rows in enumerate(units.rows):
        hit = torch.isin(rows + starts[server], touched).numpy()
        if units.offsets is not None and len(hit):
            hit = np.logical_or.reduceat(hit, units.offsets[server].numpy())
        changed += int(hit.sum())
    same = changed / max(1, sum(units.counts))
    return LookupPlan(pool_at_server=pool_at_server, ahead=1 - (1 - same) ** num_trainers < 0.25)
