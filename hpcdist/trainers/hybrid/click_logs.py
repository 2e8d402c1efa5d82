"""Click logs: bags of ids, numeric features and a label per sample, from a file or synthetic.

In the synthetic log each row of each table and each numeric feature has an effect, and a click is drawn from the sum
of a sample's effects. The AUC of that sum is the best that a model can reach.
"""

import math
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
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
#: Samples of a file that are read together, or more: row groups are not divided.
_PIECE_SAMPLES = 1 << 18
#: Bytes at the start and at the end of a file that its digest covers.
_DIGEST_BYTES = 1 << 20
#: A larger Parquet file may take this many times its size in memory, a smaller one this many bytes. More than that
#: points to a file that was made to exhaust the memory.
_MAX_EXPANSION = 256
_MIN_MEMORY_BYTES = 64 << 20
#: Limit of the characters of pyarrow's message in an error.
_MAX_REASON_LENGTH = 300
#: Factor of a seed before a number is added: seeds of different epochs or blocks differ for fewer than so many.
_SEED_STRIDE = 1_000_003
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
        """Return the bags with these indices, in this order."""
        sizes = self.offsets.diff()[bags]
        new_offsets = sizes.cumsum(0) - sizes
        shifts = self.offsets[bags] - new_offsets
        places = shifts.repeat_interleave(sizes)
        places += torch.arange(len(places))
        return Bags.of_sizes(self.ids[places], sizes)


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
        """Return the samples with these indices, in this order."""
        num_tables = len(self.tables)
        bags = samples[:, None] * num_tables + torch.arange(num_tables)
        best_scores = None
        if self.best_scores is not None:
            best_scores = self.best_scores[samples]
        return Clicks(
            bags=self.bags.take(bags.flatten()),
            numeric=self.numeric[samples],
            labels=self.labels[samples],
            tables=self.tables,
            best_scores=best_scores,
        )

    def placed(self, place: Callable[[Tensor, Tensor], Tensor]) -> Self:
        """Return the same clicks with other ids, by a function of id and number of the table, int64 [n] each."""
        table_of_id = self.bags.of_id % len(self.tables)
        new_ids = place(self.bags.ids, table_of_id)
        return replace(self, bags=Bags(new_ids, self.bags.offsets))


def batches(num_samples: int, batch_size: int, *, seed: int, epoch: int, start: int = 0) -> Iterator[Tensor]:
    """Yield the sample indices of each batch of an epoch, shuffled by (seed, epoch), from batch `start` on."""
    generator = torch.Generator().manual_seed(seed * _SEED_STRIDE + epoch)
    order = torch.randperm(num_samples, generator=generator)
    yield from order.split(batch_size)[start:]


def identity(cfg: HybridConfig, seed: int) -> tuple[str, str, str]:
    """Return name, source and digest of the click log; for a file, the digest covers its size, start and end."""
    if not cfg.file:
        synthetic = [cfg.num_samples, cfg.tables, NUM_SYNTHETIC_NUMERIC]
        return "synthetic-clicks", "generated", digest_of(synthetic, seed)
    path = Path(cfg.file).expanduser()
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _DIGEST_BYTES))
        end = file.read(_DIGEST_BYTES)
        file.seek(0)
        start = file.read(_DIGEST_BYTES)
    return path.stem, str(path), digest_of(size, start.hex(), end.hex())


