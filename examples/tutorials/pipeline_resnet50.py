"""Pipeline parallelism by RPC: the two halves of a ResNet-50 on two processes, which work on several micro-batches.

    python pipeline_resnet50.py            # starts a master and two stages itself
    hpcdist run tutorial_pipeline_resnet50

Read it beside https://docs.pytorch.org/tutorials/intermediate/dist_pipeline_parallel_tutorial.html. The master, rank 0,
splits a batch. While the second stage works on a part, the first one works on the next: with more parts both are busy
for a larger share of the time, and each message is smaller.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections import OrderedDict

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torchvision.models import resnet50

import hpcdist

NUM_CLASSES = 10
STAGES = ("stage0", "stage1")


LAYERS = (("conv1", "bn1", "relu", "maxpool", "layer1", "layer2"), ("layer3", "layer4", "avgpool", "flatten", "fc"))


class Stage(nn.Sequential):
    """The layers of a ResNet-50 up to the second block, or those after it, with their names in torchvision."""

    def __init__(self, index: int) -> None:
        network = resnet50(num_classes=NUM_CLASSES)
        network.flatten = nn.Flatten(1)
        super().__init__(OrderedDict((name, network.get_submodule(name)) for name in LAYERS[index]))
        self.lock = threading.Lock()

    def forward(self, reference: rpc.RRef[Tensor]) -> Tensor:
        # Fetches its input from the process that has it: the outputs of a stage do not pass through the master.
        inputs = reference.to_here()
        with self.lock:  # micro-batches arrive in several threads, and BatchNorm counts
            return super().forward(inputs)

    def parameter_references(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Pipeline:
    def __init__(self) -> None:
        self.stages = [rpc.remote(name, Stage, (index,)) for index, name in enumerate(STAGES)]

    def __call__(self, images: Tensor, num_splits: int) -> Tensor:
        """Return the logits of a batch. Its parts go through the stages one behind the other."""
        futures = []
        for part in images.chunk(num_splits):
            hidden = self.stages[0].remote().forward(rpc.RRef(part))  # returns at once
            futures.append(self.stages[1].rpc_async().forward(hidden))
        return torch.cat(torch.futures.wait_all(futures))

    def parameter_references(self) -> list[rpc.RRef[nn.Parameter]]:
        return [reference for stage in self.stages for reference in stage.rpc_sync().parameter_references()]


def master(num_steps: int, batch_size: int, image_size: int, splits: list[int]) -> None:
    """Train a few steps with each number of splits, and print the seconds of a step."""
    pipeline = Pipeline()
    optimizer = DistributedOptimizer(torch.optim.SGD, pipeline.parameter_references(), lr=0.05)
    loss_of = nn.MSELoss()
    step = 0
    for num_splits in splits:
        began = time.perf_counter()
        for _ in range(num_steps):
            images = torch.randn(batch_size, 3, image_size, image_size)
            labels = nn.functional.one_hot(torch.randint(NUM_CLASSES, (batch_size,)), NUM_CLASSES).float()
            with dist_autograd.context() as context:
                loss = loss_of(pipeline(images, num_splits), labels)
                dist_autograd.backward(context, [loss])
                optimizer.step(context)
            step += 1
            hpcdist.log({"train/loss": loss.item()}, step)
        seconds = (time.perf_counter() - began) / num_steps
        hpcdist.log({f"train/seconds_with_{num_splits}_splits": seconds}, step)
        print(f"{num_splits} splits: {seconds:.2f} s for a step", flush=True)
    weights = pipeline.stages[0].rpc_sync().state_dict() | pipeline.stages[1].rpc_sync().state_dict()
    torch.save(weights, hpcdist.checkpoint_dir() / "resnet50.pt")


def run(rank: int, world_size: int, arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=32, rpc_timeout=300)
    rpc.init_rpc(["master", *STAGES][rank], rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        master(arguments.steps, arguments.batch_size, arguments.image_size, arguments.splits)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="for each number of splits")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--splits", type=int, nargs="+", default=[1, 2, 4, 8])
    parsed = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun or hpcdist
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), parsed)
    else:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        torch.multiprocessing.spawn(run, (len(STAGES) + 1, parsed), nprocs=len(STAGES) + 1)
