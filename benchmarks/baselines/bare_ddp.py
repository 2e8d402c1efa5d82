"""The bare loop of DistributedDataParallel, without anything else: the baseline of `ddp_step.py`.

It is not `examples/tutorials/ddp_mnist.py`, whose network differs from the other contenders' `simple_cnn`, and which
decodes each image in each epoch and writes checkpoints: a slower baseline would flatter all others.

torchrun --nproc-per-node 2 benchmarks/baselines/bare_ddp.py --data mnist --root DIR --batch-size 64 …
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from setting import Clock, parse_arguments, training_tensors
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hpcdist.data.datasets import SimpleCNN


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, labels = training_tensors(arguments)
    dataset = TensorDataset(images, labels)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=arguments.batch_size, sampler=sampler)
    model = SimpleCNN(num_classes=10, in_channels=images.shape[1], image_size=images.shape[2])
    # Without DDP: the lower limit for any gradient exchange.
    network = model if "WITHOUT_EXCHANGE" in os.environ else DistributedDataParallel(model)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

    network.train()
    clock = Clock(arguments, dist.get_rank())
    dist.barrier()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(inputs), targets)
        loss.backward()
        optimizer.step()
        if clock.tick():
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
