"""Click logs: bags of ids, numeric features and a label per sample, from a file or synthetic.

In the synthetic log each row of each table and each numeric feature has an effect, and a click is drawn from the sum
of a sample's effects. The AUC of that sum is the best that a model can reach.
"""

import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from hpcdist.data.datasets import digest_of
from hpcdist.errors import DataError
from hpcdist.trainers.hybrid import NUM_SYNTHETIC_NUMERIC, HybridConfig

#: Column of a file with the labels 0 and 1.
LABEL_COLUMN = "label"
#: Number of samples of the synthetic log that are drawn together.
BLOCK = 4096
#: Maximum number of ids in a bag of the synthetic log. Its first rows are the most popular: row = rows × u², u uniform.
MAX_BAG_SIZE = 3
#: Bytes at the start and at the end of a file that its digest covers.
_DIGEST_BYTES = 1 << 20
#: Scale of the effects of numeric features and rows, and the log-odds of a click without effects.
NUMERIC_EFFECT, ROW_EFFECT, BIAS = 0.4, 0.9, -1.0


@dataclass(frozen=True)
class Bags:
    """Ragged bags: `ids` int64 [n], `offsets` int64 [bags + 1]. The index of a bag is sample × tables + table."""

    ids: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of_sizes(cls, ids: Tensor, sizes: Tensor) -> Self:
        """Return consecutive bags of these numbers of ids, int64 [bags]."""
        return cls(ids, torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]))

    @property
    def of_id(self) -> Tensor:
        """The bag of each id, int64 [n]."""
        return torch.arange(len(self)).repeat_interleave(self.offsets.diff())

    def take(self, bags: Tensor) -> "Bags":
        sizes = self.offsets.diff()[bags]
        shift = self.offsets[bags] - (sizes.cumsum(0) - sizes)
        places = shift.repeat_interleave(sizes)
        return Bags.of_sizes(self.ids[places.add_(torch.arange(len(places)))], sizes)


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

    def take(self, samples: Tensor) -> "Clicks":
        count = len(self.tables)
        bags = self.bags.take((samples[:, None] * count + torch.arange(count)).flatten())
        best = None if self.best_scores is None else self.best_scores[samples]
        return Clicks(bags, self.numeric[samples], self.labels[samples], self.tables, best)

    def placed(self, place: Callable[[Tensor, Tensor], Tensor]) -> Self:
        """Return the same clicks with other ids, by a function of id and number of the table, int64 [n] each."""
        placed = place(self.bags.ids, self.bags.of_id % len(self.tables))
        return replace(self, bags=Bags(placed, self.bags.offsets))


