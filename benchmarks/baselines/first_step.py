"""The script of `startup.py` and `slurm_start.py`: one step of a small DDP model, then write its time on rank 0.

Needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,)))
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        target = Path(sys.argv[1])
        target.with_suffix(".partial").write_text(repr(time.time()))
        target.with_suffix(".partial").rename(target)
    dist.barrier()  # a rank that ends while the other is at work may abort it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
