"""DDP trainers with embedding tables on parameter servers (`trainer: hybrid`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """DDP trainers with embedding tables on parameter servers (`trainer: hybrid`)."""
