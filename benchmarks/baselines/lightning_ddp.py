"""The training step of `bare_ddp.py` with Lightning, as in its documentation.

Logger, progress bar and checkpoints are disabled, so it is faster than in common use.
Source: https://lightning.ai/docs/pytorch/stable/starter/introduction.html
"""

from __future__ import annotations

import argparse
import logging
import warnings
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from setting import Clock, parse_arguments, training_tensors
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from hpcdist.data.datasets import SimpleCNN


class Classifier(lightning.LightningModule):
    def __init__(self, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.model = SimpleCNN(num_classes=10, in_channels=in_channels, image_size=image_size)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Timing(lightning.Callback):
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._clock = Clock(self._arguments, trainer.global_rank)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: Any, **__: Any
    ) -> None:
        self._clock.tick()


def main() -> None:
    warnings.filterwarnings("ignore")  # advice on loader workers
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    arguments = parse_arguments()
    torch.manual_seed(0)
    images, labels = training_tensors(arguments)
    loader = DataLoader(TensorDataset(images, labels), batch_size=arguments.batch_size, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=arguments.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Timing(arguments)],
    )
    trainer.fit(Classifier(images.shape[1], images.shape[2]), loader)


if __name__ == "__main__":
    main()
