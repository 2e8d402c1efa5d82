"""The parameter-server RNN of PyTorch's RPC tutorial: embedding and decoder on a server, LSTM on the trainer.

    python benchmarks/baselines/rnn.py --out steps.txt [--local] …

Lookup by RPC, LSTM on the trainer, decoder by RPC, loss on the trainer, distributed autograd, `DistributedOptimizer`
over all parameters. `--local` trains the same model in one process without RPC: the upper limit for one thread.

Source: https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from hpcdist.trainers.rnn import RnnConfig
from hpcdist.trainers.rnn.token_stream import Batch, Columns, load_corpus

SERVER, TRAINER = "server", "trainer"


class EmbeddingTable(nn.Module):
    def __init__(self, vocab_size: int, embedding: int, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocab_size, embedding)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.drop(self.encoder(tokens))
        return found


class Decoder(nn.Module):
    def __init__(self, vocab_size: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(hidden, vocab_size)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, output: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.drop(output))
        return logits


def forward_at(module: rpc.RRef[Any], value: Tensor) -> Tensor:
    result: Tensor = module.local_value()(value)
    return result


def parameters_at(module: rpc.RRef[Any]) -> list[rpc.RRef[nn.Parameter]]:
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


Step = Callable[[Batch], None]


def remote_step(cfg: RnnConfig, vocab_size: int, lr: float) -> Step:
    table = rpc.remote(SERVER, EmbeddingTable, (vocab_size, cfg.embedding_size, cfg.dropout))
    decoder = rpc.remote(SERVER, Decoder, (vocab_size, cfg.hidden_size, cfg.dropout))
    lstm = nn.LSTM(
        cfg.embedding_size, cfg.hidden_size, cfg.num_layers, dropout=cfg.dropout if cfg.num_layers > 1 else 0.0
    )
    parameters = [*rpc.rpc_sync(SERVER, parameters_at, (table,)), *rpc.rpc_sync(SERVER, parameters_at, (decoder,))]
    parameters += [rpc.RRef(parameter) for parameter in lstm.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=lr)
    state: list[Tensor] | None = None

    def step(batch: Batch) -> None:
        nonlocal state
        with dist_autograd.context() as context:
            embedded = rpc.rpc_sync(SERVER, forward_at, (table, batch.ids[batch.inverse]))
            output, carried = lstm(embedded, state)
            logits = rpc.rpc_sync(SERVER, forward_at, (decoder, output))
            loss = F.cross_entropy(logits.flatten(0, 1), batch.targets)
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]  # torch exports it at run time
            optimizer.step(context)
        state = [tensor.detach() for tensor in carried]

    return step


def local_step(cfg: RnnConfig, vocab_size: int, lr: float) -> Step:
    table = EmbeddingTable(vocab_size, cfg.embedding_size, cfg.dropout)
    decoder = Decoder(vocab_size, cfg.hidden_size, cfg.dropout)
    lstm = nn.LSTM(
        cfg.embedding_size, cfg.hidden_size, cfg.num_layers, dropout=cfg.dropout if cfg.num_layers > 1 else 0.0
    )
    model = nn.ModuleList([table, lstm, decoder])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    state: list[Tensor] | None = None

    def step(batch: Batch) -> None:
        nonlocal state
        output, carried = lstm(table(batch.ids[batch.inverse]), state)
        F.cross_entropy(decoder(output).flatten(0, 1), batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = [tensor.detach() for tensor in carried]

    return step


def measure(make: Callable[[RnnConfig, int, float], Step], arguments: argparse.Namespace) -> None:
    """Train without end and write a line per step: its number and the Unix time in s."""
    cfg = RnnConfig(**json.loads(arguments.rnn))
    corpus = load_corpus(cfg, seed=0)
    columns = Columns(corpus.train, cfg.batch_size, cfg.bptt)
    step = make(cfg, corpus.vocab_size, 0.05)
    with open(arguments.out, "w", buffering=1) as out:
        for number in itertools.count(1):
            step(columns[number % len(columns)])
            out.write(f"{number} {time.time()}\n")


def run_rank(rank: int, port: int, arguments: argparse.Namespace) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc((SERVER, TRAINER)[rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        measure(remote_step, arguments)
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rnn", default="{}", help="keys of the section `rnn`, as JSON")
    parser.add_argument("--out", required=True)
    parser.add_argument("--local", action="store_true")
    arguments = parser.parse_args()
    if arguments.local:
        measure(local_step, arguments)
        return
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    multiprocessing.spawn(run_rank, (port, arguments), nprocs=2)  # type: ignore[attr-defined,no-untyped-call]


if __name__ == "__main__":
    main()
