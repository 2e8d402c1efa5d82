"""Plain MLflow in a script for torchrun: parameters, metrics, a tag, a figure, a data set and a model.

torchrun --nproc-per-node 2 plain.py
hpcdist run scripts.yaml
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import mlflow
import mlflow.data
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(64, 8)
    targets = inputs @ torch.arange(8.0)
    mlflow.set_experiment("linear")
    with mlflow.start_run(run_name="first try") as run:
        mlflow.log_params({"lr": 0.05, "seed": 42})
        mlflow.log_input(mlflow.data.from_numpy(inputs.numpy(), name="random"), context="training")
        losses = []
        for step in range(1, 21):
            loss = F.mse_loss(model(inputs).squeeze(1), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            mlflow.log_metric("loss", losses[-1], step=step)
        mlflow.set_tag("stage", "tutorial")
        figure, axes = plt.subplots()
        axes.plot(np.arange(1, 21), losses)
        mlflow.log_figure(figure, "plots/loss.png")
        mlflow.log_dict({"losses": losses}, "config.yaml")
        mlflow.pytorch.log_model(model.module, name="linear", pip_requirements=["torch"], serialization_format="pickle")
        best = mlflow.get_run(run.info.run_id).data.metrics["loss"]
        mlflow.log_metric("best_loss", best)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
