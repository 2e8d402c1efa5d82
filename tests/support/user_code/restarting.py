"""A plain loop of torch.distributed that saves at step 10; in the first attempt, rank 1 is killed after step 45."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import hpcdist

dist.init_process_group("gloo")
rank = dist.get_rank()
checkpoint = hpcdist.checkpoint_dir() / "step10.pt"
start = torch.load(checkpoint)["step"] if checkpoint.exists() else 0
for step in range(start + 1, 61):
    dist.all_reduce(torch.ones(1))
    hpcdist.log({"train/loss": 1 / step}, step)
    if step == 10 and rank == 0:
        torch.save({"step": step}, checkpoint)
    if step == 45 and os.environ["HPCDIST_ATTEMPT"] == "1":
        dist.barrier()
        if rank == 1:
            beat = Path(os.environ["HPCDIST_RUN_DIR"], "attempts", "001", "rank-00001.beat.json")
            while '"step": 45,' not in beat.read_text():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
