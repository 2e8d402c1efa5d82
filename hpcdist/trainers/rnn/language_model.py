"""A recurrent language model in one process, and what its tables start with, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor, nn

#: Rows that are drawn at once: what a row starts with does not depend on which shard holds it.
_BLOCK = 1024
_BOUND = 0.1
ENCODER, DECODER = 0, 1


def first_rows(start: int, stop: int, width: int, seed: int, table: int) -> Tensor:
    """Rows `start` to `stop` of a table at the start of training, uniform in ±0.1, float32 [stop - start, width]."""
    blocks = []
    for block in range(start // _BLOCK, -(-stop // _BLOCK)):
        generator = torch.Generator().manual_seed((((2 * seed + table) << 24) + block) % 2**63)
        blocks.append(torch.empty(_BLOCK, width).uniform_(-_BOUND, _BOUND, generator=generator))
    offset = start // _BLOCK * _BLOCK
    return torch.cat(blocks)[start - offset : stop - offset].clone()


class LanguageModel(nn.Module):
    """Embedding, LSTM, decoder. Takes tokens int64 [B, T], returns the next ones' logits [B, T, vocab_size]."""

    def __init__(
        self,
        *,
        vocab_size: int,
        embedding: int,
        hidden: int,
        layers: int,
        dropout: float = 0.0,
        tied: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocab_size, embedding, _weight=first_rows(0, vocab_size, embedding, seed, ENCODER))
        self.lstm = build_lstm(embedding, hidden, layers, dropout)
        self.decoder = nn.Linear(hidden, vocab_size)
        self.decoder.weight = nn.Parameter(first_rows(0, vocab_size, hidden, seed, DECODER))
        nn.init.zeros_(self.decoder.bias)
        if tied:
            self.decoder.weight = self.encoder.weight
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        return self.step(tokens.t(), None)[0].transpose(0, 1)

    def step(self, tokens: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Tokens [T, B] after what `state` has read: logits [T, B, vocab_size], and the state to go on from."""
        embedded = F.dropout(self.encoder(tokens), self.dropout, self.training)
        output, state = self.lstm(embedded, state)
        return self.decoder(F.dropout(output, self.dropout, self.training)), state


def build_lstm(embedding: int, hidden: int, layers: int, dropout: float) -> nn.LSTM:
    """Time comes first, as everywhere in this file; weights are drawn from torch's own generator."""
    # With one layer there is nothing between layers, and torch warns.
    return nn.LSTM(embedding, hidden, layers, dropout=dropout if layers > 1 else 0.0)


@torch.no_grad()
def sample(
    model: LanguageModel, prompt: Sequence[int], num_tokens: int, temperature: float, generator: torch.Generator
) -> list[int]:
    """`num_tokens` tokens that the model puts after `prompt` (at least one token), drawn one by one."""
    model.eval()
    logits, state = model.step(torch.tensor(prompt)[:, None], None)
    tokens: list[int] = []
    for _ in range(num_tokens):
        odds = torch.softmax(logits[-1, 0].float().cpu() / temperature, 0)
        tokens.append(int(torch.multinomial(odds, 1, generator=generator)))
        logits, state = model.step(torch.tensor(tokens[-1:])[:, None], state)
    return tokens
