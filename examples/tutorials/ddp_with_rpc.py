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

NUM_WORDS, DIMENSION, NUM_CLASSES = 100, 16, 8
NUM_BAGS, BAG_SIZE = 32, 4
NAMES = ("trainer0", "trainer1", "master", "parameter_server")
NUM_TRAINERS = 2

trainers: dist.ProcessGroup


class Table(nn.Module):
    """The embedding table on the server."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(NUM_WORDS, DIMENSION, mode="sum")

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.bags(words, offsets)

    def parameter_references(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class HybridModel(nn.Module):
    """A remote table, and a linear layer that is equal on all trainers."""

    def __init__(self, table: rpc.RRef[Table]) -> None:
        super().__init__()
        self.table = table
        self.linear = DistributedDataParallel(nn.Linear(DIMENSION, NUM_CLASSES), process_group=trainers)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.linear(self.table.rpc_sync().forward(words, offsets))

    def parameter_references(self) -> list[rpc.RRef[nn.Parameter]]:
        local = [rpc.RRef(parameter) for parameter in self.linear.parameters()]
        return [*self.table.rpc_sync().parameter_references(), *local]


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return words [bags * size], offsets [bags] and classes [bags]; the class of a bag follows from its first word."""
    words = torch.randint(NUM_WORDS, (NUM_BAGS * BAG_SIZE,), generator=generator)
    return words, torch.arange(0, NUM_BAGS * BAG_SIZE, BAG_SIZE), words[::BAG_SIZE] % NUM_CLASSES


def train(table: rpc.RRef[Table], num_steps: int) -> float:
    """Train on one trainer, at the call of the master. Returns the batches per second."""
    model = HybridModel(table)
    optimizer = DistributedOptimizer(torch.optim.Adagrad, model.parameter_references(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    began = time.perf_counter()
    for step in range(1, num_steps + 1):
        words, offsets, classes = make_batch(generator)
        with dist_autograd.context() as context:
            loss = F.cross_entropy(model(words, offsets), classes)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        hpcdist.log({"train/loss": loss.item()}, step)
        if dist.get_rank() == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.barrier(trainers)
    if dist.get_rank() == 0:
        weights = {"linear": model.linear.module.state_dict(), "table": table.rpc_sync().state_dict()}
        torch.save(weights, hpcdist.checkpoint_dir() / "hybrid.pt")
    return num_steps / (time.perf_counter() - began)


def lead(num_steps: int) -> None:
    """Create the table and start the trainers, on the master."""
    table = rpc.remote("parameter_server", Table)
    futures = [rpc.rpc_async(name, train, (table, num_steps), timeout=0) for name in NAMES[:NUM_TRAINERS]]
    speeds = torch.futures.wait_all(futures)
    print(f"{sum(speeds):.0f} batches/s of {NUM_TRAINERS} trainers", flush=True)


def run(rank: int, world_size: int, num_steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    global trainers
    trainers = dist.new_group(range(NUM_TRAINERS))  # created by all ranks, used by the trainers
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=world_size)
    if NAMES[rank] == "master":
        lead(num_steps)
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun or hpcdist
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), arguments.steps)
    else:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        torch.multiprocessing.spawn(run, (len(NAMES), arguments.steps), nprocs=len(NAMES))
