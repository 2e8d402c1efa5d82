"""The model of `examples/tutorials/rnn_parameter_server.py` on hpcdist's text: the baseline of `benchmarks/rnn.py`.

    python benchmarks/baselines/rnn.py --out steps.txt [--local] …

The program generates a text of its own and ends; in the benchmark all contenders read the same text, train with SGD,
and take turns without end. `--local` trains the same model in one process without RPC: the upper limit for one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from hpcdist.trainers.rnn import RnnConfig
from hpcdist.trainers.rnn.token_stream import Batch, Columns, load_corpus

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "tutorials"))

from rnn_parameter_server import SERVER, Decoder, EmbeddingTable, LanguageModel

LR = 0.05
Step = Callable[[Batch], None]


def remote_step(cfg: RnnConfig, vocab_size: int) -> Step:
    model = LanguageModel(vocab_size, cfg.embedding_size, cfg.hidden_size, cfg.num_layers)
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_references(), lr=LR)
    state: tuple[Tensor, Tensor] | None = None

    def step(batch: Batch) -> None:
        nonlocal state
        with dist_autograd.context() as context:
            logits, carried = model(batch.ids[batch.inverse], state)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.targets)
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]  # torch exports it at run time
            optimizer.step(context)
        state = (carried[0].detach(), carried[1].detach())

    return step


def local_step(cfg: RnnConfig, vocab_size: int) -> Step:
    table = EmbeddingTable(vocab_size, cfg.embedding_size)
    decoder = Decoder(cfg.hidden_size, vocab_size)
    lstm = nn.LSTM(cfg.embedding_size, cfg.hidden_size, cfg.num_layers)
    model = nn.ModuleList([table, lstm, decoder])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    state: list[Tensor] | None = None

    def step(batch: Batch) -> None:
        nonlocal state
        output, carried = lstm(table(batch.ids[batch.inverse]), state)
        F.cross_entropy(decoder(output).flatten(0, 1), batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = [tensor.detach() for tensor in carried]

    return step


def measure(make: Callable[[RnnConfig, int], Step], arguments: argparse.Namespace) -> None:
    """Train without end and write a line per step: its number and the Unix time in s."""
    cfg = RnnConfig(**json.loads(arguments.rnn))
    corpus = load_corpus(cfg, seed=0)
    columns = Columns(corpus.train, cfg.batch_size, cfg.bptt)
    step = make(cfg, corpus.vocab_size)
    with open(arguments.out, "w", buffering=1) as out:
        for number in itertools.count(1):
            step(columns[number % len(columns)])
            out.write(f"{number} {time.time()}\n")


def run_rank(rank: int, port: int, arguments: argparse.Namespace) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc((SERVER, "trainer")[rank], rank=rank, world_size=2, rpc_backend_options=options)
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
