"""The model of `examples/tutorials/ddp_with_rpc.py` in one process with sparse gradients: the bound of `hybrid.py`.

    python benchmarks/baselines/hybrid_one_process.py --rows 100 --dim 16 --bags 10 --bag-size 4 --steps 500

Prints the batches per second over the last two thirds of the steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CLASSES = 8
LR = 0.05


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--rows", "--dim", "--bags", "--bag-size", "--steps"):
        parser.add_argument(name, type=int, required=True)
    return parser.parse_args()


def make_batches(arguments: argparse.Namespace, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield indices [bags × bag size], offsets [bags] and classes [bags] without end, from 20 generated batches."""
    torch.manual_seed(seed)
    num_indices = arguments.bags * arguments.bag_size
    offsets = torch.arange(0, num_indices, arguments.bag_size)
    drawn = [
        (torch.randint(arguments.rows, (num_indices,)), offsets, torch.randint(NUM_CLASSES, (arguments.bags,)))
        for _ in range(20)
    ]
    while True:
        yield from drawn


def one_process(arguments: argparse.Namespace) -> float:
    bags = nn.EmbeddingBag(arguments.rows, arguments.dim, mode="sum", sparse=True)
    linear = nn.Linear(arguments.dim, NUM_CLASSES)
    optimizer = torch.optim.SGD([*bags.parameters(), *linear.parameters()], lr=LR)
    batches = make_batches(arguments, 0)
    for step in range(arguments.steps):
        if step == arguments.steps // 3:
            began = time.perf_counter()
        indices, offsets, classes = next(batches)
        loss = F.cross_entropy(linear(bags(indices, offsets)), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    num_steps: int = arguments.steps - arguments.steps // 3
    return num_steps / (time.perf_counter() - began)


if __name__ == "__main__":
    print(f"{one_process(parse_arguments()):.3f}", flush=True)
