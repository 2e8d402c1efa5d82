"""Click logs in Parquet and CSV files."""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import csv, parquet
from torch import Tensor

from hpcdist.errors import DataError
from hpcdist.trainers.hybrid import HybridConfig
from hpcdist.trainers.hybrid.click_logs import Bags, Clicks

#: Exceptions of pyarrow for damaged content: its kernels document none.
_DAMAGED = (
    *(OSError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError, NotImplementedError),
    pa.ArrowException,
)
#: A file is refused if its values take more memory than this multiple of its size, unless they take little.
_MAX_EXPANSION = 256
_ALWAYS_READ_BYTES = 64 << 20
_VALUE_BYTES = 8


class FileLog:
    """A click log in a Parquet or CSV file."""

    def __init__(self, cfg: HybridConfig) -> None:
        self._cfg = cfg
        self._columns = [cfg.label_column, *cfg.numeric_columns, *cfg.tables]
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
        except _DAMAGED as error:
            raise self._unreadable(error) from error

    def _check_metadata(self, metadata: Any) -> None:
        groups = self._groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        sizes = [group.num_rows for group in groups]
        if any(size < 0 for size in sizes) or self._num_rows != sum(sizes):
            raise DataError(f"{self._path} is damaged: its row groups do not have {self._num_rows} rows")
        if missing := set(self._columns) - set(self._parquet.schema_arrow.names):
            raise DataError(
                f"{self._path} has no column {sorted(missing)[0]!r}: see hybrid.label_column, "
                "hybrid.numeric_columns and hybrid.tables"
            )
        # Equal values need no space in the file, but in memory.
        num_values = sum(group.column(at).num_values for group in groups for at in range(group.num_columns))
        num_bytes = num_values * _VALUE_BYTES + sum(group.total_byte_size for group in groups)
        size = self._path.stat().st_size
        if num_bytes > max(_ALWAYS_READ_BYTES, _MAX_EXPANSION * size):
            raise DataError(
                f"{self._path} has {num_values:,} values in {size} bytes, which would exhaust the memory: if it is a"
                " click log, write it without compression and dictionaries"
            )

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(f"{self._path} cannot be read as a click log: {str(error).partition(chr(10))[0][:300]}")

    def __len__(self) -> int:
        return int(self._num_rows)

    def read(self, first: int, end: int) -> Clicks:
        """Return these samples. Raises DataError if the file is damaged or does not match the config."""
        try:
            clicks = self._read(first, end)
        except _DAMAGED as error:
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
        labels = self._numbers(table, cfg.label_column)
        if not bool(((labels == 0) | (labels == 1)).all()):
            raise DataError(f"{self._path}: column {cfg.label_column!r} must be 0 or 1")
        numeric = torch.zeros(len(labels), len(cfg.numeric_columns))
        for number, name in enumerate(cfg.numeric_columns):
            numeric[:, number] = self._numbers(table, name)
        columns = [self._bags(table, name, rows) for name, rows in cfg.tables.items()]
        # From the order of the file, by column, to order by sample.
        whole = Bags(
            torch.cat([column.ids for column in columns]),
            torch.cat([torch.zeros(1, dtype=torch.int64), *(column.offsets.diff() for column in columns)]).cumsum(0),
        )
        order = torch.arange(len(whole)).view(len(columns), -1).t().flatten()
        return Clicks(whole.take(order), numeric, labels, tuple(cfg.tables))

    def _numbers(self, table: pa.Table, name: str) -> Tensor:
        column = table[name]
        if column.null_count or not (
            pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)
        ):
            raise DataError(f"{self._path}: column {name!r} must have numbers without nulls, it is {column.type}")
        return torch.from_numpy(np.array(column.to_numpy(), dtype=np.float32))

    def _bags(self, table: pa.Table, name: str, rows: int) -> Bags:
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
            coded = values.cast(pa.string()).dictionary_encode()
            hashes = [zlib.crc32(text.encode()) % rows for text in coded.dictionary.to_pylist()]
            indices = torch.from_numpy(np.array(coded.indices, dtype=np.int64))
            return Bags(torch.tensor(hashes, dtype=torch.int64)[indices], offsets)
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
