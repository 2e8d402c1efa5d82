"""Reinforcement learning: an agent and observers (`trainer: rl`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """Reinforcement learning: an agent and observers (`trainer: rl`)."""
