"""A script for torchrun with `mlflow.autolog()`. With `--fail` it fails once, and continues from its checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning
import mlflow
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcdist


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        loss = F.mse_loss(self.net(inputs).squeeze(1), targets)
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        return loss

    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint(newest())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class FailOnce(lightning.Callback):
    """Raises an error at the start of the third epoch of a first attempt."""

    def on_train_epoch_start(self, trainer: lightning.Trainer, _: lightning.LightningModule) -> None:
        if os.environ["HPCDIST_ATTEMPT"] == "1" and trainer.current_epoch == 2:
            raise RuntimeError("the node lost its data")


def newest() -> Path:
    return hpcdist.checkpoint_dir() / "newest.ckpt"


def main() -> None:
    mlflow.autolog(log_models=False)
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    data = DataLoader(TensorDataset(inputs, inputs @ torch.arange(8.0)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=4,
        callbacks=[FailOnce()] if "--fail" in sys.argv else [],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    print(f"rank {trainer.global_rank} of {trainer.world_size} ranks")
    trainer.fit(Regression(), data, ckpt_path=newest() if newest().exists() else None)


if __name__ == "__main__":
    main()
