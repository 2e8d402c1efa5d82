"""A ResNet cut into stages (`trainer: pipeline`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """A ResNet cut into stages (`trainer: pipeline`)."""
