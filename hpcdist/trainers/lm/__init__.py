"""Trainer `lm`: a decoder-only transformer, sharded over a mesh of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcdist.config.schema import Config
from hpcdist.config.section import IS_PATH, ConfigSection, number
from hpcdist.data.documents import FOLDER_SUFFIXES
from hpcdist.data.text_files import find_text_files
from hpcdist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(ConfigSection):
    """The text and its tokens. They are kept below `data.root`, for later runs with the same text and tokenizer."""

    files: list[str] = field(default_factory=list, metadata=IS_PATH)
    """Text, JSONL and Parquet files (field `text`), globs, folders; empty: the source of Python's standard library."""
    tokenizer: Literal["byte", "bpe"] = "byte"
    """`byte`: 256 tokens and an end token, for any text; `bpe`: byte-pair encoding, trained on the text."""
    vocab_size: int = number(4096, least=257)
    """Number of tokens of `tokenizer: bpe`; a small text has fewer."""
    tokenizer_file: str = field(default="", metadata=IS_PATH)
    """Instead of `tokenizer`: a `tokenizer.json` of the package tokenizers; empty: that of `model.init_from`."""
    held_out_every: int = number(20, least=2)
    """One of so many documents is held out for the evaluation; of few documents, the same fraction of their text."""
    max_bad_records: int = number(0, least=0)
    """Maximum number of corrupt records (lines, rows or row groups), which are reported and left out."""

    def problems(self) -> list[str]:
        """Return a message for each invalid value of this section."""
        if self.tokenizer_file and self.tokenizer != "byte":
            return [f"tokenizer={self.tokenizer} and tokenizer_file exclude each other: leave out one of them"]
        return []

    def missing_files(self, key: str) -> list[str]:
        """Return a message for each file that is not on this machine; `key` is that of this section."""
        problems: list[str] = []
        try:
            find_text_files(self.files, key=f"{key}.files", folder_suffixes=FOLDER_SUFFIXES)
        except ConfigError as error:
            problems += error.problems
        if self.tokenizer_file and not Path(self.tokenizer_file).is_file():
            problems.append(f"{key}.tokenizer_file: no such file: {self.tokenizer_file}")
        return problems


@dataclass(frozen=True, kw_only=True)
class LmConfig(ConfigSection):
    """A language model: a decoder-only transformer on a mesh of ranks (`trainer: lm`)."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    sequence_length: int = number(256, least=1)
    """Tokens of a window, the unit of `data.global_batch_size`."""


def _check_host(config: Config) -> list[str]:
    return config.section(LmConfig).corpus.missing_files("lm.corpus")
