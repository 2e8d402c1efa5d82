"""The optimizer and the learning rate schedule of a config."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hpcdist.config.schema import OptimConfig, ScheduleConfig


def build_optimizer(parameters: Iterable[Tensor], cfg: OptimConfig) -> torch.optim.Optimizer:
    """Return the fused implementation of the configured optimizer."""
    if cfg.name == "sgd":
        return torch.optim.SGD(parameters, lr=cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay, fused=True)
    kind = torch.optim.AdamW if cfg.name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)


def lr_factor(step: int, total_steps: int, cfg: ScheduleConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 0), relative to its peak.

    The schedule is a function of the step alone, so a checkpoint does not need to hold it.
    """
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    if cfg.name == "constant":
        return 1.0
    fraction = (step - cfg.warmup_steps) / max(1, total_steps - cfg.warmup_steps)
    return cfg.min_lr_factor + (1 - cfg.min_lr_factor) * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction)))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
