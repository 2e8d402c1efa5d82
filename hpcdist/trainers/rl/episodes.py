"""Returns of a policy over full greedy episodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hpcdist.trainers.rl.environments import Environments, Floats, Problem


def greedy_returns(
    problem: Problem, envs: Environments, act: Callable[[Floats], Floats], alive: Callable[[], None] = lambda: None
) -> NDArray[np.float64]:
    """Play one full greedy episode in each environment; return their returns, [n].

    Args:
        act: returns a policy's outputs [n, num_outputs] for observations [n, num_inputs].
        alive: called after every step, since steps may be slow.
    """
    envs.reset()
    returns = np.zeros(envs.num_envs)
    over = np.zeros(envs.num_envs, np.bool_)
    while not over.all():
        step = envs.step(problem.greedy(act(envs.observations)), skip=over)
        returns += np.where(over, 0.0, step.rewards)
        over |= step.terminated | step.truncated
        alive()
    return returns
