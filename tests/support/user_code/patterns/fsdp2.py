"""Like PyTorch's FSDP2 example: `fully_shard` of each layer, and a checkpoint of all ranks by DCP."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--dcp-dir", required=True)
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def step():
    loss = model(torch.randn(8, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


for _ in range(args.steps):
    loss = step()
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optim": moments}, checkpoint_id=args.dcp_dir)
before = model[0].weight.to_local().clone()
step()
weights, moments = get_state_dict(model, optimizer)
dcp.load({"model": weights, "optim": moments}, checkpoint_id=args.dcp_dir)
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
assert torch.equal(before, model[0].weight.to_local())
print(f"rank {dist.get_rank()}: shard {tuple(before.shape)}, loss {loss.item():.6f}")
dist.destroy_process_group()
