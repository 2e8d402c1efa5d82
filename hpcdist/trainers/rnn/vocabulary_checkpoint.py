"""Checkpoints of vocabulary servers: each saves its own rows, which may return to another number of servers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcdist.checkpoint.shards import Shard
from hpcdist.errors import ConfigError
from hpcdist.rank.checkpointing import Restored
from hpcdist.trainers.rnn.vocabulary import row_bounds
from hpcdist.trainers.rnn.vocabulary_server import VocabularyServer


def check_vocab_size(saved: Restored, vocab_size: int) -> None:
    """Raise ConfigError unless the checkpoint was trained on a vocabulary of this size."""
    if (trained := saved.trainer["vocab_size"]) != vocab_size:
        raise ConfigError(
            [f"the text has {vocab_size} different tokens, but the checkpoint was trained on {trained}:"
             " resume with the same text and tokenizer"]
        )  # fmt: skip


def server_shard(server: VocabularyServer) -> Shard:
    """Return the rows and optimizer states of a server. It waits for pending updates; no new ones may arrive."""
    server.settle()
    rows = server.shard.named_rows
    return Shard(
        model={name: tensor.detach() for name, tensor in rows.items()},
        rows=dict.fromkeys(rows, (server.shard.start, server.shard.vocab_size)),
        trainer={
            "decoder": server.decoder_optimizer.state_dict(),
            "rows": None if server.row_optimizer is None else server.row_optimizer.state_dict(),
        },
    )


def shards_of_rows(saved: Restored, start: int, stop: int) -> list[dict[str, Any]]:
    """Return the contents of the saved shards that have rows from `start` to `stop`."""
    bounds = row_bounds(saved.trainer["vocab_size"], saved.trainer["num_servers"])
    owners = [
        saved.trainer["num_trainers"] + index
        for index, (first, last) in enumerate(itertools.pairwise(bounds))
        if first < stop and start < last
    ]
    return [content for rank in owners if (content := saved.shard(rank)) is not None]


def load_server(server: VocabularyServer, contents: Sequence[Mapping[str, Any]]) -> None:
    """Load a server's rows and optimizer states from the shards that have these rows, in order."""
    first = contents[0]["rows"]["decoder.bias"][0]
    own = slice(server.shard.start - first, server.shard.stop - first)

    def select(values: Sequence[Any]) -> Any:
        if not isinstance(values[0], Tensor):
            return values[0]
        return torch.cat(list(values))[own] if values[0].dim() else values[0].clone()

    def select_state(key: str) -> dict[str, Any]:
        saved = [content["trainer"][key] for content in contents]
        states = {
            index: {name: select([one["state"][index][name] for one in saved]) for name in state}
            for index, state in saved[0]["state"].items()
        }
        return {"state": states, "param_groups": saved[0]["param_groups"]}

    with torch.no_grad():
        for name, tensor in server.shard.named_rows.items():
            tensor.copy_(select([content["model"][name] for content in contents]))
    server.decoder_optimizer.load_state_dict(select_state("decoder"))
    if server.row_optimizer is not None:
        server.row_optimizer.load_state_dict(select_state("rows"))
