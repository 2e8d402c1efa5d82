"""Messages between processes: point to point, collectives, groups, and training with averaged gradients.

    python collectives.py [--init env|tcp|file]     # starts four processes itself
    torchrun --nproc-per-node 4 collectives.py
    hpcdist run tutorial_collectives

Read it beside https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hpcdist

NUM_PROCESSES = 4
NUM_STEPS = 100


def blocking(rank: int) -> Tensor:
    """Send a tensor from rank 0 to rank 1; both wait until it has arrived."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    return tensor


def immediate(rank: int) -> Tensor:
    """Send without waiting. Before `wait` the tensor must neither be changed nor read."""
    tensor = torch.zeros(1)
    request = None
    if rank == 0:
        tensor += 1
        request = dist.isend(tensor, dst=1)
    elif rank == 1:
        request = dist.irecv(tensor, src=0)
    if request is not None:
        request.wait()
    return tensor


def reductions(rank: int) -> dict[str, float]:
    """Reduce one number of each rank by four operations; all ranks get the results."""
    results = {}
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, op=operation)
        results[str(operation).rpartition(".")[2]] = tensor.item()
    return results


def collectives(rank: int, world_size: int) -> dict[str, list[float]]:
    """Distribute and collect numbers; what a rank does not receive stays 0."""
    own = torch.tensor([float(rank)])
    # From rank 0 to all others.
    sent = torch.tensor([7.0]) if rank == 0 else torch.zeros(1)
    dist.broadcast(sent, src=0)
    # One part of a list for each rank.
    part = torch.zeros(1)
    dist.scatter(part, [torch.tensor([10.0 * index]) for index in range(world_size)] if rank == 0 else None, src=0)
    # The numbers of all ranks on rank 0, and on all ranks.
    gathered = [torch.zeros(1) for _ in range(world_size)]
    dist.gather(own, gathered if rank == 0 else None, dst=0)
    everywhere = [torch.zeros(1) for _ in range(world_size)]
    dist.all_gather(everywhere, own)
    # The sum, on rank 0 alone.
    total = own.clone()
    dist.reduce(total, dst=0)
    return {
        "broadcast": sent.tolist(),
        "scatter": part.tolist(),
        "gather": torch.cat(gathered).tolist(),
        "all_gather": torch.cat(everywhere).tolist(),
        "reduce": total.tolist(),
    }


def sum_in_group(rank: int, members: list[int]) -> float:
    """Sum over some of the ranks. All ranks create the group, its members alone use it."""
    group = dist.new_group(members)
    tensor = torch.tensor([float(rank)])
    if rank in members:
        dist.all_reduce(tensor, group=group)
    return tensor.item()


def ring_all_reduce(values: Tensor) -> Tensor:
    """Return the sum of the `values` of all ranks, computed by messages to the next rank only.

    Each of the chunks goes around the ring and collects a sum, then the sums go around: 2 (n - 1) messages of the size
    of a chunk from each rank, whatever the number of ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = [chunk.clone() for chunk in values.tensor_split(world_size)]
    for step in range(2 * (world_size - 1)):
        sent, received = (rank - step) % world_size, (rank - step - 1) % world_size
        message = torch.empty_like(chunks[received])
        request = dist.isend(chunks[sent], dst=after)
        dist.recv(message, src=before)
        request.wait()
        chunks[received] = chunks[received] + message if step < world_size - 1 else message
    return torch.cat(chunks)


def average_gradients(model: nn.Module) -> None:
    """Average the gradients over all ranks.

    DistributedDataParallel does this for several parameters at a time, while the backward pass runs.
    """
    for parameter in model.parameters():
        assert parameter.grad is not None, "after the backward pass"
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(rank: int) -> nn.Module:
    """Train by hand: equal weights, other samples on each rank, averaged gradients."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    weights = torch.arange(8.0)
    for step in range(1, NUM_STEPS + 1):
        inputs = torch.randn(32, 8)
        loss = F.mse_loss(model(inputs).squeeze(1), inputs @ weights)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        hpcdist.log({"train/loss": loss.item()}, step)
    return model


def run(rank: int, world_size: int, init_method: str) -> None:
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    found = {
        "send": blocking(rank).tolist(),
        "isend": immediate(rank).tolist(),
        **reductions(rank),
        **collectives(rank, world_size),
        "group": sum_in_group(rank, [0, world_size - 1]),
        "ring": ring_all_reduce(torch.arange(10.0) + rank).tolist(),
    }
    print(f"rank {rank}: {found}", flush=True)
    model = train(rank)
    if rank == 0:
        torch.save(model.state_dict(), hpcdist.checkpoint_dir() / "linear.pt")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", choices=("env", "tcp", "file"), default="env", help="how the processes meet")
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun or hpcdist: MASTER_ADDR and MASTER_PORT are set
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    with tempfile.TemporaryDirectory() as folder:
        methods = {
            "env": "env://",
            "tcp": f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}",
            "file": f"file://{folder}/meet",
        }
        torch.multiprocessing.spawn(run, (NUM_PROCESSES, methods[arguments.init]), nprocs=NUM_PROCESSES)


if __name__ == "__main__":
    main()
