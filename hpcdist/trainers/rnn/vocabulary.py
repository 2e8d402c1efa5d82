"""Shard of a vocabulary: rows of embedding and decoder, with explicit forward and backward passes of the loss.

Autograd is not used: it would keep logits, log-probabilities and gradients, each as large as the probabilities, and it
could not return the gradient of the input before it computes that of the weights.

The cross-entropy over several shards needs two values from each: the log-sum-exp of the logits (`lse`) and the logit
of the target. Each shard computes its part of all gradients from the joint `lse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Space:
    """Buffers of one batch, which are reused: allocating them again would cost page faults."""

    hidden: Tensor  #: [n, hidden]
    probs: Tensor  #: softmax over the shard's rows, [n, rows]
    lse: Tensor  #: over the shard's rows, [n]
    mine: Tensor  #: indices of the targets that this shard has
    targets: Tensor  #: rows of these targets in the shard
    factor: Tensor  #: turns probabilities over the shard into those over the vocabulary, times the loss's scale, [n]
    scale: float
    gradients: tuple[Tensor, ...] = ()  #: gradients of weight and bias


class VocabularyShard(nn.Module):
    """Rows of embedding and decoder.

    Args:
        encoder: rows of the embedding, [rows, embedding].
        weight: rows of the decoder, [rows, hidden]; None ties it to the embedding.
        start: index of the first row in the whole vocabulary.
        vocab_size: number of rows of the whole vocabulary.
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
        """The rows with the names of `LanguageModel`."""
        return {"encoder.weight": self.encoder, "decoder.weight": self.weight, "decoder.bias": self.bias}

    def lookup(self, ids: Tensor) -> Tensor:
        """Return rows of the embedding, [len(ids), embedding], for ids of the whole vocabulary."""
        return self.encoder.detach()[ids - self.start]

    @torch.no_grad()
    def score(self, hidden: Tensor, targets: Tensor, space: Space | None = None) -> tuple[Space, Tensor]:
        """Do the forward pass; return its buffers, and the logits [n] of the targets in this shard, 0 for others.

        Args:
            hidden: [n, hidden].
            targets: [n], ids of the whole vocabulary.
            space: buffers of an earlier batch to overwrite, if they have the same size.
        """
        shape = len(hidden), self.stop - self.start
        logits = space.probs if space is not None and space.probs.shape == shape else hidden.new_empty(shape)
        torch.addmm(self.bias, hidden, self.weight.t(), out=logits)
        mine = ((targets >= self.start) & (targets < self.stop)).nonzero().flatten()
        rows = targets[mine] - self.start
        chosen = hidden.new_zeros(len(hidden)).index_put_((mine,), logits[mine, rows])
        top = logits.amax(1)
        torch.softmax(logits, 1, out=logits)
        # The largest probability is at least 1 / rows, so this is exact; `logsumexp` would take two more passes.
        lse = top - logits.amax(1).log()
        gradients = () if space is None else space.gradients
        return Space(hidden, logits, lse, mine, rows, torch.empty_like(lse), 0.0, gradients), chosen

    @torch.no_grad()
    def input_gradient(self, space: Space, lse: Tensor, scale: float) -> Tensor:
        """Return this shard's part of the gradient of `scale` times the summed loss for `hidden`, [n, hidden].

        Args:
            lse: log-sum-exp over the whole vocabulary, [n].
        """
        # Row factors scale the small matrices, so that the probabilities are not written again.
        space.factor, space.scale = (space.lse - lse).exp_().mul_(scale), scale
        gradient = torch.mm(space.probs, self.weight).mul_(space.factor[:, None])
        return gradient.index_add_(0, space.mine, self.weight[space.targets], alpha=-scale)

    @torch.no_grad()
    def weight_gradient(self, space: Space) -> tuple[Tensor, ...]:
        """Return the gradients of weight and bias in reused buffers; call it after `input_gradient`."""
        if not space.gradients:
            space.gradients = (torch.empty_like(self.weight), torch.empty_like(self.bias))
        weight, bias = space.gradients
        torch.mm(space.probs.t(), space.hidden * space.factor[:, None], out=weight)
        weight.index_add_(0, space.targets, space.hidden[space.mine], alpha=-space.scale)
        torch.mv(space.probs.t(), space.factor, out=bias)
        bias.index_add_(0, space.targets, torch.ones_like(space.targets, dtype=bias.dtype), alpha=-space.scale)
        return space.gradients


def join_scores(lses: Sequence[Tensor], chosen: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Join the scores of all shards into the `lse` over the whole vocabulary [n] and the loss of each token [n]."""
    lse = lses[0] if len(lses) == 1 else torch.logsumexp(torch.stack(list(lses)), 0)
    return lse, lse - torch.stack(list(chosen)).sum(0)


def row_bounds(vocab_size: int, num_shards: int) -> list[int]:
    """Return the bounds of the shards: shard i has the rows from bound i to bound i + 1."""
    return [vocab_size * shard // num_shards for shard in range(num_shards + 1)]
