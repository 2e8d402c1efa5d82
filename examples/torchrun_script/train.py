"""A script for torchrun, which hpcdist runs unchanged.

torchrun --nproc-per-node 2 train.py --steps 200
hpcdist run script.yaml
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    dist.init_process_group("gloo")  # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT come from the environment
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    weights = torch.arange(8.0)
    for step in range(1, args.steps + 1):
        x = torch.randn(32, 8)
        loss = F.mse_loss(model(x).squeeze(1), x @ weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step} of {args.steps}: loss {loss.item():.6f}", flush=True)
    print(f"local rank {os.environ['LOCAL_RANK']} of {dist.get_world_size()} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
