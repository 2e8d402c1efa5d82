"""Trainer `ddp`: image classification with DistributedDataParallel."""

from hpcdist.config.trainer_declaration import Trainer
from hpcdist.data import model_name_problems

TRAINER = Trainer(
    shared_sections=("model", "data", "optim", "schedule", "precision"),
    check=lambda config: model_name_problems(config.model.name),
    is_elastic=True,
    fixed_keys=("model.name", "optim.name", "data.global_batch_size", "elastic.micro_batches"),
)