class SyntheticLog:
    """A click log that is drawn from `seed` in blocks, so that each part can be read alone."""

    def __init__(self, cfg: HybridConfig, seed: int) -> None:
        self._cfg = cfg
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        self._effects = [torch.randn(rows, generator=generator) for rows in cfg.tables.values()]
        self._numeric = torch.randn(NUM_SYNTHETIC_NUMERIC, generator=generator)

    def __len__(self) -> int:
        return self._cfg.num_samples

    def read(self, first: int, end: int, alive: Callable[[], None]) -> Clicks:
        """Return the samples from `first` to `end`, without the latter. `alive` is called before each block."""
        blocks = range(first // BLOCK, math.ceil(end / BLOCK))
        samples = torch.arange(first, end) - blocks.start * BLOCK
        parts = []
        for block in blocks:
            alive()
            parts.append(self._block(block))
        return _joined(parts).take(samples)

    def _block(self, block: int) -> Clicks:
        """Draw BLOCK samples."""
        num_rows = torch.tensor(list(self._cfg.tables.values()))
        num_tables = len(num_rows)
        generator = torch.Generator().manual_seed((self._seed + 1) * _SEED_STRIDE + block)
        num_bags = BLOCK * num_tables
        bag_sizes = torch.randint(1, MAX_BAG_SIZE + 1, (num_bags,), generator=generator)
        table_of_id = (torch.arange(num_bags) % num_tables).repeat_interleave(bag_sizes)
        num_rows_of_id = num_rows[table_of_id]
        u = torch.rand(len(table_of_id), generator=generator, dtype=torch.float64)
        ids = (num_rows_of_id * u**2).long()
        effect_of_id = torch.empty(len(ids))
        for number, effects in enumerate(self._effects):
            in_table = table_of_id == number
            effect_of_id[in_table] = effects[ids[in_table]]
        num_ids_of_sample = bag_sizes.view(BLOCK, num_tables).sum(1)
        sample_of_id = torch.arange(BLOCK).repeat_interleave(num_ids_of_sample)
        row_effects = torch.zeros(BLOCK).index_add_(0, sample_of_id, effect_of_id)
        numeric = torch.randn(BLOCK, NUM_SYNTHETIC_NUMERIC, generator=generator)
        mean_num_ids = num_tables * (MAX_BAG_SIZE + 1) / 2
        scores = BIAS + ROW_EFFECT * row_effects / mean_num_ids**0.5 + NUMERIC_EFFECT * numeric @ self._numeric
        labels = torch.bernoulli(scores.sigmoid(), generator=generator)
        return Clicks(Bags.of_sizes(ids, bag_sizes), numeric, labels, tuple(self._cfg.tables), scores)


def _joined(parts: list[Clicks]) -> Clicks:
    """Return the samples of all parts, one part after another."""
    if len(parts) == 1:
        return parts[0]
    ids = torch.cat([part.bags.ids for part in parts])
    sizes = torch.cat([part.bags.offsets.diff() for part in parts])
    best_scores = None
    best_of_parts = [part.best_scores for part in parts if part.best_scores is not None]
    if best_of_parts:
        best_scores = torch.cat(best_of_parts)
    return Clicks(
        bags=Bags.of_sizes(ids, sizes),
        numeric=torch.cat([part.numeric for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
        tables=parts[0].tables,
        best_scores=best_scores,
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
        """Keep the row groups of a Parquet file. Raises DataError if the file is damaged or has not the columns."""
        self._groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        sizes = [group.num_rows for group in self._groups]
        if any(size < 0 for size in sizes) or self._num_rows != sum(sizes):
            raise DataError(f"{self._path} is damaged: its row groups do not have {self._num_rows} rows")
        missing = set(self._columns) - set(self._parquet.schema_arrow.names)
        if missing:
            raise DataError(
                f"{self._path} has no column {sorted(missing)[0]!r}: it needs {LABEL_COLUMN!r} and those of"
                " hybrid.numeric_columns and hybrid.tables"
            )
        num_values = 0
        num_bytes = 0
        for group in self._groups:
            num_values += sum(group.column(number).num_values for number in range(group.num_columns))
            num_bytes += group.total_byte_size
        # Equal values need no space in the file, but 8 bytes each in memory.
        num_bytes += 8 * num_values
        file_bytes = self._path.stat().st_size
        if num_bytes > max(_MIN_MEMORY_BYTES, _MAX_EXPANSION * file_bytes):
            raise DataError(
                f"{self._path} has {num_values:,} values in {file_bytes} bytes, which would exhaust the memory: if it"
                " is a click log, write it without compression and dictionaries"
            )

    def _unreadable(self, error: Exception) -> DataError:
        reason = " ".join(str(error).split())[:_MAX_REASON_LENGTH]
        return DataError(f"{self._path} cannot be read as a click log: {reason}")

    def __len__(self) -> int:
        return int(self._num_rows)

    def read(self, first: int, end: int, alive: Callable[[], None]) -> Clicks:
        """Return these samples; `alive` is called before each piece of the file.

        Raises DataError if the file is damaged or does not match the config.
        """
        parts = []
        try:
            for begin, stop in self._pieces(first, end):
                alive()
                parts.append(self._read(begin, stop))
        except self._damaged as error:
            raise self._unreadable(error) from error
        clicks = _joined(parts)
        if len(clicks) != end - first:
            raise DataError(f"{self._path} is damaged: {end - first} samples expected, {len(clicks)} found")
        return clicks

    def _pieces(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Return consecutive parts of these samples, cut between row groups; a CSV file is in memory."""
        cuts = [first]
        if self._parquet is not None:
            for group_end in accumulate(group.num_rows for group in self._groups):
                if cuts[-1] + _PIECE_SAMPLES <= group_end < end:
                    cuts.append(group_end)
        return pairwise([*cuts, end])

    def _read(self, first: int, end: int) -> Clicks:
        cfg = self._cfg
        table = self._rows(first, end)
        labels = self._numbers(table, LABEL_COLUMN)
        is_valid = (labels == 0) | (labels == 1)
        if not bool(is_valid.all()):
            raise DataError(f"{self._path}: column {LABEL_COLUMN!r} must be 0 or 1")
        numeric = torch.zeros(len(labels), len(cfg.numeric_columns))
        for number, name in enumerate(cfg.numeric_columns):
            numeric[:, number] = self._numbers(table, name)
        columns = [self._bags(table, name, rows) for name, rows in cfg.tables.items()]
        # From the order of the file, by column, to order by sample.
        ids = torch.cat([column.ids for column in columns])
        sizes = torch.cat([column.offsets.diff() for column in columns])
        by_column = Bags.of_sizes(ids, sizes)
        order = torch.arange(len(by_column)).view(len(columns), -1).t().flatten()
        return Clicks(by_column.take(order), numeric, labels, tuple(cfg.tables))

    def _rows(self, first: int, end: int) -> Any:
        """Return these rows of the file as a pyarrow Table."""
        if self._parquet is None:
            return self._table.slice(first, end - first)
        # Only the row groups that have some of these rows are read.
        ends = list(accumulate(group.num_rows for group in self._groups))
        groups = range(bisect_right(ends, first), bisect_left(ends, end) + 1)
        first_of_groups = ends[groups.start] - self._groups[groups.start].num_rows
        table = self._parquet.read_row_groups(groups, columns=self._columns)
        return table.slice(first - first_of_groups, end - first)

    def _numbers(self, table: Any, name: str) -> Tensor:
        """Return a numeric column, float32 [n]."""
        from pyarrow import types

        column = table[name]
        kinds = (types.is_integer, types.is_floating, types.is_boolean)
        if column.null_count or not any(is_kind(column.type) for is_kind in kinds):
            raise DataError(f"{self._path}: column {name!r} must have numbers without nulls, it is {column.type}")
        return torch.from_numpy(np.array(column.to_numpy(), dtype=np.float32))

    def _bags(self, table: Any, name: str, rows: int) -> Bags:
        """Return the bags of an id column, with the ids of a table of `rows` rows."""
        import pyarrow as pa
        import pyarrow.compute as pc

        column = table[name].combine_chunks()
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            empty = pa.scalar(None, column.type)  # an empty field is an empty bag
            column = pc.split_pattern(pc.if_else(pc.equal(column, ""), empty, column), "|")
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            sizes = _int64(pc.fill_null(pc.list_value_length(column), 0))
            values = column.flatten()
        else:
            sizes = torch.ones(len(column), dtype=torch.int64)
            values = column
        if values.null_count:
            raise DataError(f"{self._path}: column {name!r} has null ids: write an empty bag as an empty list")
        if name in self._cfg.hashed_tables:
            coded = values.cast(pa.string()).dictionary_encode()
            hashes = [zlib.crc32(text.encode()) % rows for text in coded.dictionary.to_pylist()]
            ids = torch.tensor(hashes, dtype=torch.int64)[_int64(coded.indices)]
            return Bags.of_sizes(ids, sizes)
        try:
            ids = _int64(values.cast(pa.int64()))
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{self._path}: column {name!r} has ids that are not integers: add it to hybrid.hashed_tables"
            ) from error
        if len(ids):
            smallest, largest = int(ids.min()), int(ids.max())
            if smallest < 0 or largest >= rows:
                raise DataError(
                    f"{self._path}: column {name!r} has ids {smallest} to {largest}, but"
                    f" hybrid.tables.{name}={rows}: raise it to {largest + 1}, or add it to hybrid.hashed_tables"
                )
        return Bags.of_sizes(ids, sizes)


def _int64(values: Any) -> Tensor:
    """Return the integers of a pyarrow array, int64 [n]."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def padded(clicks: Clicks, bag_size: int) -> Tensor:
    """Return the samples as input of `ClickModel`: float64 [N, num_numeric + tables × bag_size]."""
    padded_ids = torch.full((len(clicks.bags), bag_size), -1.0, dtype=torch.float64)
    ids_of_bags = clicks.bags.ids.tensor_split(clicks.bags.offsets[1:-1])
    for row, ids in zip(padded_ids, ids_of_bags, strict=True):
        row[: len(ids)] = ids[:bag_size]
    return torch.cat([clicks.numeric.double(), padded_ids.view(len(clicks), -1)], dim=1)
