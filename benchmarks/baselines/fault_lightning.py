"""The training of `fault_torchrun.py` with Lightning and its checkpoint callback, restarted by torchrun.

Source: https://lightning.ai/docs/pytorch/stable/common/checkpointing_intermediate.html
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from fault_task import RENDEZVOUS_TIMEOUT, Task
from fault_training import Samples, build_model, build_optimizer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

Batch = tuple[Tensor, Tensor]


class Classifier(lightning.LightningModule):
    def __init__(self, task: Task, samples: Samples) -> None:
        super().__init__()
        self.model = build_model(task)
        self._samples = samples

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = build_optimizer(self.model)
        return optimizer

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(_Batches(self, self._samples), batch_size=None)


class _Batches(IterableDataset[Batch]):
    def __init__(self, module: Classifier, samples: Samples) -> None:
        self._module, self._samples = module, samples

    def __iter__(self) -> Iterator[Batch]:
        trainer = self._module.trainer
        batches: Iterator[Batch] = self._samples.batches(trainer.global_step, trainer.global_rank, trainer.world_size)
        return batches


class Marking(lightning.Callback):
    def __init__(self, task: Task, samples: Samples) -> None:
        self._task, self._samples = task, samples

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        self._marks = self._task.marks(trainer.global_rank)
        self._marks.add("entered")

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._marks.add("restored", trainer.global_step)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: Any, **__: Any
    ) -> None:
        task, step = self._task, trainer.global_step
        self._marks.add("step", step)
        if trainer.is_global_zero and task.eval_every and step % task.eval_every == 0:
            assert isinstance(pl_module, Classifier)
            self._marks.add("accuracy", step, self._samples.accuracy(pl_module.model))


def main() -> None:
    warnings.filterwarnings("ignore")  # advice on loader workers
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    task = Task.read(sys.argv[1])
    samples = Samples(task)
    # The link lets a rank be killed during a save without damage to the checkpoint that `ckpt_path="last"` finds.
    saving = ModelCheckpoint(task.folder, every_n_train_steps=task.save_every, save_top_k=1, save_last="link")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(timeout=RENDEZVOUS_TIMEOUT),
        max_steps=task.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Marking(task, samples), saving],
    )
    trainer.fit(Classifier(task, samples), ckpt_path="last")


if __name__ == "__main__":
    main()
