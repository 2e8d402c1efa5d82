"""Schedules: the order in which a stage processes its micro-batches, and the ideal bubble.

Sources: GPipe, Huang et al. 2018 (arXiv:1811.06965); 1F1B, Narayanan et al. 2019 (PipeDream, arXiv:1806.03377),
with a flush after each step as in Megatron-LM (arXiv:2104.04473). Both are synchronous: all micro-batches of a step
use the same weights, and their gradients are summed in the same order. So schedules differ in time and memory only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """A forward or backward pass of one micro-batch."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Return all forward passes, then all backward passes: each stage holds the activations of all micro-batches."""
    return [Action("forward", m) for m in range(num_micro_batches)] + [
        Action("backward", m) for m in range(num_micro_batches)
    ]


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Return each backward pass as early as possible: stage k of K holds the activations of K - k micro-batches."""
    num_ahead = min(num_stages - stage - 1, num_micro_batches)
    actions = [Action("forward", m) for m in range(num_ahead)]
    for done in range(num_micro_batches - num_ahead):
        actions += [Action("forward", num_ahead + done), Action("backward", done)]
    return actions + [Action("backward", m) for m in range(num_micro_batches - num_ahead, num_micro_batches)]


SCHEDULES: dict[str, Callable[[int, int, int], list[Action]]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def ideal_bubble(num_stages: int, num_micro_batches: int) -> float:
    """Return the fraction of a step that stages of equal speed are idle, with either schedule."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)