def batches(num_samples: int, batch_size: int, *, seed: int, epoch: int, start: int = 0) -> Iterator[Tensor]:
    """Yield the sample indices of each batch of an epoch, shuffled by (seed, epoch), from batch `start` on."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    yield from order.split(batch_size)[start:]


def identity(cfg: HybridConfig, seed: int) -> tuple[str, str, str]:
    """Return name, source and digest of the click log; for a file, the digest covers its size, start and end."""
    if not cfg.file:
        synthetic = (cfg.num_samples, cfg.tables, NUM_SYNTHETIC_NUMERIC)
        return "synthetic-clicks", "generated", digest_of(list(synthetic), seed)
    path = Path(cfg.file).expanduser()
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _DIGEST_BYTES))
        end = file.read(_DIGEST_BYTES)
        file.seek(0)
        start = file.read(_DIGEST_BYTES)
    return path.stem, str(path), digest_of(size, start.hex(), end.hex())


class SyntheticLog:
    def __init__(self, cfg: HybridConfig, seed: int) -> None:
        self._cfg = cfg
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        self._effects = [torch.randn(rows, generator=generator) for rows in cfg.tables.values()]
        self._numeric = torch.randn(NUM_SYNTHETIC_NUMERIC, generator=generator)

    def __len__(self) -> int:
        return self._cfg.num_samples

    def read(self, first: int, end: int) -> Clicks:
        blocks = range(first // BLOCK, -(-end // BLOCK))
        return _joined([self._block(block) for block in blocks]).take(torch.arange(first, end) - blocks.start * BLOCK)

    def _block(self, block: int) -> Clicks:
        cfg, count = self._cfg, len(self._cfg.tables)
        generator = torch.Generator().manual_seed((self._seed + 1) * 1_000_003 + block)
        num_bags = BLOCK * count
        lengths = torch.randint(1, MAX_BAG_SIZE + 1, (num_bags,), generator=generator)
        table_of_id = (torch.arange(num_bags) % count).repeat_interleave(lengths)
        rows = torch.tensor(list(cfg.tables.values()))[table_of_id]
        u = torch.rand(len(rows), generator=generator, dtype=torch.float64)
        ids = (rows * u**2).long()
        effect = torch.empty(len(ids))
        for number, effects in enumerate(self._effects):
            mine = table_of_id == number
            effect[mine] = effects[ids[mine]]
        sample = torch.arange(BLOCK).repeat_interleave(lengths.view(BLOCK, count).sum(1))
        score = torch.zeros(BLOCK).index_add_(0, sample, effect)
        numeric = torch.randn(BLOCK, NUM_SYNTHETIC_NUMERIC, generator=generator)
        num_ids = count * (MAX_BAG_SIZE + 1) / 2  # of a sample, on average
        score = BIAS + ROW_EFFECT * score / num_ids**0.5 + NUMERIC_EFFECT * numeric @ self._numeric
        labels = torch.bernoulli(score.sigmoid(), generator=generator)
        return Clicks(Bags.of_sizes(ids, lengths), numeric, labels, tuple(cfg.tables), score)


def _joined(parts: list[Clicks]) -> Clicks:
    sizes = torch.cat([part.bags.offsets.diff() for part in parts])
    best = [part.best_scores for part in parts if part.best_scores is not None]
    return Clicks(
        Bags.of_sizes(torch.cat([part.bags.ids for part in parts]), sizes),
        torch.cat([part.numeric for part in parts]),
        torch.cat([part.labels for part in parts]),
        parts[0].tables,
        torch.cat(best) if best else None,
    )


class FileLog:
    """A click log in a Parquet or CSV file."""

    def __init__(self, cfg: HybridConfig) -> None:
        import pyarrow as pa  # here and below, because it takes 0.3 s
        from pyarrow import csv, parquet

        #: Exceptions of pyarrow for damaged content: its kernels document none.
        self._damaged = (
            *(OSError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError, NotImplementedError),
            pa.ArrowException,
        )
        self._cfg = cfg
        self._columns = [LABEL_COLUMN, *cfg.numeric_columns, *cfg.tables]
        self._path = Path(cfg.file).expanduser()
        self._parquet: Any = None
        try:
            if self._path.suffix == ".csv":
                text = {name: pa.string() for name in cfg.tables}
                options = csv.ConvertOptions(include_columns=self._columns, column_types=text)
                self._table = csv.read_csv(self._path, convert_options=options)
                self._num_rows = self._table.num_rows
            else:
                # Checksums are verified if the file has them; other changes may go unnoticed.
                self._parquet = parquet.ParquetFile(self._path, page_checksum_verification=True)
                self._num_rows = self._parquet.metadata.num_rows
                self._check_metadata(self._parquet.metadata)
        except self._damaged as error:
            raise self._unreadable(error) from error

    def _check_metadata(self, metadata: Any) -> None:
        groups = self._groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        sizes = [group.num_rows for group in groups]
        if any(size < 0 for size in sizes) or self._num_rows != sum(sizes):
            raise DataError(f"{self._path} is damaged: its row groups do not have {self._num_rows} rows")
        if missing := set(self._columns) - set(self._parquet.schema_arrow.names):
            raise DataError(
                f"{self._path} has no column {sorted(missing)[0]!r}: it needs {LABEL_COLUMN!r} and those of"
                " hybrid.numeric_columns and hybrid.tables"
            )
        # Equal values need no space in the file, but 8 bytes each in memory. A file is refused if they take more than
        # 256 times its size, unless they take little.
        num_values = sum(group.column(at).num_values for group in groups for at in range(group.num_columns))
        num_bytes = 8 * num_values + sum(group.total_byte_size for group in groups)
        size = self._path.stat().st_size
        if num_bytes > max(64 << 20, 256 * size):
            raise DataError(
                f"{self._path} has {num_values:,} values in {size} bytes, which would exhaust the memory: if it is a"
                " click log, write it without compression and dictionaries"
            )

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(f"{self._path} cannot be read as a click log: {' '.join(str(error).split())[:300]}")

    def __len__(self) -> int:
        return int(self._num_rows)

    def read(self, first: int, end: int) -> Clicks:
        """Return these samples. Raises DataError if the file is damaged or does not match the config."""
        try:
            clicks = self._read(first, end)
        except self._damaged as error:
            raise self._unreadable(error) from error
        if len(clicks) != end - first:
            raise DataError(f"{self._path} is damaged: {end - first} samples expected, {len(clicks)} found")
        return clicks

    def _read(self, first: int, end: int) -> Clicks:
        cfg = self._cfg
        if self._parquet is None:
            table = self._table.slice(first, end - first)
        else:  # the row groups that have some of these samples
            ends = list(accumulate(group.num_rows for group in self._groups))
            groups = range(bisect_right(ends, first), bisect_left(ends, end) + 1)
            begin = ends[groups.start] - self._groups[groups.start].num_rows
            table = self._parquet.read_row_groups(groups, columns=self._columns).slice(first - begin, end - first)
        labels = self._numbers(table, LABEL_COLUMN)
        if not bool(((labels == 0) | (labels == 1)).all()):
            raise DataError(f"{self._path}: column {LABEL_COLUMN!r} must be 0 or 1")
        numeric = torch.zeros(len(labels), len(cfg.numeric_columns))
        for number, name in enumerate(cfg.numeric_columns):
            numeric[:, number] = self._numbers(table, name)
        columns = [self._bags(table, name, rows) for name, rows in cfg.tables.items()]
        # From the order of the file, by column, to order by sample.
        sizes = torch.cat([column.offsets.diff() for column in columns])
        whole = Bags.of_sizes(torch.cat([column.ids for column in columns]), sizes)
        order = torch.arange(len(whole)).view(len(columns), -1).t().flatten()
        return Clicks(whole.take(order), numeric, labels, tuple(cfg.tables))

    def _numbers(self, table: Any, name: str) -> Tensor:
        from pyarrow import types

        column = table[name]
        kinds = (types.is_integer, types.is_floating, types.is_boolean)
        if column.null_count or not any(is_kind(column.type) for is_kind in kinds):
            raise DataError(f"{self._path}: column {name!r} must have numbers without nulls, it is {column.type}")
        return torch.from_numpy(np.array(column.to_numpy(), dtype=np.float32))

    def _bags(self, table: Any, name: str, rows: int) -> Bags:
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
        if name in self._cfg.hashed_tables:
            coded = values.cast(pa.string()).dictionary_encode()
            hashes = [zlib.crc32(text.encode()) % rows for text in coded.dictionary.to_pylist()]
            indices = torch.from_numpy(np.array(coded.indices, dtype=np.int64))
            return Bags.of_sizes(torch.tensor(hashes, dtype=torch.int64)[indices], lengths)
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
        return Bags.of_sizes(ids, lengths)


def padded(clicks: Clicks, bag_size: int) -> Tensor:
    """Return the samples as input of `ClickModel`: float64 [N, num_numeric + tables × bag_size]."""
    ids = torch.full((len(clicks.bags), bag_size), -1.0, dtype=torch.float64)
    for row, bag in zip(ids, clicks.bags.ids.tensor_split(clicks.bags.offsets[1:-1]), strict=True):
        row[: len(bag)] = bag[:bag_size]
    return torch.cat([clicks.numeric.double(), ids.view(len(clicks), -1)], dim=1)
