"""DDP with one parameter server as in PyTorch's tutorial, and the same model in one process without RPC.

    python benchmarks/baselines/hybrid.py --rows 100 --dim 16 --bags 10 --bag-size 4 --steps 500 [--one-process]

A master starts two trainers. Each looks up its bags by `rpc_sync` in a table with dense gradients and passes them
through a linear layer in DDP; distributed autograd and DistributedOptimizer compute the update. Prints the batches per
second of all trainers over the last two thirds of the steps.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

NUM_TRAINERS = 2
MASTER, SERVER = NUM_TRAINERS, NUM_TRAINERS + 1
NUM_CLASSES = 8
LR = 0.05


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--rows", "--dim", "--bags", "--bag-size", "--steps"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--one-process", action="store_true")
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


class Table:
    """The embedding table on the server."""

    def __init__(self, rows: int, dim: int) -> None:
        self.bags = nn.EmbeddingBag(rows, dim, mode="sum")

    def look_up(self, indices: Tensor, offsets: Tensor) -> Tensor:
        pooled: Tensor = self.bags(indices, offsets)
        return pooled

    def parameters(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.bags.parameters()]


def train(arguments: argparse.Namespace, table: rpc.RRef[Table]) -> float:
    """Train on one trainer and return the seconds of the last two thirds of the steps."""
    model = DistributedDataParallel(nn.Linear(arguments.dim, NUM_CLASSES))
    parameters = table.rpc_sync().parameters() + [rpc.RRef(parameter) for parameter in model.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=LR)
    batches = make_batches(arguments, dist.get_rank())
    for step in range(arguments.steps):
        if step == arguments.steps // 3:
            dist.barrier()
            began = time.perf_counter()
        indices, offsets, classes = next(batches)
        with dist_autograd.context() as context:
            pooled = rpc.rpc_sync(table.owner(), _look_up, (table, indices, offsets))
            loss = F.cross_entropy(model(pooled), classes)
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]  # torch exports it at run time
            optimizer.step(context)
    dist.barrier()
    return time.perf_counter() - began


def _look_up(table: rpc.RRef[Table], indices: Tensor, offsets: Tensor) -> Tensor:
    pooled: Tensor = table.local_value().look_up(indices, offsets)
    return pooled


def master(arguments: argparse.Namespace) -> float:
    table = rpc.remote(f"rank{SERVER}", Table, (arguments.rows, arguments.dim))
    # No timeout: the dense gradient of a large table and its update are slow.
    trainers = [rpc.rpc_async(f"rank{rank}", train, (arguments, table), timeout=0) for rank in range(NUM_TRAINERS)]
    seconds: float = max(trainer.wait() for trainer in trainers)
    num_steps: int = arguments.steps - arguments.steps // 3
    return NUM_TRAINERS * num_steps / seconds


def run_rank(arguments: argparse.Namespace, rank: int) -> None:
    address = f"tcp://127.0.0.1:{os.environ['BASELINE_PORT']}"
    if rank < NUM_TRAINERS:
        port = int(os.environ["DDP_PORT"])
        store = dist.TCPStore("127.0.0.1", port, NUM_TRAINERS, is_master=rank == 0)  # type: ignore[attr-defined]  # torch exports it at run time
        dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_TRAINERS)
    options = rpc.TensorPipeRpcBackendOptions(init_method=address, rpc_timeout=600)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=NUM_TRAINERS + 2, rpc_backend_options=options)
    if rank == MASTER:
        print(f"{master(arguments):.3f}", flush=True)
    rpc.shutdown()


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
    parsed = parse_arguments()
    if parsed.one_process:
        print(f"{one_process(parsed):.3f}", flush=True)
    else:
        run_rank(parsed, int(os.environ["RANK"]))
    sys.exit(0)
