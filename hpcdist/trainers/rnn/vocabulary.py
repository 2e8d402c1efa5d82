"""Rows of a vocabulary, embedding and decoder, with both directions of the loss written out by hand.

By hand because autograd would keep logits, their logarithms and their gradient, each as large as the odds, and because
the gradient of the input can be given away before that of the weights is begun.

Cross-entropy over rows that lie on several shards needs two words from each: the logarithm of the summed exponentials
(`lse`) and the target's logit. With the whole `lse` every shard knows its part of all gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Space:
    """Buffers of one batch on its way through a shard. They are kept: blocks of their size cost page faults anew."""

    hidden: Tensor  #: [n, hidden]
    odds: Tensor  #: softmax over the shard's rows, [n, rows]
    lse: Tensor  #: over the shard's rows, [n]
    mine: Tensor  #: which of the n targets are rows of this shard
    targets: Tensor  #: their rows
    factor: Tensor  #: what makes of the shard's odds the whole vocabulary's, times the loss's scale, [n]
    scale: float
    gradients: tuple[Tensor, ...] = ()  #: of weight and bias


class VocabularyShard(nn.Module):
    """Rows of embedding and decoder.

    Args:
        encoder: rows of the embedding, [rows, embedding].
        weight: rows of the decoder, [rows, hidden]; None ties it to the embedding.
        start: where these rows begin in the whole vocabulary.
        vocab_size: rows in all.
    """

    def __init__(self, encoder: Tensor, weight: Tensor | None, *, start: int, vocab_size: int) -> None:
        super().__init__()
        self.start, self.stop, self.vocab_size = start, start + len(encoder), vocab_size
        self.is_tied = weight is None
        self.encoder = nn.Parameter(encoder)
        self.weight = self.encoder if weight is None else nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(len(encoder)))

    @property
    def named_rows(self) -> dict[str, Tensor]:
        """The rows under the names of `LanguageModel`."""
        return {"encoder.weight": self.encoder, "decoder.weight": self.weight, "decoder.bias": self.bias}

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows of the embedding, [len(ids), embedding]; `ids` are the whole vocabulary's."""
        return self.encoder.detach()[ids - self.start]

    @torch.no_grad()
    def score(self, hidden: Tensor, targets: Tensor, space: Space | None = None) -> tuple[Space, Tensor]:
        """Forward. Returns what the backward needs, and the logits [n] of those targets that are here, 0 elsewhere.

        Args:
            hidden: [n, hidden].
            targets: [n] in the whole vocabulary.
            space: of an earlier batch, to be overwritten where it has the size.
        """
        shape = len(hidden), self.stop - self.start
        logits = space.odds if space is not None and space.odds.shape == shape else hidden.new_empty(shape)
        torch.addmm(self.bias, hidden, self.weight.t(), out=logits)
        mine = ((targets >= self.start) & (targets < self.stop)).nonzero().flatten()
        rows = targets[mine] - self.start
        chosen = hidden.new_zeros(len(hidden)).index_put_((mine,), logits[mine, rows])
        top = logits.amax(1)
        torch.softmax(logits, 1, out=logits)
        # The greatest odds are at least 1 / rows, so this is exact; `logsumexp` would be two more passes.
        lse = top - logits.amax(1).log()
        gradients = () if space is None else space.gradients
        return Space(hidden, logits, lse, mine, rows, torch.empty_like(lse), 0.0, gradients), chosen

    @torch.no_grad()
    def input_gradient(self, space: Space, lse: Tensor, scale: float) -> Tensor:
        """This shard's part of the gradient of `scale` times the summed loss by `hidden`, [n, hidden].

        Args:
            lse: over the whole vocabulary, [n].
        """
        # Factors of whole rows go to the small matrices: the odds are not written again.
        space.factor, space.scale = (space.lse - lse).exp_().mul_(scale), scale
        gradient = torch.mm(space.odds, self.weight).mul_(space.factor[:, None])
        return gradient.index_add_(0, space.mine, self.weight[space.targets], alpha=-scale)

    @torch.no_grad()
    def weight_gradient(self, space: Space) -> tuple[Tensor, ...]:
        """The gradients of weight and bias, in the space's own buffers; after `input_gradient`."""
        if not space.gradients:
            space.gradients = (torch.empty_like(self.weight), torch.empty_like(self.bias))
        weight, bias = space.gradients
        torch.mm(space.odds.t(), space.hidden * space.factor[:, None], out=weight)
        weight.index_add_(0, space.targets, space.hidden[space.mine], alpha=-space.scale)
        torch.mv(space.odds.t(), space.factor, out=bias)
        bias.index_add_(0, space.targets, torch.ones_like(space.targets, dtype=bias.dtype), alpha=-space.scale)
        return space.gradients


def join_scores(lses: Sequence[Tensor], chosen: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What all shards say of n tokens: the whole vocabulary's `lse` [n], and each token's loss [n]."""
    lse = lses[0] if len(lses) == 1 else torch.logsumexp(torch.stack(list(lses)), 0)
    return lse, lse - torch.stack(list(chosen)).sum(0)


def row_bounds(vocab_size: int, num_shards: int) -> list[int]:
    """Shard i has the rows from bound i to bound i + 1."""
    return [vocab_size * shard // num_shards for shard in range(num_shards + 1)]
