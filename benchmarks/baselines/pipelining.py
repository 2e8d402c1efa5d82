"""torch.distributed.pipelining as in its documentation: two stages of ResNet50, 1F1B, cross-entropy, SGD.

For each number of splits on standard input it does one step and prints its seconds.
Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html

python benchmarks/baselines/pipelining.py RANK FOLDER BATCH_SIZE IMAGE_SIZE      # ranks 0 and 1
"""

from __future__ import annotations

import sys
import time
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torchvision.models import resnet50

NUM_CLASSES = 10


def main() -> None:
    rank, folder, batch_size, image_size = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    m = resnet50(num_classes=NUM_CLASSES)
    first = [m.conv1, m.bn1, m.relu, m.maxpool, m.layer1, m.layer2]
    stage = nn.Sequential(*(first if rank == 0 else [m.layer3, m.layer4, m.avgpool, nn.Flatten(1), m.fc]))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
    images, labels = torch.randn(batch_size, 3, image_size, image_size), torch.arange(batch_size) % NUM_CLASSES

    @cache
    def schedule(num_splits: int) -> ScheduleGPipe | Schedule1F1B:
        part = PipelineStage(stage, rank, 2, torch.device("cpu"))
        # 1F1B needs as many micro-batches as stages. With a loss on the last rank only, it would hang.
        return (Schedule1F1B if num_splits > 1 else ScheduleGPipe)(part, num_splits, loss_fn=F.cross_entropy)

    if rank == 0:
        print("ready", flush=True)
    while True:
        number = torch.tensor(int(sys.stdin.readline() or 0) if rank == 0 else 0)
        dist.broadcast(number, src=0)
        if number == 0:
            break
        began = time.perf_counter()
        run = schedule(int(number))
        run.step(images) if rank == 0 else run.step(target=labels)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        if rank == 0:
            print(time.perf_counter() - began, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
