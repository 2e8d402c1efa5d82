"""A plain loop of torch.distributed with stop-and-save by hpcdist: trains until it is stopped, then 5 more steps."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

import hpcdist

dist.init_process_group("gloo")
rank = dist.get_rank()
checkpoint = hpcdist.checkpoint_dir() / "newest.pt"
start = torch.load(checkpoint)["step"] if checkpoint.exists() else 0
last = start + 5 if os.environ["HPCDIST_ATTEMPT"] != "1" else 1_000_000
print(f"rank {rank} starts at {start}", flush=True)
step = start
while step < last:
    value = torch.ones(1)
    dist.all_reduce(value)
    time.sleep(0.05)
    step += 1
    hpcdist.log({"train/loss": 1 / step, "ranks": value.item()}, step)
    stop = hpcdist.should_stop(step, last)
    if hpcdist.should_save(step) and rank == 0:
        torch.save({"step": step}, checkpoint)
    if stop:
        break
print(f"rank {rank} ended at {step}", flush=True)
dist.destroy_process_group()
