"""Explicit loss and gradients of vocabulary shards, compared with autograd."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcdist.trainers.rnn.vocabulary import Space, VocabularyShard, join_scores, row_bounds

NUM_TOKENS, HIDDEN, VOCAB_SIZE = 37, 8, 50


def by_autograd(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    loss = F.cross_entropy(F.linear(*leaves), targets)
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("sharpness", [1.0, 300.0], ids=["normal", "probabilities below the smallest float"])
def test_loss_and_gradients_equal_those_of_autograd(num_shards: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator) * sharpness
    bounds = row_bounds(VOCAB_SIZE, num_shards)
    shards = [
        VocabularyShard(torch.zeros(b - a, 4), weight[a:b].clone(), start=a, vocab_size=VOCAB_SIZE)
        for a, b in itertools.pairwise(bounds)
    ]
    for shard in shards:
        torch.nn.init.normal_(shard.bias, generator=generator)
    bias = torch.cat([shard.bias.detach() for shard in shards])
    spaces: list[Space | None] = [None] * num_shards
    for size in (NUM_TOKENS, NUM_TOKENS, 5):  # buffers are reused, or have another size
        hidden = torch.randn(size, HIDDEN, generator=generator)
        targets = torch.randint(VOCAB_SIZE, (size,), generator=generator)
        scores = [shard.score(hidden, targets, space) for shard, space in zip(shards, spaces, strict=True)]
        lse, losses = join_scores([space.lse for space, _ in scores], [chosen for _, chosen in scores])
        parts = [shard.input_gradient(space, lse, 1 / size) for shard, (space, _) in zip(shards, scores, strict=True)]
        gradients = [shard.weight_gradient(space) for shard, (space, _) in zip(shards, scores, strict=True)]
        expected_loss, expected = by_autograd(hidden, weight, bias, targets)
        torch.testing.assert_close(losses.mean(), expected_loss)
        torch.testing.assert_close(torch.stack(parts).sum(0), expected[0], rtol=1e-4, atol=1e-5 * sharpness)
        torch.testing.assert_close(torch.cat([part[0] for part in gradients]), expected[1], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(torch.cat([part[1] for part in gradients]), expected[2], rtol=1e-4, atol=1e-6)
        spaces = [space for space, _ in scores]


def test_lookup_uses_ids_of_the_whole_vocabulary() -> None:
    rows = torch.randn(10, 4)
    shard = VocabularyShard(rows[6:].clone(), None, start=6, vocab_size=10)
    assert torch.equal(shard.lookup(torch.tensor([6, 9])), rows[[6, 9]])
    assert shard.weight is shard.encoder
    assert set(shard.named_rows) == {"encoder.weight", "decoder.weight", "decoder.bias"}
    assert row_bounds(10, 3) == [0, 3, 6, 10]
