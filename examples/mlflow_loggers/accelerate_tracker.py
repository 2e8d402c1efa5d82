"""Accelerate with its MLflow tracker, as for `accelerate launch` or torchrun.

hpcdist run scripts.yaml "trainer.script=[accelerate_tracker.py]"
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(log_with="mlflow", cpu=True)
    accelerator.init_trackers("accelerate", config={"lr": 0.1, "layers": 1})
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    data = DataLoader(TensorDataset(inputs, inputs @ torch.arange(8.0)), batch_size=4)
    model = nn.Linear(8, 1)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    step = 0
    for _ in range(2):
        for batch, targets in data:
            loss = F.mse_loss(model(batch).squeeze(1), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            accelerator.log({"train_loss": loss.item()}, step=step)
    accelerator.end_training()


if __name__ == "__main__":
    main()
