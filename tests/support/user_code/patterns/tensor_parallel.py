"""Like PyTorch's tensor-parallel and 2-D examples: a mesh of two dimensions, `parallelize_module` and `fully_shard`."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

tp_size = 2
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]) // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
for _ in range(4):
    torch.manual_seed(1 + mesh["dp"].get_local_rank())  # the same batch on all ranks of a tensor-parallel group
    loss = model(torch.rand(4, 8)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {dist.get_rank()}: loss {loss.item():.6f}")
dist.destroy_process_group()
