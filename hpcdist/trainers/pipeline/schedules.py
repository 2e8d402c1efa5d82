"""In which order a stage computes its micro-batches, and what that can give at best. Pure functions.

Sources: GPipe, Huang et al. 2018 (arXiv:1811.06965); 1F1B, Narayanan et al. 2019 (PipeDream, arXiv:1806.03377),
with a flush after each step as in Megatron-LM (arXiv:2104.04473). Both are synchronous: all micro-batches of a step
see the same weights, and their gradients are added up in the same order. So schedules differ in time and memory
alone, not in what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class Action(NamedTuple):
    kind: Literal["forward", "backward"]
    micro_batch: int


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """All forward passes, then all backward ones: every stage holds the activations of all micro-batches."""
    return [Action("forward", m) for m in range(num_micro_batches)] + [
        Action("backward", m) for m in range(num_micro_batches)
    ]


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Each backward pass as soon as it can be: stage k of K holds the activations of K - k micro-batches."""
    num_ahead = min(num_stages - stage - 1, num_micro_batches)
    actions = [Action("forward", m) for m in range(num_ahead)]
    for done in range(num_micro_batches - num_ahead):
        actions += [Action("forward", num_ahead + done), Action("backward", done)]
    return actions + [Action("backward", m) for m in range(num_micro_batches - num_ahead, num_micro_batches)]


SCHEDULES: dict[str, Callable[[int, int, int], list[Action]]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def ideal_bubble(num_stages: int, num_micro_batches: int) -> float:
    """The part of a step that stages of equal speed wait, with either schedule."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def ideal_step_s(stage_s: Sequence[float], num_micro_batches: int) -> float:
    """The shortest step: the slowest stage works without a pause once the first micro-batch has come to it.

    Args:
        stage_s: what one micro-batch takes in each stage, forward and backward.
    """
    return sum(stage_s) + (num_micro_batches - 1) * max(stage_s)
