"""Lightning with its MLFlowLogger, as for torchrun.

hpcdist run scripts.yaml "trainer.script=[lightning_logger.py]"
"""

from __future__ import annotations

import os

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import MLFlowLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        loss = F.mse_loss(self.net(inputs).squeeze(1), targets)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    data = DataLoader(TensorDataset(inputs, inputs @ torch.arange(8.0)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=2,
        log_every_n_steps=2,
        logger=MLFlowLogger(experiment_name="lightning", run_name="regression"),
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), data)


if __name__ == "__main__":
    main()
