"""DDP trainers with embedding tables on parameter servers (`trainer: hybrid`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.schema.checks import above, at_least, check
from hpcdist.config.schema.paths import IS_PATH


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """DDP trainers with embedding tables on parameter servers (`trainer: hybrid`)."""

    mode: Literal["sync", "async"] = "sync"
    """`sync`: lookups see every update before them, runs repeat; `async`: they may miss the last, nobody waits."""
    tables: dict[str, int] = field(default_factory=dict)
    """Embedding tables, rows by name, such as `{user: 1000, item: 500}`; spread by row over all servers."""
    dim: int = 8
    """Length of a row, the same in all tables."""
    init_scale: float = 0.01
    """Rows begin uniform in ± this, each from (seed, table, row) alone."""
    hidden: list[int] = field(default_factory=lambda: [32])
    """Widths of the dense part's hidden layers."""
    table_optimizer: Literal["sgd", "adagrad", "sparse_adam"] = "adagrad"
    """Optimizer of the tables; it touches the rows of a batch alone. `optim` is that of the dense part."""
    table_lr: float = 0.05
    """Learning rate of the tables."""
    batch_size: int = 512
    """Samples per trainer and step."""
    eval_batch_size: int = 4096
    """Test samples per trainer and batch."""
    pool: Literal["auto", "trainer", "server"] = "auto"
    """Who sums up a bag: then each of its rows travels, once a batch, or the sum; `auto`: what is less at first."""
    prefetch: Literal["auto", "values", "indices"] = "auto"
    """What of the next batch travels ahead; values that change come again. `auto`: values if few do."""
    data: str = field(default="", metadata=IS_PATH)
    """Click log: a Parquet or CSV file; empty makes a synthetic one, whose best possible AUC is known."""
    label: str = "label"
    """The file's column of 0 and 1."""
    numeric: list[str] = field(default_factory=list)
    """The file's columns of numbers. Columns of ids are called like their tables: an id, a list, or text as `3|17`."""
    hashed: list[str] = field(default_factory=list)
    """Tables whose ids are any text or number, mapped to a row by CRC-32; of the others ids are 0 to rows - 1."""
    test_fraction: float = 0.1
    """The last part of the file, or of the synthetic log, that is tested on."""
    num_samples: int = 200_000
    """Samples of the synthetic log."""
    num_numeric: int = 4
    """Numeric features of the synthetic log."""
    bag_size: int = 3
    """Most ids in a bag of the synthetic log, which has 1 to this many."""
    fixed_bags: bool = False
    """Whether each bag of the synthetic log has exactly `bag_size` ids."""
    skew: float = 1.0
    """How popular the synthetic log's first rows are: row = rows × u^(1 + skew), u uniform; 0 makes all alike."""
    export_max_mb: float = 256.0
    """Larger tables are in the checkpoints alone: for an MLflow model rank 0 has to hold all of them."""

    def __post_init__(self) -> None:
        check(
            at_least(self, 1, "dim", "batch_size", "eval_batch_size", "num_samples", "bag_size")
            + at_least(self, 0, "num_numeric", "skew", "export_max_mb", "init_scale")
            + above(self, 0, "table_lr")
            + self._names()
            + ([] if 0 < self.test_fraction < 1 else [f"test_fraction must be in (0, 1), got {self.test_fraction}"])
        )

    def _names(self) -> list[str]:
        problems = [f"tables.{name} must be >= 1, got {rows}" for name, rows in self.tables.items() if rows < 1]
        problems += [f"tables: {name!r} must be free of '.'" for name in self.tables if "." in name or not name]
        problems += [f"hidden must be >= 1 each, got {width}" for width in self.hidden if width < 1]
        known = ", ".join(self.tables)
        problems += [
            f"hashed: no table is called {name!r}: use {known}" for name in set(self.hashed) - set(self.tables)
        ]
        if not self.data and (self.numeric or self.hashed):
            problems.append("numeric and hashed are columns of a file: set data to its path, or leave them out")
        return problems
