"""Optimizer and learning rate as the config names them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hpcdist.config.schema import OptimConfig, ScheduleConfig


def build_optimizer(parameters: Iterable[Tensor], cfg: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer that the config names, in its fused implementation."""
    if cfg.name == "sgd":
        return torch.optim.SGD(parameters, lr=cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay, fused=True)
    kind = torch.optim.AdamW if cfg.name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)


def lr_factor(step: int, total_steps: int, cfg: ScheduleConfig) -> float:
    """The learning rate of optimizer step `step` (from 0) as a part of its peak; nothing to save or restore."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    if cfg.name == "constant":
        return 1.0
    done = (step - cfg.warmup_steps) / max(1, total_steps - cfg.warmup_steps)
    return cfg.min_lr_factor + (1 - cfg.min_lr_factor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
