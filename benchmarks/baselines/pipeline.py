"""Pipeline parallelism over RPC as in PyTorch's tutorial: the baseline of `benchmarks/pipeline.py`.

A master sends micro-batches by `remote()` to the first stage, passes the RRef of the result to the second stage, waits
for all of them, and then runs distributed autograd and a DistributedOptimizer; MSE on one-hot labels. For each number
of splits on standard input it does one step and prints its seconds.
Source: https://docs.pytorch.org/tutorials/intermediate/dist_pipeline_parallel_tutorial.html

python benchmarks/baselines/pipeline.py RANK FOLDER BATCH_SIZE IMAGE_SIZE       # ranks 0 to 2, the master is rank 0
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torchvision.models import resnet50

NUM_CLASSES = 10


class Stage(nn.Module):
    """The layers up to layer2, or those after it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.lock = threading.Lock()
        m = resnet50(num_classes=NUM_CLASSES)
        first = [m.conv1, m.bn1, m.relu, m.maxpool, m.layer1, m.layer2]
        self.layers = nn.Sequential(*(first if index == 0 else [m.layer3, m.layer4, m.avgpool, nn.Flatten(1), m.fc]))

    def forward(self, x_rref: rpc.RRef[Tensor]) -> Tensor:
        x = x_rref.to_here()
        with self.lock:
            y: Tensor = self.layers(x)
        return y

    def parameter_rrefs(self) -> list[rpc.RRef[Tensor]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def master(batch_size: int, image_size: int) -> None:
    stages = [rpc.remote(f"worker{index + 1}", Stage, (index,)) for index in range(2)]
    parameters = [rref for stage in stages for rref in stage.remote().parameter_rrefs().to_here()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    loss_fn = nn.MSELoss()
    images = torch.randn(batch_size, 3, image_size, image_size)
    labels = nn.functional.one_hot(torch.arange(batch_size) % NUM_CLASSES, NUM_CLASSES).float()
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        with dist_autograd.context() as context_id:
            futures = []
            for x in images.split(batch_size // int(line)):
                y_rref = stages[0].remote().forward(rpc.RRef(x))
                futures.append(stages[1].rpc_async().forward(y_rref))
            outputs = torch.cat(torch.futures.wait_all(futures))
            dist_autograd.backward(context_id, [loss_fn(outputs, labels)])  # type: ignore[attr-defined]  # torch exports it at run time
            optimizer.step(context_id)
        print(time.perf_counter() - began, flush=True)


def main() -> None:
    rank, folder, batch_size, image_size = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=128, rpc_timeout=300, init_method=f"file://{folder}/meet"
    )
    name = "master" if rank == 0 else f"worker{rank}"
    rpc.init_rpc(name, rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        master(batch_size, image_size)
    rpc.shutdown()


if __name__ == "__main__":
    main()
