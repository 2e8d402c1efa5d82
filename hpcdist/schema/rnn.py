"""A recurrent language model with parameter servers (`trainer: rnn`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RnnConfig:
    """A recurrent language model with parameter servers (`trainer: rnn`)."""
