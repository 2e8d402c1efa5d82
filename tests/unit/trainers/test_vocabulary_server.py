"""Vocabulary servers without RPC: optimizers, and checkpoints of another number of servers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcdist.config.schema import OptimConfig
from hpcdist.trainers.rnn.vocabulary import (
    VocabularyServer,
    VocabularyShard,
    join_scores,
    load_server,
    row_bounds,
    server_shard,
)

VOCAB_SIZE, WIDTH, CPU = 23, 4, torch.device("cpu")


def servers(num: int, cfg: OptimConfig, *, tied: bool = False, num_trainers: int = 1) -> list[VocabularyServer]:
    generator = torch.Generator().manual_seed(0)
    encoder, weight = (torch.randn(VOCAB_SIZE, WIDTH, generator=generator) for _ in range(2))
    return [
        VocabularyServer(
            VocabularyShard(
                encoder[a:b].clone(), None if tied else weight[a:b].clone(), start=a, vocab_size=VOCAB_SIZE
            ),
            cfg,
            num_trainers,
            device=CPU,
        )
        for a, b in itertools.pairwise(row_bounds(VOCAB_SIZE, num))
    ]


def one_step(group: list[VocabularyServer], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    hidden = torch.randn(6, WIDTH, generator=generator)
    targets = torch.randint(VOCAB_SIZE, (6,), generator=generator)
    ids = torch.randperm(VOCAB_SIZE, generator=generator)[:5].sort()[0]
    rows = torch.randn(5, WIDTH, generator=generator)
    scores = [server.score(0, number, hidden, targets) for server in group]
    lse, _ = join_scores([lse for lse, _ in scores], [chosen for _, chosen in scores])
    for server in group:
        server.backward(0, number, lse, 1 / 6)
        mine = (ids >= server.shard.start) & (ids < server.shard.stop)
        server.push(0, number, ids[mine], rows[mine], 1.0, 0.1, ids[mine])


def whole(group: list[VocabularyServer]) -> dict[str, Tensor]:
    parts = [server.weights() for server in group]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "cfg",
    [
        OptimConfig(),
        OptimConfig(name="adamw", weight_decay=0.1),
        OptimConfig(name="sgd"),
        OptimConfig(name="sgd", momentum=0.0),
    ],
    ids=lambda cfg: f"{cfg.name} {cfg.momentum}",
)
def test_rows_and_optimizer_state_load_on_another_number_of_servers(cfg: OptimConfig, tied: bool) -> None:
    before, control = servers(2, cfg, tied=tied), servers(1, cfg, tied=tied)
    for number in range(3):
        one_step(before, number)
        one_step(control, number)
    saved = [server_shard(server).content() for server in before]
    for server in (after := servers(3, cfg, tied=tied)):
        load_server(server, [content for content in saved if overlaps(content, server)])
    for number in range(3, 6):
        one_step(after, number)
        one_step(control, number)
    expected = whole(control)
    for name, tensor in whole(after).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)


def overlaps(content: dict[str, Any], server: VocabularyServer) -> bool:
    first = content["rows"]["decoder.bias"][0]
    return first < server.shard.stop and server.shard.start < first + len(content["model"]["decoder.bias"])


def test_error_of_a_background_task_is_raised_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcdist.trainers.rnn.vocabulary.MIN_BACKGROUND_SIZE", 0)
    (server,) = servers(1, OptimConfig())
    hidden, targets, ids = torch.randn(3, WIDTH), torch.tensor([0, 1, 2]), torch.tensor([0])
    server.decode(0, 0, hidden, targets, 1.0)
    server.decoder_optimizer.step = fail  # type: ignore[method-assign,assignment]
    server.push(0, 0, ids, torch.zeros(1, WIDTH), 1.0, 0.1, ids)
    with pytest.raises(ValueError, match="out of order"):
        server.decode(0, 0, hidden, targets, 1.0)
    with pytest.raises(ValueError, match="out of order"):
        server.settle()


def fail() -> None:
    raise ValueError("out of order")
