"""Trainer `hybrid`: DistributedDataParallel with embedding tables on parameter servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcdist.config.schema import Config
from hpcdist.config.section import IS_PATH, ConfigSection, number
from hpcdist.config.trainer_declaration import Trainer

#: Numeric features of a sample of the synthetic log.
NUM_SYNTHETIC_NUMERIC = 4


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ConfigSection):
    """A click model with its dense part in DDP and its embedding tables on parameter servers (`trainer: hybrid`)."""

    tables: dict[str, int] = field(default_factory=dict)
    """Number of rows by embedding table, `{user: 1000, item: 500}`; rows are sharded over all parameter servers."""
    embedding_dim: int = number(8, least=1)
    """Length of an embedding row, the same in all tables."""
    hidden_sizes: list[int] = field(default_factory=lambda: [32])
    """Sizes of the hidden layers of the dense part."""
    table_optimizer: Literal["sgd", "adagrad", "sparse_adam"] = "adagrad"
    """Optimizer of the tables, which updates the rows of a batch only; `optim` is the one of the dense part."""
    table_lr: float = number(0.05, above=0)
    """Learning rate of the tables."""
    batch_size: int = number(512, least=1)
    """Samples per share and step; at the first start of a run each trainer has one share of the samples."""
    file: str = field(default="", metadata=IS_PATH)
    """Click log, a Parquet or CSV file with a column `label` of 0 and 1; empty: a synthetic log of known best AUC."""
    numeric_columns: list[str] = field(default_factory=list)
    """Numeric columns of the file. Id columns have the names of their tables: an id, a list, or text as `3|17`."""
    hashed_tables: list[str] = field(default_factory=list)
    """Tables with any text or number as id, mapped to a row by CRC-32; in others ids are 0 to rows - 1."""
    num_samples: int = number(200_000, least=1)
    """Samples of the synthetic log. The last tenth of a log is for the evaluation."""

    @property
    def num_numeric(self) -> int:
        """Number of numeric features of a sample."""
        if self.file:
            return len(self.numeric_columns)
        return NUM_SYNTHETIC_NUMERIC

    def problems(self) -> list[str]:
        """Return a message for each invalid value of this section."""
        problems = [f"tables.{name} must be >= 1, got {rows}" for name, rows in self.tables.items() if rows < 1]
        problems += [f"tables: {name!r} must not contain '.'" for name in self.tables if "." in name or not name]
        problems += [f"hidden_sizes must be >= 1 each, got {size}" for size in self.hidden_sizes if size < 1]
        known = ", ".join(self.tables)
        for name in set(self.hashed_tables) - set(self.tables):
            problems.append(f"hashed_tables: no table is named {name!r}: use {known}")
        if not self.file and (self.numeric_columns or self.hashed_tables):
            problems.append("numeric_columns and hashed_tables need a file: set file to its path, or leave them out")
        return problems


def _check(config: Config) -> list[str]:
    problems = []
    if config.optim.max_grad_norm is not None:
        problems.append(f"optim.max_grad_norm={config.optim.max_grad_norm:g} is not for trainer hybrid: leave it out")
    if not config.section(HybridConfig).tables:
        problems.append("hybrid.tables must name at least one table, such as {user: 1000}")
    return problems


def _check_host(config: Config) -> list[str]:
    file = config.section(HybridConfig).file
    if not file or Path(file).is_file():
        return []
    return [f"hybrid.file: no such file: {file}"]


TRAINER = Trainer(
    section=HybridConfig,
    shared_sections=("optim",),
    roles={"trainer": 2, "parameter_server": 2},
    check=_check,
    check_host=_check_host,
    charts={"AUC": ("eval/auc", "eval/best_auc")},
    fixed_keys=("hybrid.tables", "hybrid.embedding_dim", "hybrid.hidden_sizes", "hybrid.table_optimizer", "optim.name"),
)
