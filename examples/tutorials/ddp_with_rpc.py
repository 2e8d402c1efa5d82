"""Data parallelism and RPC in one program: trainers with DDP, and an embedding table on a parameter server.

    python ddp_with_rpc.py                 # starts two trainers, a master and a parameter server itself
    hpcdist run tutorial_ddp_with_rpc

Read it beside https://docs.pytorch.org/tutorials/advanced/rpc_ddp_tutorial.html. The trainers are ranks 0 and 1. Each
looks its bags of words up on the server and passes them through a linear layer, whose gradients DDP averages; the
table's gradients reach the server by distributed autograd. The master creates the table and starts the trainers.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

import hpcdist

NUM_CLASSES = 8
NAMES = ("trainer0", "trainer1", "master", "parameter_server")
NUM_TRAINERS = 2

trainers: dist.ProcessGroup


class Table(nn.Module):
    """The embedding table on the server."""

    def __init__(self, num_words: int, dimension: int) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(num_words, dimension, mode="sum")

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.bags(words, offsets)

    def parameter_references(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class HybridModel(nn.Module):
    """A remote table, and a linear layer that is equal on all trainers."""

    def __init__(self, table: rpc.RRef[Table], dimension: int) -> None:
        super().__init__()
        self.table = table
        self.linear = DistributedDataParallel(nn.Linear(dimension, NUM_CLASSES), process_group=trainers)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.linear(self.table.rpc_sync().forward(words, offsets))

    def parameter_references(self) -> list[rpc.RRef[nn.Parameter]]:
        local = [rpc.RRef(parameter) for parameter in self.linear.parameters()]
        return [*self.table.rpc_sync().parameter_references(), *local]


def make_batch(sizes: argparse.Namespace, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return words [bags * size], offsets [bags] and classes [bags]; the class of a bag follows from its first word."""
    words = torch.randint(sizes.words, (sizes.bags * sizes.bag_size,), generator=generator)
    return words, torch.arange(0, len(words), sizes.bag_size), words[:: sizes.bag_size] % NUM_CLASSES


def train(table: rpc.RRef[Table], arguments: argparse.Namespace) -> float:
    """Train on one trainer, at the call of the master. Returns the batches per second."""
    model = HybridModel(table, arguments.dimension)
    optimizer_class = getattr(torch.optim, arguments.optimizer)
    optimizer = DistributedOptimizer(optimizer_class, model.parameter_references(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    num_warm = arguments.steps // 3  # connections, threads and torch's own compilation start in the first steps
    for step in range(1, arguments.steps + 1):
        if step == num_warm + 1:
            began = time.perf_counter()
        words, offsets, classes = make_batch(arguments, generator)
        with dist_autograd.context() as context:
            loss = F.cross_entropy(model(words, offsets), classes)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        hpcdist.log({"train/loss": loss.item()}, step)
        if dist.get_rank() == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.barrier(trainers)
    speed = (arguments.steps - num_warm) / (time.perf_counter() - began)
    if dist.get_rank() == 0:
        weights = {"linear": model.linear.module.state_dict(), "table": table.rpc_sync().state_dict()}
        torch.save(weights, hpcdist.checkpoint_dir() / "hybrid.pt")
    return speed


def lead(arguments: argparse.Namespace) -> None:
    """Create the table and start the trainers, on the master."""
    table = rpc.remote("parameter_server", Table, (arguments.words, arguments.dimension))
    futures = [rpc.rpc_async(name, train, (table, arguments), timeout=0) for name in NAMES[:NUM_TRAINERS]]
    speeds = torch.futures.wait_all(futures)
    print(f"{sum(speeds):.1f} batches/s of {NUM_TRAINERS} trainers", flush=True)


def run(rank: int, world_size: int, arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    global trainers
    trainers = dist.new_group(range(NUM_TRAINERS))  # created by all ranks, used by the trainers
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=world_size)
    if NAMES[rank] == "master":
        lead(arguments)
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--optimizer", choices=["Adagrad", "SGD"], default="Adagrad")
    parser.add_argument("--words", type=int, default=100, help="rows of the embedding table")
    parser.add_argument("--dimension", type=int, default=16, help="of an embedding")
    parser.add_argument("--bags", type=int, default=32, help="bags of words in a batch of one trainer")
    parser.add_argument("--bag-size", type=int, default=4)
    parsed = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun or hpcdist
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), parsed)
    else:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        torch.multiprocessing.spawn(run, (len(NAMES), parsed), nprocs=len(NAMES))
