"""A recurrent language model with parameter servers (`trainer: rnn`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.schema.checks import above, at_least, check
from hpcdist.config.schema.paths import IS_PATH


@dataclass(frozen=True, kw_only=True)
class RnnConfig:
    """A recurrent language model with parameter servers (`trainer: rnn`): embedding, LSTM, decoder.

    Roles: `trainer` (first; holds the LSTM) and `server` (holds rows of the embedding and of the decoder).
    """

    files: list[str] = field(default_factory=list, metadata=IS_PATH)
    """Text to learn, as paths or globs (`**` goes into folders); none means the source of Python's standard library."""
    corpus_mb: float = 2.0
    """Read at most so many MB of it; `seed` shuffles the files."""
    held_out: float = 0.05
    """Part of the text that perplexity is measured on: whole files, or the end where there are few."""
    tokenizer: Literal["word", "byte"] = "word"
    """`word`: the commonest words and separators; `byte`: 256 tokens, any text."""
    vocab_size: int = 10_000
    """Words kept; the others are one token, `<unk>`."""
    embedding: int = 200
    """Width of the embedding."""
    hidden: int = 200
    """Width of the LSTM."""
    layers: int = 2
    """Layers of the LSTM."""
    dropout: float = 0.2
    """After the embedding, between layers and before the decoder."""
    tied: bool = False
    """Embedding and decoder are one table: half the weights on the servers, but its update cannot overlap."""
    batch_size: int = 20
    """Stretches of text that each trainer reads side by side."""
    bptt: int = 35
    """Tokens that gradients go back; the hidden state is carried on without."""
    mode: Literal["sync", "async"] = "sync"
    """`sync` equals one process, run after run; `async` has two batches in flight, of weights one update old."""
    prompt: str = "def"
    """What the sampled text begins with."""
    sample_tokens: int = 300
    """Length of the text that the final model writes (artifact `sample.txt`); 0 leaves it out."""
    temperature: float = 0.8
    """Of sampling; lower takes likelier tokens."""

    def __post_init__(self) -> None:
        problems = at_least(self, 1, "embedding", "hidden", "layers", "batch_size", "bptt")
        problems += at_least(self, 2, "vocab_size") + at_least(self, 0, "dropout", "sample_tokens")
        problems += above(self, 0, "corpus_mb", "held_out", "temperature")
        problems += [
            f"{name} must be < 1, got {value}"
            for name, value in (("held_out", self.held_out), ("dropout", self.dropout))
            if not value < 1
        ]
        if self.tied and self.embedding != self.hidden:
            problems.append(f"tied needs embedding = hidden, got {self.embedding} and {self.hidden}")
        if not self.prompt:
            problems.append("prompt must not be empty: the text goes on from it")
        check(problems)
