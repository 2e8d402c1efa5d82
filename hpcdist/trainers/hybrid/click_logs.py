"""Click logs: bags of ids, numeric features and a label per sample, from a Parquet or CSV file or synthetic.

In the synthetic log each row of each table and each numeric feature has an effect, and a click is drawn from the sum
of a sample's effects. The AUC of that sum is the best that a model can reach.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.errors import DataError
from hpcdist.trainers.hybrid.schema import HybridConfig

if TYPE_CHECKING:
    import pyarrow as pa

#: Number of samples of the synthetic log that are drawn together.
BLOCK = 4096
#: Scale of the effects of numeric features and rows, and the log-odds of a click without effects.
NUMERIC_EFFECT, ROW_EFFECT, BIAS = 0.4, 0.9, -1.0
#: Exceptions of pyarrow for damaged content besides its own: its kernels document none.
_DAMAGED = (OSError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError, NotImplementedError)


@dataclass(frozen=True)
class Bags:
    """Ragged bags: `ids` int64 [n], `offsets` int64 [bags + 1]. The index of a bag is sample × tables + table."""

    ids: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, bags: Tensor) -> Bags:
        """Return these bags [k], in this order."""
        lengths = (self.offsets[1:] - self.offsets[:-1])[bags]
        offsets = torch.zeros(len(bags) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        shift = self.offsets[bags] - offsets[:-1]
        places = shift.repeat_interleave(lengths).add_(torch.arange(int(offsets[-1])))
        return Bags(self.ids[places], offsets)


@dataclass(frozen=True)
class Clicks:
    """Samples of a click log: `numeric` float32 [N, k], `labels` float32 [N], and one bag per sample and table."""

    bags: Bags
    numeric: Tensor
    labels: Tensor
    tables: tuple[str, ...]
    best_scores: Tensor | None = None  #: float32 [N], of the model of the synthetic log

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, samples: Tensor) -> Clicks:
        """Return these samples [B], in this order."""
        count = len(self.tables)
        bags = self.bags.take((samples[:, None] * count + torch.arange(count)).flatten())
        best = None if self.best_scores is None else self.best_scores[samples]
        return Clicks(bags, self.numeric[samples], self.labels[samples], self.tables, best)

    def with_ids(self, ids: Tensor) -> Clicks:
        return replace(self, bags=Bags(ids, self.bags.offsets))

    @property
    def table_of_id(self) -> Tensor:
        """Number of each id's table, int64 [n]."""
        tables = torch.arange(len(self.bags)) % len(self.tables)
        return tables.repeat_interleave(self.bags.offsets.diff())


