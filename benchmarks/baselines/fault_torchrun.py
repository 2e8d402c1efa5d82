"""A script for `torchrun --max-restarts` that saves with `torch.save` and continues from its newest checkpoint.

torchrun --nproc-per-node 2 --max-restarts 1000 benchmarks/baselines/fault_torchrun.py TASK.json
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from fault_task import RENDEZVOUS_TIMEOUT, Task
from fault_training import Samples, build_model, build_optimizer, train_step
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    task = Task.read(sys.argv[1])
    # The restarted ranks of torchrun may wait for each other in vain; the default of 30 min would end the measurement.
    dist.init_process_group("gloo", timeout=RENDEZVOUS_TIMEOUT)
    rank = dist.get_rank()
    marks = task.marks(rank)
    marks.add("entered")
    samples = Samples(task)
    model = DistributedDataParallel(build_model(task))
    optimizer = build_optimizer(model)
    marks.add("built")
    step, path = 0, Path(task.folder) / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    marks.add("restored", step)

    batches = samples.batches(step, rank, dist.get_world_size())
    while step < task.steps:
        train_step(model, optimizer, next(batches))
        step += 1
        marks.add("step", step)
        if rank == 0 and task.eval_every and step % task.eval_every == 0:
            marks.add("accuracy", step, samples.accuracy(model.module))
        if rank == 0 and step % task.save_every == 0:
            state = {"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            # A rank that is killed while it writes must not damage the last checkpoint.
            torch.save(state, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
            marks.add("saved", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
