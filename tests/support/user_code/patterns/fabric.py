"""Like Fabric's examples: the launcher sets the variables, and Fabric finds them."""

import sys

import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(1, workers=True)
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
fabric.save(sys.argv[1], {"model": model})
fabric.print(f"rank {fabric.global_rank} of {fabric.world_size}: loss {loss.item():.6f}")