def batches(num_samples: int, batch_size: int, *, seed: int, epoch: int, start: int = 0) -> Iterator[Tensor]:
    """Yield the sample indices of each batch of an epoch, shuffled by (seed, epoch), from batch `start` on."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    yield from order.split(batch_size)[start:]


def load_clicks(cfg: HybridConfig, seed: int, *, share: int, num_shares: int) -> tuple[Clicks, Clicks]:
    """Return one trainer's share of the training samples and of the test samples.

    Training shares have equal size, so up to `num_shares` - 1 samples are left out; test shares have each test sample
    once. Raises DataError for a file that is missing, damaged or does not match the config.
    """
    source = _SyntheticLog(cfg, seed) if not cfg.file else _FileLog(cfg)
    num_test = max(1, round(len(source) * cfg.eval_fraction))
    num_train = (len(source) - num_test) // num_shares
    if num_train < 1:
        raise DataError(
            f"{cfg.file or 'the synthetic log'} has {len(source)} samples: too few for {num_shares} trainers"
        )
    first_test = len(source) - num_test
    bounds = [first_test + num_test * number // num_shares for number in (share, share + 1)]
    return source.read(share * num_train, (share + 1) * num_train), source.read(bounds[0], bounds[1])


# --- synthetic


class _SyntheticLog:
    def __init__(self, cfg: HybridConfig, seed: int) -> None:
        self._cfg = cfg
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        self._effects = [torch.randn(rows, generator=generator) for rows in cfg.tables.values()]
        self._numeric = torch.randn(cfg.num_numeric_columns, generator=generator)

    def __len__(self) -> int:
        return self._cfg.num_samples

    def read(self, first: int, end: int) -> Clicks:
        parts = []
        for block in range(first // BLOCK, -(-end // BLOCK)):
            clicks = self._block(block)
            begin, stop = max(first - block * BLOCK, 0), min(end - block * BLOCK, BLOCK)
            parts.append(clicks if stop - begin == BLOCK else clicks.take(torch.arange(begin, stop)))
        return _joined(parts)

    def _block(self, block: int) -> Clicks:
        cfg, count = self._cfg, len(self._cfg.tables)
        generator = torch.Generator().manual_seed((self._seed + 1) * 1_000_003 + block)
        num_bags = BLOCK * count
        if cfg.fixed_bags:
            lengths = torch.full((num_bags,), cfg.max_bag_size)
        else:
            lengths = torch.randint(1, cfg.max_bag_size + 1, (num_bags,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        table_of_id = (torch.arange(num_bags) % count).repeat_interleave(lengths)
        rows = torch.tensor(list(cfg.tables.values()))[table_of_id]
        u = torch.rand(len(rows), generator=generator, dtype=torch.float64)
        ids = (rows * u ** (1 + cfg.skew)).long()
        effect = torch.empty(len(ids))
        for number, effects in enumerate(self._effects):
            mine = table_of_id == number
            effect[mine] = effects[ids[mine]]
        sample = torch.arange(BLOCK).repeat_interleave(lengths.view(BLOCK, count).sum(1))
        score = torch.zeros(BLOCK).index_add_(0, sample, effect)
        mean_length = cfg.max_bag_size if cfg.fixed_bags else (cfg.max_bag_size + 1) / 2
        numeric = torch.randn(BLOCK, cfg.num_numeric_columns, generator=generator)
        score = BIAS + ROW_EFFECT * score / (count * mean_length) ** 0.5 + NUMERIC_EFFECT * numeric @ self._numeric
        labels = torch.bernoulli(score.sigmoid(), generator=generator)
        return Clicks(Bags(ids, offsets), numeric, labels, tuple(cfg.tables), score)


def _joined(parts: list[Clicks]) -> Clicks:
    lengths = torch.cat([part.bags.offsets.diff() for part in parts])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.cat([part.bags.ids for part in parts])
    best = [part.best_scores for part in parts if part.best_scores is not None]
    return Clicks(
        Bags(ids, offsets),
        torch.cat([part.numeric for part in parts]),
        torch.cat([part.labels for part in parts]),
        parts[0].tables,
        torch.cat(best) if best else None,
    )


# --- files


class _FileLog:
    def __init__(self, cfg: HybridConfig) -> None:
        import pyarrow as pa
        from pyarrow import csv, parquet

        self._cfg = cfg
        self._columns = [cfg.label_column, *cfg.numeric_columns, *cfg.tables]
        self._path = Path(cfg.file).expanduser()
        try:
            if self._path.suffix == ".csv":
                text = {name: pa.string() for name in cfg.tables}
                options = csv.ConvertOptions(include_columns=self._columns, column_types=text)
                self._table: Any = csv.read_csv(self._path, convert_options=options)
                self._parquet = None
                self._num_rows = self._table.num_rows
            else:
                # Checksums are verified if the file has them; other changes may go unnoticed.
                self._parquet = parquet.ParquetFile(self._path, page_checksum_verification=True)
                self._num_rows = self._parquet.metadata.num_rows
                groups = [self._parquet.metadata.row_group(number) for number in range(self._parquet.num_row_groups)]
                if min([0, *(group.num_rows for group in groups)]) < 0 or self._num_rows != sum(
                    group.num_rows for group in groups
                ):
                    raise DataError(f"{self._path} is damaged: its row groups do not have {self._num_rows} rows")
                missing = set(self._columns) - set(self._parquet.schema_arrow.names)
                if missing:
                    raise DataError(
                        f"{self._path} has no column {sorted(missing)[0]!r}: see hybrid.tables and .numeric"
                    )
        except (*_DAMAGED, pa.ArrowException) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(f"{self._path} cannot be read as a click log: {str(error).partition(chr(10))[0][:300]}")

    def __len__(self) -> int:
        return int(self._num_rows)

    def read(self, first: int, end: int) -> Clicks:
        """Return these samples. Raises DataError if the file is damaged or does not match the config."""
        import pyarrow as pa

        try:
            clicks = self._read(first, end)
        except (*_DAMAGED, pa.ArrowException) as error:
            raise self._unreadable(error) from error
        if len(clicks) != end - first:
            raise DataError(f"{self._path} is damaged: {end - first} samples expected, {len(clicks)} found")
        return clicks

    def _read(self, first: int, end: int) -> Clicks:
        table = self._rows(first, end)
        cfg = self._cfg
        labels = self._numbers(table, cfg.label_column)
        if not bool(((labels == 0) | (labels == 1)).all()):
            raise DataError(f"{self._path}: column {cfg.label_column!r} must be 0 or 1")
        numeric = (
            torch.stack([self._numbers(table, name) for name in cfg.numeric_columns], dim=1)
            if cfg.numeric_columns
            else None
        )
        columns = [self._bags(table, name, rows) for name, rows in cfg.tables.items()]
        # From the order of the file, by column, to order by sample.
        whole = Bags(
            torch.cat([column.ids for column in columns]),
            torch.cat([torch.zeros(1, dtype=torch.int64), *(column.offsets.diff() for column in columns)]).cumsum(0),
        )
        order = torch.arange(len(whole)).view(len(columns), -1).t().flatten()
        empty = torch.zeros(len(labels), 0)
        return Clicks(whole.take(order), empty if numeric is None else numeric, labels, tuple(cfg.tables))

    def _rows(self, first: int, end: int) -> pa.Table:
        """Read the row groups of a Parquet file that have some of these samples."""
        if self._parquet is None:
            return self._table.slice(first, end - first)
        begin, skip = 0, 0
        groups: list[int] = []
        for group in range(self._parquet.num_row_groups):
            after = begin + self._parquet.metadata.row_group(group).num_rows
            if begin < end and after > first:
                skip = skip if groups else first - begin
                groups.append(group)
            begin = after
        return self._parquet.read_row_groups(groups, columns=self._columns).slice(skip, end - first)

    def _numbers(self, table: pa.Table, name: str) -> Tensor:
        import pyarrow as pa

        column = table[name]
        if column.null_count or not (
            pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)
        ):
            raise DataError(f"{self._path}: column {name!r} must have numbers without nulls, it is {column.type}")
        return torch.from_numpy(np.array(column.to_numpy(), dtype=np.float32))

    def _bags(self, table: pa.Table, name: str, rows: int) -> Bags:
        import pyarrow as pa
        import pyarrow.compute as pc

        column = table[name].combine_chunks()
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            empty = pa.scalar(None, column.type)  # an empty field is an empty bag
            column = pc.split_pattern(pc.if_else(pc.equal(column, ""), empty, column), "|")
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            lengths = torch.from_numpy(np.array(pc.fill_null(pc.list_value_length(column), 0), dtype=np.int64))
            values = column.flatten()
        else:
            lengths, values = torch.ones(len(column), dtype=torch.int64), column
        if values.null_count:
            raise DataError(f"{self._path}: column {name!r} has null ids: write an empty bag as an empty list")
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        if name in self._cfg.hashed_tables:
            return Bags(_hashed(values, rows), offsets)
        try:
            ids = torch.from_numpy(np.array(values.cast(pa.int64()), dtype=np.int64))
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{self._path}: column {name!r} has ids that are not integers: add it to hybrid.hashed_tables"
            ) from error
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= rows):
            raise DataError(
                f"{self._path}: column {name!r} has ids {int(ids.min())} to {int(ids.max())}, but"
                f" hybrid.tables.{name}={rows}: raise it to {int(ids.max()) + 1}, or add it to hybrid.hashed_tables"
            )
        return Bags(ids, offsets)


def _hashed(values: pa.Array, rows: int) -> Tensor:
    import pyarrow as pa

    coded = values.cast(pa.string()).dictionary_encode()
    hashes = [zlib.crc32(text.encode()) % rows for text in coded.dictionary.to_pylist()]
    return torch.tensor(hashes, dtype=torch.int64)[torch.from_numpy(np.array(coded.indices, dtype=np.int64))]


def padded(clicks: Clicks, bag_size: int) -> Tensor:
    """Return the samples as input of `ClickModel`: float64 [N, num_numeric + tables × bag_size]."""
    lengths = clicks.bags.offsets.diff()
    bag = torch.arange(len(lengths)).repeat_interleave(lengths)
    place = torch.arange(len(clicks.bags.ids)) - clicks.bags.offsets[:-1].repeat_interleave(lengths)
    keep = place < bag_size
    ids = torch.full((len(lengths), bag_size), -1.0, dtype=torch.float64)
    ids[bag[keep], place[keep]] = clicks.bags.ids[keep].double()
    return torch.cat([clicks.numeric.double(), ids.view(len(clicks), -1)], dim=1)
