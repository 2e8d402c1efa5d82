"""A recurrent language model with embedding table and decoder on a parameter server.

    python rnn_parameter_server.py         # starts a trainer and a parameter server itself
    hpcdist run tutorial_rnn_parameter_server

Read it beside https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html (second part). The trainer, rank 0,
looks words up on the server, runs the LSTM itself, and lets the server decode its output. Distributed autograd follows
the RPCs backwards, and DistributedOptimizer updates each parameter where it lives.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

import hpcdist

VOCABULARY, EMBEDDING, HIDDEN, LAYERS = 100, 32, 64, 2
BATCH_SIZE, SEQUENCE = 16, 20
SERVER = "parameter_server"


class EmbeddingTable(nn.Module):
    def __init__(self, vocabulary: int, embedding: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, embedding)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(tokens)

    def parameter_references(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Decoder(nn.Module):
    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, vocabulary)
        nn.init.uniform_(self.linear.weight, -0.1, 0.1)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden)

    def parameter_references(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class LanguageModel(nn.Module):
    """The LSTM of the trainer, and references to the two parts on the server."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.table: rpc.RRef[EmbeddingTable] = rpc.remote(SERVER, EmbeddingTable, (vocabulary, embedding))
        self.decoder: rpc.RRef[Decoder] = rpc.remote(SERVER, Decoder, (hidden, vocabulary))
        self.lstm = nn.LSTM(embedding, hidden, num_layers)

    def forward(self, tokens: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        embedded = self.table.rpc_sync().forward(tokens)
        hidden, state = self.lstm(embedded, state)
        return self.decoder.rpc_sync().forward(hidden), state

    def parameter_references(self) -> list[rpc.RRef[nn.Parameter]]:
        """Return references to all parameters, wherever they live."""
        remote = [*self.table.rpc_sync().parameter_references(), *self.decoder.rpc_sync().parameter_references()]
        return remote + [rpc.RRef(parameter) for parameter in self.lstm.parameters()]


def make_text(num_batches: int) -> Tensor:
    """Return tokens [num_batches * SEQUENCE + 1, BATCH_SIZE]: each is one of two that may follow the one before."""
    generator = torch.Generator().manual_seed(0)
    followers = torch.randint(VOCABULARY, (VOCABULARY, 2), generator=generator)
    tokens = [torch.randint(VOCABULARY, (BATCH_SIZE,), generator=generator)]
    for _ in range(num_batches * SEQUENCE):
        choice = torch.randint(2, (BATCH_SIZE,), generator=generator)
        tokens.append(followers[tokens[-1], choice])
    return torch.stack(tokens)


def train(num_steps: int) -> None:
    model = LanguageModel(VOCABULARY, EMBEDDING, HIDDEN, LAYERS)
    optimizer = DistributedOptimizer(torch.optim.Adam, model.parameter_references(), lr=0.01)
    text = make_text(num_steps)
    state = None  # of the LSTM, which begins with zeros
    for step in range(1, num_steps + 1):
        begin = (step - 1) * SEQUENCE
        tokens, targets = text[begin : begin + SEQUENCE], text[begin + 1 : begin + SEQUENCE + 1]
        # Each step has a context of its own, which holds its gradients on all ranks.
        with dist_autograd.context() as context:
            logits, state = model(tokens, state)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        state = (state[0].detach(), state[1].detach())
        hpcdist.log({"train/loss": loss.item()}, step)
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    weights = {
        "lstm": model.lstm.state_dict(),
        "table": model.table.rpc_sync().state_dict(),
        "decoder": model.decoder.rpc_sync().state_dict(),
    }
    torch.save(weights, hpcdist.checkpoint_dir() / "language_model.pt")


def run(rank: int, world_size: int, num_steps: int) -> None:
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    rpc.init_rpc(["trainer", SERVER][rank], rank=rank, world_size=world_size)
    if rank == 0:
        train(num_steps)
    rpc.shutdown()  # the server answers calls until the trainer is here, too


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun or hpcdist
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), arguments.steps)
    else:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        torch.multiprocessing.spawn(run, (2, arguments.steps), nprocs=2)
