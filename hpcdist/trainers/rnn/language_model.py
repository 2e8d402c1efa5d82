"""A recurrent language model in one process, and the initial values of its tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor, nn

#: Rows are drawn in blocks of this size, so that their values do not depend on the number of shards.
_BLOCK = 1024
_BOUND = 0.1
ENCODER, DECODER = 0, 1


def first_rows(start: int, stop: int, width: int, seed: int, table: int) -> Tensor:
    """Return the initial rows `start` to `stop` of a table, uniform in ±0.1, float32 [stop - start, width]."""
    blocks = []
    for block in range(start // _BLOCK, -(-stop // _BLOCK)):
        generator = torch.Generator().manual_seed((((2 * seed + table) << 24) + block) % 2**63)
        blocks.append(torch.empty(_BLOCK, width).uniform_(-_BOUND, _BOUND, generator=generator))
    offset = start // _BLOCK * _BLOCK
    return torch.cat(blocks)[start - offset : stop - offset].clone()


class LanguageModel(nn.Module):
    """Embedding, LSTM and decoder: from tokens int64 [B, T] to logits of the next tokens [B, T, vocab_size]."""

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
        """Return logits [T, B, vocab_size] for tokens [T, B], and the hidden state after them."""
        embedded = F.dropout(self.encoder(tokens), self.dropout, self.training)
        output, state = self.lstm(embedded, state)
        return self.decoder(F.dropout(output, self.dropout, self.training)), state


def build_lstm(embedding: int, hidden: int, layers: int, dropout: float) -> nn.LSTM:
    """Return an LSTM for inputs [T, B, embedding], initialised from torch's global generator."""
    # With one layer torch warns about dropout, which applies between layers.
    return nn.LSTM(embedding, hidden, layers, dropout=dropout if layers > 1 else 0.0)


@torch.no_grad()
def sample(
    model: LanguageModel, prompt: Sequence[int], num_tokens: int, temperature: float, generator: torch.Generator
) -> list[int]:
    """Return `num_tokens` tokens drawn one by one from the model, after `prompt` (at least one token)."""
    model.eval()
    logits, state = model.step(torch.tensor(prompt)[:, None], None)
    tokens: list[int] = []
    for _ in range(num_tokens):
        probabilities = torch.softmax(logits[-1, 0].float().cpu() / temperature, 0)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        logits, state = model.step(torch.tensor(tokens[-1:])[:, None], state)
    return tokens
