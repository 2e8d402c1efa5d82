"""Trainer `rnn`: a recurrent language model with its vocabulary on parameter servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.section import IS_PATH, ConfigSection, number
from hpcdist.config.trainer_declaration import Trainer


@dataclass(frozen=True, kw_only=True)
class RnnConfig(ConfigSection):
    """A recurrent language model with parameter servers (`trainer: rnn`): embedding, LSTM, decoder.

    Roles: `trainer` comes first and holds the LSTM; `parameter_server` holds rows of the embedding and of the decoder.
    """

    files: list[str] = field(default_factory=list, metadata=IS_PATH)
    """Training text: paths or globs (`**` includes subfolders); empty uses the source of Python's standard library."""
    max_corpus_mb: float = number(2.0, above=0)
    """Maximum size of the text in MB; a twentieth is held out for the perplexity; `seed` orders the files."""
    tokenizer: Literal["word", "byte"] = "word"
    """`word`: the most frequent words and separators; `byte`: 256 tokens, for any text."""
    vocab_size: int = number(10_000, least=2)
    """Number of words in the vocabulary; all others are the token `<unk>`."""
    embedding_size: int = number(200, least=1)
    """Size of the embedding."""
    hidden_size: int = number(200, least=1)
    """Size of the LSTM's hidden state."""
    num_layers: int = number(2, least=1)
    """Layers of the LSTM."""
    dropout: float = number(0.2, least=0)
    """Dropout probability after the embedding, between layers and before the decoder."""
    batch_size: int = number(20, least=1)
    """Sequences that each trainer reads in parallel."""
    bptt: int = number(35, least=1)
    """Length of truncated backpropagation through time in tokens; the hidden state is carried over, detached."""
    mode: Literal["sync", "async"] = "sync"
    """`sync` equals training in one process; `async` has two batches in flight, with weights one update old."""

    def problems(self) -> list[str]:
        """Return a message for each invalid value of this section."""
        if self.dropout < 1:
            return []
        return [f"dropout must be < 1, got {self.dropout}"]


TRAINER = Trainer(
    section=RnnConfig,
    shared_sections=("optim", "schedule"),
    roles={"trainer": 1, "parameter_server": 1},
    charts={"perplexity": ("eval/perplexity",)},
    fixed_keys=("rnn.embedding_size", "rnn.hidden_size", "rnn.num_layers", "optim.name"),
)
