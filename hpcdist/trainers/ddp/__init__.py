"""Trainer `ddp`: image classification with DistributedDataParallel."""

from __future__ import annotations

from hpcdist.config.schema import Config, Trainer
from hpcdist.data import model_name_problems


def _check(config: Config) -> list[str]:
    return model_name_problems(config.model.name)


TRAINER = Trainer(
    shared_sections=("model", "data", "optim", "schedule", "precision"),
    check=_check,
    is_elastic=True,
    fixed_keys=("model.name", "optim.name", "data.global_batch_size", "elastic.micro_batches"),
)
