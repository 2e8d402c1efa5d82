"""Trainer `hybrid`: DistributedDataParallel with embedding tables on parameter servers."""

from __future__ import annotations

from pathlib import Path

from hpcdist.config.schema import Config, Trainer
from hpcdist.trainers.hybrid.schema import HybridConfig


def _check(config: Config) -> list[str]:
    problems = []
    if config.optim.max_grad_norm is not None:
        problems.append(f"optim.max_grad_norm={config.optim.max_grad_norm:g} is not for trainer hybrid: leave it out")
    if not config.section(HybridConfig).tables:
        problems.append("hybrid.tables must name at least one table, such as {user: 1000}")
    return problems


def _check_host(config: Config) -> list[str]:
    data = config.section(HybridConfig).file
    return [f"hybrid.file: no such file: {data}"] if data and not Path(data).is_file() else []


TRAINER = Trainer(
    section=HybridConfig,
    shared_sections=("optim",),
    roles={"trainer": 2, "parameter_server": 2},
    instead_of_accumulation="hybrid.batch_size",
    check=_check,
    check_host=_check_host,
    charts={"AUC": ("eval/auc", "eval/best_auc")},
    fixed_keys=("hybrid.tables", "hybrid.embedding_dim", "hybrid.hidden_sizes", "hybrid.table_optimizer", "optim.name"),
)
